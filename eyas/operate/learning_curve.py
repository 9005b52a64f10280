"""What the rest of the data will buy: the run's own training on its first replies, and a law through the points.

The sizes scale with the run: the largest is `operate.learning_curve_share` of its training records (10 k of 88 k), the
others a half and a fifth of it (5 k, 2 k); each is trained for all and for a quarter of its steps, which costs about a
quarter of the training itself at a share of 0.12. Before generation is over the points are made of the first replies in
a small run of their own; afterwards of the run's own order and states. `learning-curve.json` is what plan and report show.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.config import RunConfig
from eyas.draft.power_law import Law, Point, fit_law
from eyas.errors import ArtifactError
from eyas.files import read_json, write_json
from eyas.manifest import load_manifest, now
from eyas.operate.curve_result import RESULT
from eyas.operate.following import follow_progress
from eyas.operate.pipeline import both, in_child, open_run
from eyas.operate.rehearsal import first_replies, small_config
from eyas.progress import Report, recorder, silent
from eyas.workspace import RunFolder, exclusive

FOLDER = "learning-curve"
SIZES = (0.2, 0.5, 1.0)
"""Of the largest size."""
MIN_RECORDS = 128
"""The largest size of a small run, whatever its share: fewer replies say nothing."""
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0)
"""Shares of the run's records at which the result states what to expect."""
EPOCHS = (0.5, 1.0, 2.0)
"""Times the run's epochs, on all of its records."""
TOLERANCE = 0.02
"""Tokens per verification that the advice where to stop is willing to lose: two standard errors of 20,000 verifications."""


def learning_curve(run: RunFolder, config: RunConfig, *, share: float | None = None, report: Report = silent) -> dict[str, Any]:
    """Train the points, fit the law, write and return `learning-curve.json`; the same call continues one that was ended.

    Raises `ArtifactError` while there are too few replies, and the `EyasError` of whatever fails on the way.
    """
    share = config.operate.learning_curve_share if share is None else share
    folder = run.root / FOLDER
    with exclusive(run.root / f".{FOLDER}.lock", f"the learning curve of {run.root}"):
        source, total, available = _source(run, config, share, folder / "run")
        sizes = curve_sizes(total, available, share)
        log, to = run.logs / f"{FOLDER}.log", folder / "points"
        command = ["-m", "eyas.draft.curve", "--run", str(source.root), "--to", str(to), "--total", str(total)]
        look = follow_progress(to, both(recorder(run.progress), report), stage=FOLDER)
        in_child([*command, "--records", *map(str, sizes)], log=log, look=look, what="the learning curve")
        made = read_json(to / "points.json")
        result = summary([Point(**item) for item in made["points"]], total, config.benchmark.num_draft_tokens)
        result |= {"at": now(), "baseline": made["baseline"], "source": "first replies" if source.root != run.root else "whole run"}
        write_json(run.root / RESULT, result)
        shutil.rmtree(folder)
    return result


def curve_sizes(total: int, available: int, share: float) -> list[int]:
    """Records of each point, smallest first; raises `ArtifactError` where that gives fewer than two sizes."""
    largest = min(available, max(round(share * total), MIN_RECORDS))
    sizes = sorted({round(part * largest) for part in SIZES} - {0})
    if len(sizes) < 2:
        raise ArtifactError(f"{available} training replies are there, too few for a learning curve; wait for about {MIN_RECORDS}")
    return sizes


def needed_replies(run: RunFolder, config: RunConfig) -> int:
    """Accepted replies, held-out ones included, at which the curve of a run that generates can be made."""
    prompts, train = 0, 0
    for dataset in config.prompts.datasets:
        splits = load_manifest(run.prompts(dataset.name)).figures["splits"]
        prompts, train = prompts + sum(splits.values()), train + splits.get("train", 0)
    wanted = max(config.operate.learning_curve_share, MIN_RECORDS / max(1, train))
    return round(min(1.0, wanted) * prompts)


def _source(run: RunFolder, config: RunConfig, share: float, small: Path) -> tuple[RunFolder, int, int]:
    """Where order and states of the points are, training records of the whole run, and those at hand."""
    is_stored = (run.merged / "manifest.json").is_file() and (run.hidden / "manifest.json").is_file()
    if is_stored and not config.hidden.disk_budget:
        total = int(load_manifest(run.merged).figures["order_entries"])
        return run, total, total
    from eyas.hidden.extract import extract
    from eyas.merging.merge import merge

    manifests = {dataset.name: load_manifest(run.prompts(dataset.name)) for dataset in config.prompts.datasets}
    total = sum(int(manifest.figures["splits"].get("train", 0)) for manifest in manifests.values())
    part = min(1.0, max(share, MIN_RECORDS / max(1, total)))
    if not small.exists():  # else continue with the replies of the earlier attempt: its points are of them
        wanted = {name: max(1, round(manifest.counts.done * part)) for name, manifest in manifests.items()}
        temporary = small.with_name("run.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        first_replies(run, config, RunFolder(temporary), wanted=wanted, holds_out=False)
        temporary.rename(small)
    present = {path.name: 1 for path in (small / "responses").iterdir()}
    changed = small_config(config, present, draft={})
    folder = open_run(small, changed)
    merge(folder, changed)
    extract(folder, changed)
    return folder, total, int(load_manifest(folder.merged).figures["order_entries"])


def summary(points: Sequence[Point], total: int, num_draft_tokens: int) -> dict[str, Any]:
    """What the law through `points` says of a run of `total` training records, as plain data."""
    law = fit_law(points, num_draft_tokens)
    largest = max(points, key=lambda point: (point.records, point.steps))
    steps_of = largest.steps / largest.records  # of a full training, per record
    whole = law.lengths(total, steps_of * total)
    rows = []
    for share in SHARES:
        lengths = law.lengths(share * total, steps_of * share * total)
        low, median, high = law.quantiles(lengths)
        rest_low, rest, rest_high = law.quantiles(whole - lengths)
        rows.append(
            {
                "share": share,
                "records": round(share * total),
                "steps": round(steps_of * share * total),
                "accept_length": round(median, 3),
                "low": round(low, 3),
                "high": round(high, 3),
                "rest_buys": round(rest, 3),
                "rest_low": round(rest_low, 3),
                "rest_high": round(rest_high, 3),
            }
        )
    epochs = []
    for times in EPOCHS:
        low, median, high = law.quantiles(law.lengths(total, times * steps_of * total))
        epochs.append({"times": times, "accept_length": round(median, 3), "low": round(low, 3), "high": round(high, 3)})
    low, median, high = law.quantiles(law.draws[:, 0])
    return {
        "points": [
            vars(point) | {"error": round(point.error(num_draft_tokens), 4)}
            for point in sorted(points, key=lambda point: (point.records, point.steps))
        ],
        "total_records": total,
        "steps_per_record": round(steps_of, 4),
        "predictions": rows,
        "epochs": epochs,
        "limit": {"accept_length": round(median, 3), "low": round(low, 3), "high": round(high, 3)},
        "stop_share": _stop_share(law, total, steps_of),
        "tolerance": TOLERANCE,
    }


def _stop_share(law: Law, total: int, steps_of: float) -> float:
    """The smallest share, in twentieths, that loses at most `TOLERANCE` against all records (median)."""
    whole = law.lengths(total, steps_of * total)
    for twentieths in range(1, 20):
        part = twentieths / 20 * total
        if law.quantiles(whole - law.lengths(part, steps_of * part))[1] <= TOLERANCE:
            return twentieths / 20
    return 1.0
