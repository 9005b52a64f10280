"""The figures of a demo preset on this machine: minutes per phase, accept length, lossless counts, speed-up.

    python benchmarks/demo.py --preset quick --run runs/figures-quick [--record benchmarks/results]

Runs `eyas run` in a fresh folder as a user would, reads every figure from the run folder, prints one
table and, with `--record`, writes it as JSON with date and machine. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).parent.parent / "deployments" / "presets"
PHASE_FOLDERS = {
    "prompts": "prepare",
    "responses": "generate",
    "merged": "merge",
    "hidden": "extract",
    "draft": "train",
    "benchmark": "bench",
}

RESULT_KEYS = (
    *("accept_length", "all_sets", "baselines", "beats_baselines", "definition", "engine", "engine_details"),
    *("loops", "num_draft_tokens", "outputs", "predicted_accept_length", "speedup", "timing"),
)
"""The figures of results.json; what it says of folders and processes belongs to the machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["quick", "default", "full"], default="quick")
    parser.add_argument("--run", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--record", type=Path, help="folder for demo-PRESET.json")
    arguments = parser.parse_args()
    if arguments.run.exists():
        sys.exit(f"{arguments.run} exists; figures are taken from a fresh run, choose another folder")
    started = time.perf_counter()
    config = PRESETS / f"local-smollm2-{arguments.preset}.yaml"
    command = [sys.executable, "-m", "eyas.operate.cli", "run", "--config", str(config), "--run", str(arguments.run)]
    subprocess.run(command, check=True)
    figures = {"preset": arguments.preset, **machine(), "minutes": (time.perf_counter() - started) / 60, **read_run(arguments.run)}
    print(table(figures))
    if arguments.record:
        arguments.record.mkdir(parents=True, exist_ok=True)
        (arguments.record / f"demo-{arguments.preset}.json").write_text(json.dumps(figures, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Date, processor and cores: what a figure means nothing without."""
    model = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{model[0] if model else platform.processor()}, {os.cpu_count()} cores",
    }


def read_run(run: Path) -> dict[str, Any]:
    """Counts and minutes per phase from the manifests, and the benchmark's results."""
    phases: dict[str, dict[str, Any]] = {}
    for folder, phase in PHASE_FOLDERS.items():
        manifests = [json.loads(path.read_text()) for path in sorted((run / folder).rglob("manifest.json"))]
        starts = [datetime.fromisoformat(manifest["started_at"]) for manifest in manifests if manifest["started_at"]]
        ends = [datetime.fromisoformat(manifest["finished_at"]) for manifest in manifests]
        phases[phase] = {
            "done": sum(manifest["counts"]["done"] for manifest in manifests),
            "rejected": sum(manifest["counts"]["rejected"] for manifest in manifests),
            "minutes": (max(ends) - min(starts)).total_seconds() / 60 if starts else None,
        }
    results = json.loads((run / "benchmark" / "results.json").read_text())
    return {"phases": phases, "results": {key: results[key] for key in RESULT_KEYS if key in results}}


def table(figures: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = [f"{figures['preset']}: {figures['minutes']:.1f} min in all, {figures['date']}, {figures['machine']}", ""]
    lines += ["| phase | done | rejected | minutes |", "|---|---|---|---|"]
    for phase, row in figures["phases"].items():
        minutes = "" if row["minutes"] is None else f"{row['minutes']:.1f}"
        lines.append(f"| {phase} | {row['done']:,} | {row['rejected']:,} | {minutes} |")
    results = figures["results"]
    lines += ["", f"accept length {results['accept_length']}", f"predicted {results['predicted_accept_length']}"]
    lines += [f"baselines {results['baselines']}", f"outputs {results['outputs']}", f"speed-up {results['speedup']}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
