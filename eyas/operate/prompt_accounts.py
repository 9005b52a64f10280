"""What phase 1 made of each dataset's rows, from `prompts/<dataset>/manifest.json`: for the report and the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.errors import ArtifactError
from eyas.manifest import Manifest, load_manifest
from eyas.operate.wording import bars
from eyas.workspace import RunFolder

_DUPLICATES = ("duplicate", "near_duplicate")
_CONTAMINATED = "contaminated"


@dataclass(frozen=True, kw_only=True)
class PromptAccount:
    """One dataset: rows read, prompts kept, what became of the others, lengths in tokens, and the first prompts' beginnings."""

    name: str
    read: int
    kept: int
    duplicates: int
    contaminated: int
    rejected: dict[str, int]
    """Every other reason with its count, the most frequent first."""
    p50: int
    p90: int
    longest: int
    histogram: str
    """Prompts per range of lengths as block characters; ranges double from 16 tokens on and are those of the whole run."""
    longest_range: int
    """Upper bound of the last range, in tokens."""
    samples: list[str]

    def row(self) -> dict[str, Any]:
        """The account as a row of a table; numbers and names of reasons, no text of a prompt."""
        return {
            "dataset": self.name,
            "read": self.read,
            "kept": self.kept,
            "duplicates": self.duplicates,
            "contaminated": self.contaminated,
            "rejected": ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in self.rejected.items()),
            "p50": self.p50,
            "p90": self.p90,
            "max": self.longest,
            f"0 … {self.longest_range:,} tokens": self.histogram,
        }


def prompt_accounts(run: RunFolder, names: list[str]) -> list[PromptAccount]:
    """Accounts of the datasets that have been prepared, in the order of `names`."""
    manifests = [manifest for name in names if (manifest := _prepared(run, name)) is not None]
    groups = [manifest.figures.get("histogram", []) for manifest in manifests]
    width = max(map(len, groups), default=0)
    last = max((group[-1]["to"] for group in groups if group), default=0)
    return [_account(manifest, group, width, last) for manifest, group in zip(manifests, groups, strict=True)]


def _account(manifest: Manifest, groups: list[dict[str, int]], width: int, last: int) -> PromptAccount:
    reasons, figures = manifest.rejected_by_reason, manifest.figures
    tokens = figures.get("tokens", {})
    others = {reason: count for reason, count in reasons.items() if reason not in (*_DUPLICATES, _CONTAMINATED)}
    return PromptAccount(
        name=manifest.name,
        read=figures.get("rows", manifest.counts.num_in),
        kept=manifest.counts.done,
        duplicates=sum(reasons.get(reason, 0) for reason in _DUPLICATES),
        contaminated=reasons.get(_CONTAMINATED, 0),
        rejected=dict(sorted(others.items(), key=lambda item: -item[1])),
        p50=tokens.get("p50", 0),
        p90=tokens.get("p90", 0),
        longest=tokens.get("max", 0),
        histogram=bars([group["prompts"] for group in groups]).ljust(width),
        longest_range=last,
        samples=figures.get("samples", []),
    )


def _prepared(run: RunFolder, name: str) -> Manifest | None:
    try:
        return load_manifest(run.prompts(name))
    except ArtifactError:
        return None
