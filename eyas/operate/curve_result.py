"""`learning-curve.json` as others show it: read, said in sentences, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.errors import ArtifactError
from eyas.files import read_json
from eyas.workspace import RunFolder

RESULT = "learning-curve.json"
_KEYS = {"points", "total_records", "predictions", "epochs", "stop_share", "tolerance"}


def read_curve(run: RunFolder) -> dict[str, Any] | None:
    """The learning curve of `run`, None while there is none or it cannot be read."""
    try:
        result = read_json(run.root / RESULT)
    except ArtifactError:
        return None
    return result if isinstance(result, dict) and result.keys() >= _KEYS else None


def advice(result: Mapping[str, Any]) -> str:
    """What the curve says, in two sentences."""
    at = {row["share"]: row for row in result["predictions"]}
    whole, half = at[1.0], at[0.5]
    text = (
        f"all {whole['records']:,} training records are expected to give accept length {_range(whole)}; half of them "
        f"{_range(half)}, so the second half buys {half['rest_buys']:+.2f} ({half['rest_low']:+.2f} to {half['rest_high']:+.2f})"
    )
    share = result["stop_share"]
    if share < 1:
        text += f". {share:.0%} ({round(share * whole['records']):,} records) lose at most {result['tolerance']:g}: enough"
    else:
        text += f". No smaller share stays within {result['tolerance']:g}: take all"
    if baseline := result.get("baseline"):
        gain = whole["accept_length"] - baseline["accept_length"]
        text += (
            f". The baseline draft reaches {baseline['accept_length']:.2f} on the same held-out replies: {gain:+.2f} to be gained"
        )
    return text


def _range(row: dict[str, Any]) -> str:
    return f"{row['accept_length']:.2f} (80 %: {row['low']:.2f}–{row['high']:.2f})"


def render_curve(result: Mapping[str, Any]) -> str:
    """The points and what they predict, as Markdown."""
    lines = [f"{advice(result)[0].upper()}{advice(result)[1:]}.", ""]
    lines += ["| measured on records | steps | accept length | standard error |", "|---|---|---|---|"]
    lines += [f"| {p['records']:,} | {p['steps']:,} | {p['accept_length']:.3f} | {p['error']:.3f} |" for p in result["points"]]
    lines += ["", "| expected of records | steps | accept length | 80 % | the rest buys |", "|---|---|---|---|---|"]
    for row in result["predictions"]:
        lines.append(
            f"| {row['records']:,} ({row['share']:.0%}) | {row['steps']:,} | {row['accept_length']:.2f} | "
            f"{row['low']:.2f}–{row['high']:.2f} | {row['rest_buys']:+.2f} ({row['rest_low']:+.2f} to {row['rest_high']:+.2f}) |"
        )
    lines += [
        f"| all, {row['times']:g}× the epochs | | {row['accept_length']:.2f} | {row['low']:.2f}–{row['high']:.2f} | |"
        for row in result["epochs"]
        if row["times"] != 1
    ]
    return "\n".join(lines)
