"""Phase 6: serve the draft, measure what it gains, and decide whether it may be deployed.

Where the two sides come from is `eyas.speculate.servers`' matter. Work is kept per block while it is made
(`blocks-<fingerprint>/`), so a killed benchmark goes on with the blocks that are missing, and per set when
it is whole (`raw-<set>-<fingerprint>.json`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import ValidationError

from eyas.config import RunConfig
from eyas.errors import ArtifactError
from eyas.files import digest_file, digest_json, read_json, write_bytes, write_json
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, load_manifest, now
from eyas.progress import Progress, Report, silent
from eyas.prompts.benchsets import benchmark_identity
from eyas.speculate.baselines import BigramTable
from eyas.speculate.blocks import BlockStore
from eyas.speculate.canary import fits_here
from eyas.speculate.config import BenchmarkConfig
from eyas.speculate.contexts import by_context
from eyas.speculate.deploy import Check, decide, reservations, result_checks
from eyas.speculate.launch import DEFAULT_URL, ENVIRONMENT_FILE, compose_file, environment_file, launch_command, server_flags
from eyas.speculate.lossless import LocalJudge, Measure, load_judge
from eyas.speculate.measure import Predict, collect, compare, num_blocks
from eyas.speculate.predict import Predictor
from eyas.speculate.report import render_report
from eyas.speculate.results import SetMeasurement, summarise
from eyas.speculate.server_judge import ServerJudge
from eyas.speculate.servers import Serve, Servers, open_servers
from eyas.speculate.sets import HELDOUT, BenchmarkPrompt, check_set_names, load_set, set_name
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import BaselineRun, RunFolder, exclusive

STAGE = "benchmark"
VERSION = 5
_CACHE_SLACK_TOKENS = 128
"""Per request in flight: rounding to pages, and drafts under way."""

logger = logging.getLogger(__name__)


def benchmark(
    run: RunFolder, config: RunConfig, report: Report = silent, *, api_key: str = "", serve: Serve | None = None
) -> Manifest:
    """Measure the exported draft of `run` and write `benchmark/`; returns its manifest, at once if nothing changed.

    `serve` brings the one host of a real target into serving with the draft and without, by restart.

    Raises `ConfigError` for a set or server that does not fit, `ServerError` where a server fails,
    `ArtifactError` where an input is not what its manifest says.
    """
    check_set_names(config.benchmark.sets)
    spec = load_target(config.target)
    inputs = _inputs(run, config, spec)
    wanted = fingerprint(STAGE, VERSION, inputs=inputs, config=_config_that_counts(config))
    if finished := finished_manifest(run.benchmark, wanted):
        return finished
    started_at = now()
    with exclusive(run.benchmark / ".lock", "this run's benchmark"):
        _write_launch(run, config, spec)
        measurements = _measure_all(run, config, spec, wanted, report, api_key, serve)
        results = summarise(
            measurements,
            engine=config.server.kind,
            num_draft_tokens=config.benchmark.num_draft_tokens,
            min_verifications=config.benchmark.min_verifications,
        )
        if (merged := _merged(run)) is not None:
            results["trained_tokens"] = int(merged.figures["length_quantiles"]["p100"])
            rows = [row for item in measurements for row in item.rows]
            results["by_context"] = by_context(rows, results["trained_tokens"])
        if results["predicted_accept_length"] is None:
            results["predicted_accept_length"] = _figure_of_training(run)
        identity = [Check.model_validate(check) for check in measurements[0].identity]
        decision = decide(identity + result_checks(results, config.benchmark), reservations(results))
        results["deployment"] = decision.model_dump()
        _write_outputs(run, results)
        num_rows = sum(len(measurement.rows) for measurement in measurements)
        names = ["results.json", "report.md", *LAUNCH_FILES]
        names += [_raw_path(run, source, wanted).name for source in config.benchmark.sets]
        manifest = Manifest(
            stage=STAGE,
            stage_version=VERSION,
            fingerprint=wanted,
            inputs=inputs,
            config=_config_that_counts(config),
            counts=Counts.of(done=num_rows),
            files=file_entries(run.benchmark, names),
            figures={
                "accept_length": results["accept_length"]["overall"],
                "predicted_accept_length": results["predicted_accept_length"],
                "speedup": results["speedup"],
                "outputs": results["outputs"],
                "serves_draft": decision.serves_draft,
            },
            started_at=started_at,
        ).write(run.benchmark)
        for path in run.benchmark.glob("raw-*.json"):  # of earlier drafts and settings
            if path.name not in names:
                path.unlink()
        for folder in run.benchmark.glob("blocks-*"):
            shutil.rmtree(folder)
    report(Progress(stage=STAGE, done=num_rows, total=num_rows, unit="prompts", figures=_shown(results), is_final=True))
    return manifest


def _inputs(run: RunFolder, config: RunConfig, spec: TargetSpec) -> dict[str, str]:
    """Digests of what is measured: the exported files, the prompts of every set, the training data of the bigram table."""
    draft = {f"draft/export/{name}": digest_file(_existing(run.export / name)) for name in ("config.json", "model.safetensors")}
    prompts = {f"prompts/{item.name}": load_manifest(run.prompts(item.name)).digest() for item in config.prompts.datasets}
    sets = {source: digest_json(benchmark_identity(source)) for source in config.benchmark.sets if source != HELDOUT}
    merged = _merged(run)
    return draft | prompts | sets | ({"merged": merged.digest()} if merged else {}) | {"target": spec.fingerprint}


def _merged(run: RunFolder) -> Manifest | None:
    """The manifest of the training data; None for another's draft, which is measured before there are any."""
    return None if isinstance(run, BaselineRun) else load_manifest(run.merged)


def _figure_of_training(run: RunFolder) -> float | None:
    """The held-out replay that selected the checkpoint, where the served replies themselves cannot be replayed."""
    figure = load_manifest(run.export).figures.get("accept_length")
    return None if figure is None else float(figure)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; run the phase that exports the draft first")
    return path


def _config_that_counts(config: RunConfig) -> dict[str, Any]:
    return {
        "benchmark": config.benchmark.model_dump(mode="json"),
        "server": config.server.model_dump(mode="json", include={"kind", "urls", "engine"}),
    }


def _measure_all(
    run: RunFolder, config: RunConfig, spec: TargetSpec, wanted: str, report: Report, api_key: str, serve: Serve | None
) -> list[SetMeasurement]:
    kept = [_load_raw(_raw_path(run, source, wanted)) for source in config.benchmark.sets]
    found = [measurement for measurement in kept if measurement is not None]
    if len(found) == len(kept):
        return found
    prompts = {set_name(source): load_set(run, config, spec, source) for source in config.benchmark.sets}
    steps = _Steps(report, num_blocks(config.benchmark, {name: len(items) for name, items in prompts.items()}))
    store = BlockStore(run.benchmark / f"blocks-{wanted[:12]}")
    with ExitStack() as stack:
        cache_tokens = _cache_tokens(config, prompts)
        servers = open_servers(run, config, spec, stack, cache_tokens=cache_tokens, api_key=api_key, serve=serve)
        blocks, asked = collect(prompts, servers, config.benchmark, store, steps)
        measure_tie, predict = _truths(run, config, spec, servers)
        if isinstance(measure_tie, ServerJudge):
            unknown: Predict = lambda replies: [None] * len(replies)  # noqa: E731
            compare(blocks, asked, config.benchmark, measure_tie=measure_tie.note, bigrams=None, predict=unknown)
            measure_tie.ask()
        measurements = compare(
            blocks, asked, config.benchmark, measure_tie=measure_tie, bigrams=_bigram_table(run), predict=predict
        )
        identity = [check.model_dump() for checks in servers.account.identity.values() for check in checks]
        update = {"engine": servers.account.details, "identity": identity}
    measurements = [measurement.model_copy(update=update) for measurement in measurements]
    for source, measurement in zip(config.benchmark.sets, measurements, strict=True):
        write_json(_raw_path(run, source, wanted), measurement.model_dump(), indent=None)
    return measurements


def _cache_tokens(config: RunConfig, prompts: dict[str, list[BenchmarkPrompt]]) -> int:
    """Tokens that the cache of one engine must hold, so that two of them fit side by side: what is in flight at most."""
    longest = max(len(prompt.input_ids) for items in prompts.values() for prompt in items) + config.benchmark.max_new_tokens
    return config.server.engine.max_total_tokens or config.benchmark.most_in_flight * (longest + _CACHE_SLACK_TOKENS)


def _truths(run: RunFolder, config: RunConfig, spec: TargetSpec, servers: Servers) -> tuple[Measure, Predict]:
    """How ties are measured and replies replayed: with the target in this process where it fits, or not at all.

    Real servers are judged through themselves: their kernels are what may flip a tie.
    """
    num_draft_tokens = config.benchmark.num_draft_tokens
    through_servers = ServerJudge(servers, config.benchmark.shape)
    if not fits_here(spec):
        logger.warning("target %s does not fit here: no replay of the served replies", spec.folder)
        return through_servers, lambda replies: [None] * len(replies)
    model = load_judge(spec, servers.account.dtype)
    predict = Predictor(run.export, spec, model, num_draft_tokens).counts
    return (LocalJudge(model, num_draft_tokens) if config.server.kind == "embedded" else through_servers), predict


class _Steps:
    """Counts the blocks of each set and reports each."""

    def __init__(self, report: Report, totals: dict[str, int]) -> None:
        self._report, self._totals, self._done = report, totals, dict.fromkeys(totals, 0)

    def __call__(self, name: str, word: str) -> None:
        self._done[name] += 1
        done, total = self._done[name], self._totals[name]
        figures: dict[str, float | int | str] = {"last": word}
        self._report(
            Progress(stage=STAGE, name=name, done=done, total=total, unit="blocks", figures=figures, is_final=done == total)
        )


def _raw_path(run: RunFolder, source: str, wanted: str) -> Path:
    return run.benchmark / f"raw-{set_name(source)}-{wanted[:12]}.json"


def _load_raw(path: Path) -> SetMeasurement | None:
    try:
        return SetMeasurement.model_validate(read_json(path))
    except (ArtifactError, ValidationError):
        return None  # absent or cut short: measured again


def _bigram_table(run: RunFolder) -> BigramTable | None:
    if _merged(run) is None:
        return None
    file = pq.ParquetFile(run.merged / "tokens.parquet")

    def records() -> Iterator[tuple[Any, Any]]:
        for batch in file.iter_batches(batch_size=256, columns=["split", "input_ids", "loss_mask"]):
            for split, input_ids, loss_mask in zip(
                *(batch.column(name) for name in ("split", "input_ids", "loss_mask")), strict=True
            ):
                if split.as_py() == "train":
                    yield np.asarray(input_ids.values), np.asarray(loss_mask.values)

    return BigramTable.from_records(records())


LAUNCH_FILES = ("launch.sh", "compose.yaml", "launch-without-draft.sh", "compose-without-draft.yaml", ENVIRONMENT_FILE)


def _write_launch(run: RunFolder, config: RunConfig, spec: TargetSpec) -> None:
    """How an operator starts the target with the draft and without, by hand or by compose, at the first URL of each."""
    wanted: BenchmarkConfig = config.benchmark
    key_file = str(Path(config.server.api_key_file).expanduser().absolute()) if config.server.api_key_file else ""
    contents = []
    for draft, urls in ((run.export.resolve(), wanted.draft_urls or config.server.urls), (None, config.server.urls)):
        flags = server_flags(
            spec.folder,
            draft,
            hardware=wanted.hardware,
            shape=wanted.shape,
            tensor_parallel=wanted.tensor_parallel,
            max_running_requests=wanted.most_in_flight,
            url=urls[0] if urls else DEFAULT_URL,
            trusts_remote_code=bool(spec.remote_code_sha256),
        )
        contents += [
            launch_command(flags, key_file=key_file),
            compose_file(flags, hardware=wanted.hardware, key_file=key_file),
        ]
    contents.append(environment_file(wanted.hardware, tensor_parallel=wanted.tensor_parallel))
    for name, content in zip(LAUNCH_FILES, contents, strict=True):
        write_bytes(run.benchmark / name, content.encode())


def _write_outputs(run: RunFolder, results: dict[str, Any]) -> None:
    write_bytes(run.benchmark / "report.md", render_report(results).encode())
    write_json(run.benchmark / "results.json", results)


def _shown(results: dict[str, Any]) -> dict[str, float | int | str]:
    return {
        "accept_length": round(results["accept_length"]["overall"], 3),
        "speedup": round(results["speedup"], 3),
        "wrong": results["outputs"]["wrong"],
    }
