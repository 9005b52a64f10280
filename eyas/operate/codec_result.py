"""`hidden/codecs.json` as others show it: read, which codecs passed, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.errors import ArtifactError
from eyas.files import read_json
from eyas.hidden.codec import CODECS, CodecName
from eyas.workspace import RunFolder

RESULT = "codecs.json"
_KEYS = {"bytes_per_token", "share_of_bf16", "aux_error", "agreement", "ties", "kept_mass", "replay", "faults"}


def read_codecs(run: RunFolder, target: str) -> dict[str, Any] | None:
    """The probe's figures for the target with fingerprint `target`; None while there are none, or only another target's."""
    try:
        result = read_json(run.hidden / RESULT)
    except ArtifactError:
        return None
    if not isinstance(result, dict) or result.get("target") != target or not isinstance(result.get("codecs"), dict):
        return None
    is_whole = all(name in CODECS and isinstance(row, dict) and row.keys() >= _KEYS for name, row in result["codecs"].items())
    return result if is_whole else None


def passed(result: Mapping[str, Any] | None) -> dict[CodecName, Mapping[str, Any]]:
    """The figures of the codecs that passed, the largest first."""
    rows = (result or {}).get("codecs", {})
    return {name: rows[name] for name in CODECS if name in rows and not rows[name]["faults"]}


def kept_in_words(row: Mapping[str, Any]) -> str:
    """What a codec keeps, in a few words."""
    if replayed := row["replay"]:
        low, high = replayed["interval_95"]
        return f"accept length {replayed['change']:+.1%} (95 %: {low:+.1%} to {high:+.1%})"
    return "accept length unknown before there is a draft"


def render_codecs(result: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    by = f"the draft in {result['draft']}" if result["draft"] else "no draft yet"
    lines = [
        f"Measured on {result['records']:,} replies ({result['tokens']:,} tokens) of this target, {by}.",
        "",
        "| codec | bytes a token | of bf16 | error of the three states | target's tokens kept | replayed | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["codecs"].items():
        cells = [
            name,
            f"{row['bytes_per_token']:,}",
            f"{row['share_of_bf16']:.0%}",
            " / ".join(f"{error:.1%}" for error in row["aux_error"]),
            f"{row['agreement'] + row['ties']:.2%}" if row["agreement"] is not None else f"all; {row['kept_mass']:.1%} of the mass",
            kept_in_words(row),
            "; ".join(row["faults"]) or f"passed: `hidden.codec={name}`",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
