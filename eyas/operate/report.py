"""The report of a run: `report.md` to read anywhere, `report.html` with plots, self-contained, light and dark.

It can be made at any moment: what has not happened yet is left out. Every number is read from a file of
the run folder, which its section names; nothing is computed here but sums, shares and differences of times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from eyas.errors import ArtifactError
from eyas.files import read_json, write_bytes
from eyas.manifest import Manifest, load_manifest, verify_manifest
from eyas.operate import plots, series
from eyas.operate.baseline import baseline_said
from eyas.operate.curve_result import advice, read_curve
from eyas.operate.phases import PHASES, TITLES, Phase, phase_folders
from eyas.operate.prompt_accounts import prompt_accounts
from eyas.operate.status import RunStatus, read_status
from eyas.operate.wording import duration, number, size
from eyas.speculate.report import findings, span
from eyas.workspace import RunFolder


def write_report(run: RunFolder) -> tuple[Path, Path]:
    """Write `report.md` and `report.html` into the run folder; raises `ConfigError` if it holds no run."""
    facts = gather(run)
    environment = Environment(
        loader=PackageLoader("eyas.operate"),
        autoescape=lambda name: bool(name) and ".html" in str(name),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "duration": duration,
        "size": size,
        "percent": lambda share: f"{share:.1%}",
        "advice": advice,
        "span": span,
    }
    written = []
    for name in ("report.md", "report.html"):
        path = run.root / name
        write_bytes(path, environment.get_template(f"{name}.j2").render(facts).encode())
        written.append(path)
    return written[0], written[1]


def gather(run: RunFolder) -> dict[str, Any]:
    """Everything the templates show, each part with the files it comes from; absent parts are None or empty."""
    status = read_status(run.root)
    about = read_json(run.run_json)
    names = [dataset["name"] for dataset in about["config"]["prompts"]["datasets"]]
    plan = _optional(run.plan_json)
    results = _results(run)
    rows, replays = series.metrics(run)
    return {
        "name": status.name,
        "state": status.state,
        "at": status.at,
        "about": about,
        "status": status,
        "plan": plan,
        "tiles": _tiles(run, status, results),
        "phases": [_phase(run, phase, names, status) for phase in PHASES],
        "datasets": [_dataset(run, name) for name in names if _manifest(run.prompts(name)) or _manifest(run.responses(name))],
        "accounts": prompt_accounts(run, names),
        "rejects": _rejects(run, names),
        "training": _training(run, rows, replays),
        "learning_curve": read_curve(run),
        "baseline": baseline_said(run),
        "diagnosis": _diagnosis(run),
        "rehearsal": _optional(run.root / "rehearsal.json"),
        "results": results or None,
        "accept_rows": _accept_rows(results),
        "export": str(run.export) if (run.export / "config.json").is_file() else "",
        "plots": _plots(run, names, rows, replays, results),
        "deployment": results.get("deployment"),
        "engines": _optional(run.benchmark / "engines.json"),
        "findings": findings(results) if results else [],
    }


def _plots(
    run: RunFolder, names: list[str], rows: list[dict[str, Any]], replays: list[dict[str, Any]], results: dict[str, Any]
) -> dict[str, Markup]:
    drawn: dict[str, str] = {}
    if lengths := series.lengths(run, names):
        drawn["lengths"] = plots.length_histograms(lengths)
    if throughput := series.throughput(run):
        drawn["throughput"] = plots.throughput_curve(throughput)
    if forecast := series.forecast_history(run):
        drawn["forecast"] = plots.forecast_curve(forecast)
    if rows or replays:
        drawn["training"] = plots.training_curves(rows, replays)
    if curve := read_curve(run):
        trained = _manifest(run.draft)
        best = max((float(row["accept_length"]) for row in replays), default=None)
        reached = (trained.counts.done, best) if trained and best is not None else None
        drawn["learning_curve"] = plots.learning_curve(curve, reached)
    if intervals := _intervals(results):
        drawn["accept"] = plots.accept_lengths(intervals)
    if len(results.get("grid", [])) > 1 or len(results.get("timing", [])) > 1:
        drawn["grid"] = plots.speedup_curves(results["grid"])
    return {name: Markup(svg) for name, svg in drawn.items()}  # drawn by us from numbers and escaped names


def _tiles(run: RunFolder, status: RunStatus, results: dict[str, Any]) -> list[dict[str, str]]:
    """The figures of the first screen: label, value, what stands behind it, and the file."""
    tiles = []
    counts = {phase.phase: phase.counts for phase in status.phases}
    if counts["prepare"]:
        prompts, done = counts["prepare"]["done"], counts["generate"].get("done")
        value = f"{prompts if done is None else done:,}"
        note = "prompts prepared" if done is None else f"accepted responses to {prompts:,} prompts"
        tiles.append(_tile("Samples", value, note, "prompts/*/manifest.json, responses/*/manifest.json"))
    if accept := results.get("accept_length"):
        note = f"95 %: {span(accept['interval_95'], 2)}, {accept['num_verifications']:,} verifications, {accept['overall_pools']}"
        tiles.append(_tile("Accept length", f"{accept['overall']:.2f}", note, "benchmark/results.json accept_length"))
    if predicted := results.get("predicted_accept_length"):
        tiles.append(
            _tile("Predicted", f"{predicted:.2f}", "accept length of the replay", "benchmark/results.json predicted_accept_length")
        )
    if speedup := results.get("speedup"):
        point = (results.get("timing") or [{}])[0]
        spread = f"{point['speedup_min']:.2f}–{point['speedup_max']:.2f}" if point else ""
        note = f"at {point['concurrency']} in flight; {spread} over {point['block_pairs']} pairs of blocks" if point else ""
        tiles.append(_tile("Speed-up", f"{speedup:.2f}×", note, "benchmark/results.json speedup"))
    if outputs := results.get("outputs"):
        value = f"{outputs['identical']:,} of {outputs['checked']:,}"
        note = "with the draft as without, counted and timed"
        tiles.append(
            _tile(
                "Identical replies",
                value,
                f"{note}; {outputs['tie']} ties, {outputs['wrong']} wrong",
                "benchmark/results.json outputs",
            )
        )
    tiles.append(_tile("Disk", size(status.disk["used_bytes"]), f"{size(status.disk['free_bytes'])} free", "the run folder"))
    return tiles


def _tile(label: str, value: str, note: str, source: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note, "source": source}


def _phase(run: RunFolder, phase: Phase, names: list[str], status: RunStatus) -> dict[str, Any]:
    item = next(found for found in status.phases if found.phase == phase)
    took = "" if item.worked_s is None else duration(item.worked_s)
    folders = phase_folders(run, phase, names)
    pattern = (
        f"{folders[0].relative_to(run.root).parts[0]}/*/"
        if len(folders) > 1 and phase != "train"
        else f"{_relative(run, folders)}/"
    )
    return item.model_dump() | {"title": TITLES[phase], "took": took, "source": f"{pattern}manifest.json"}


def _relative(run: RunFolder, folders: list[Path]) -> str:
    return str(folders[0].relative_to(run.root)) if folders else ""


def _dataset(run: RunFolder, name: str) -> dict[str, Any]:
    prompts, responses = _manifest(run.prompts(name)), _manifest(run.responses(name))
    figures = responses.figures if responses else {}
    tokens = prompts.figures.get("tokens") if prompts else None
    return {
        "name": name,
        "license": prompts.figures.get("license", "") if prompts else "",
        "rows": prompts.counts.num_in if prompts else None,
        "prompts": prompts.counts.done if prompts else None,
        "splits": prompts.figures.get("splits", {}) if prompts else {},
        "prompt_median": tokens.get("p50") if isinstance(tokens, dict) else None,
        "responses": responses.counts.model_dump(by_alias=True) if responses else None,
        "figures": figures,
    }


def _rejects(run: RunFolder, names: list[str]) -> list[dict[str, Any]]:
    """Reasons with their counts, per phase, the most frequent first, and the datasets they come from."""
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        found: dict[str, dict[str, int]] = {}
        for folder in phase_folders(run, phase, names):
            if (manifest := _manifest(folder)) is not None:
                for reason, count in manifest.rejected_by_reason.items():
                    found.setdefault(reason, {})[manifest.name] = count
        rows += [
            {
                "phase": phase,
                "reason": reason,
                "count": sum(counts.values()),
                "datasets": ", ".join(f"{name} {count:,}" for name, count in counts.items() if name),
            }
            for reason, counts in sorted(found.items(), key=lambda pair: -sum(pair[1].values()))
        ]
    return rows


def _training(run: RunFolder, rows: list[dict[str, Any]], replays: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not rows and not replays:
        return None
    best = max(replays, key=lambda row: float(row["accept_length"]), default=None)
    trained = _manifest(run.draft)
    baseline = trained.figures.get("baseline") if trained else None
    return {"last": rows[-1] if rows else None, "best": best, "num_replays": len(replays), "baseline": baseline}


def _diagnosis(run: RunFolder) -> list[dict[str, Any]]:
    try:
        found = read_json(run.root / "diagnosis.json")
    except ArtifactError:
        return []
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _accept_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per dataset of the held-out prompts, then one per set."""
    rows = []
    for kind in ("per_dataset", "per_set"):
        rows += [{"group": name, "kind": kind, **item} for name, item in results.get(kind, {}).items()]
    return rows


def _intervals(results: dict[str, Any]) -> list[plots.Interval]:
    rows = []
    for item in _accept_rows(results):
        if item["num_verifications"]:
            marks = {name.replace("_", " "): value for name, value in item["baselines"].items()}
            if item.get("predicted_accept_length"):
                marks["predicted"] = item["predicted_accept_length"]
            name = item["group"] if item["kind"] == "per_dataset" else f"set {item['group']}"
            rows.append(plots.Interval(name, item["accept_length"], item["interval_95"], marks))
    return rows


def _results(run: RunFolder) -> dict[str, Any]:
    """What the benchmark found, if its files are what its manifest says; otherwise empty."""
    try:
        verify_manifest(run.benchmark)
    except ArtifactError:
        return {}
    return _optional(run.benchmark / "results.json")


def _manifest(folder: Path) -> Manifest | None:
    try:
        return load_manifest(folder)
    except ArtifactError:
        return None


def _optional(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except ArtifactError:
        return {}
    return value if isinstance(value, dict) else {}
