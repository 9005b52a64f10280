"""The draft to beat, benchmarked before the long phases: what a run must gain is known before it costs anything.

Replays on held-out replies need replies and states; this needs prompts only, and serves the draft as ours will be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eyas.config import RunConfig
from eyas.errors import ArtifactError
from eyas.files import read_json
from eyas.manifest import Manifest
from eyas.speculate.report import span
from eyas.workspace import BaselineRun, RunFolder


def benchmark_baseline(run: RunFolder, config: RunConfig, *, api_key: str = "", say: Callable[[str], None]) -> Manifest | None:
    """Measure `draft.baseline` as phase 6 measures our draft, the headline's shape alone; writes `baseline/benchmark/`.

    None without a baseline, and where nobody but a person could serve it: `say` tells which replay will stand in. An
    unchanged benchmark is kept. Raises what `eyas.speculate.benchmark.benchmark` raises.
    """
    if not config.draft.baseline:
        return None
    host = config.operate.host
    if config.server.kind != "embedded" and (host.kind != "command" or "draft" not in host.commands):
        say(
            "the baseline draft is not benchmarked before generation: operate.host has no command for mode draft; "
            "it is replayed on the first replies and before the training"
        )
        return None
    from eyas.operate.hosts import host_of, sides_of
    from eyas.speculate.benchmark import benchmark

    short = config.benchmark.model_copy(update={"grid": [], "sampled_replies": 0, "draft_urls": []})
    baseline = BaselineRun(run.root)
    serve = sides_of(host_of(run, config, api_key=api_key, say=say), baseline.export)
    return benchmark(baseline, config.model_copy(update={"benchmark": short}), api_key=api_key, serve=serve)


def baseline_said(run: RunFolder) -> str:
    """What the benchmark of the baseline found, and what the run's own draft gained over it; empty while there is none."""
    theirs, ours = _results(BaselineRun(run.root)), _results(run)
    if theirs is None:
        return ""
    accept = theirs["accept_length"]
    text = (
        f"The baseline draft (`draft.baseline`), served before generation: accept length {accept['overall']:.3f} "
        f"(95 %: {span(accept['interval_95'])}, {accept['num_verifications']:,} verifications)"
        f"{_speedup(theirs)}."
    )
    if ours is None:
        return text
    gained = ours["accept_length"]["overall"] - accept["overall"]
    return (
        f"{text} This run's draft: {ours['accept_length']['overall']:.3f}{_speedup(ours)}: {gained:+.3f} tokens per verification."
    )


def _speedup(results: dict[str, Any]) -> str:
    return f", speed-up {results['speedup']:.2f}×" if results["speedup"] else ""


def _results(run: RunFolder) -> dict[str, Any] | None:
    try:
        found = read_json(run.benchmark / "results.json")
    except ArtifactError:
        return None
    return found if isinstance(found, dict) and {"accept_length", "speedup"} <= found.keys() else None
