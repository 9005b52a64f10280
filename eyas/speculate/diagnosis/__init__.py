"""Why is my acceptance low? Walks the usual causes with measurements and ranks those that are found.

A wrong hand-over between target and draft is found by putting it right on purpose: the draft's hits at step 0
on held-out replies are counted as they stand and with one thing changed (a stream shifted by one, layers in another
order or one block off, another norm, another rope, another map). If a change wins clearly, that is the cause, and
what it wins is what the fault costs. Data, generalisation and serving are measured directly. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from eyas.config import RunConfig
from eyas.draft.corpus import Corpus
from eyas.draft.foreign import read_draft
from eyas.files import write_json
from eyas.speculate.diagnosis import data, handover, outcome
from eyas.speculate.diagnosis.bench import UPSTREAM, Bench, Finding
from eyas.target.spec import load_target
from eyas.target.weights import load_head
from eyas.workspace import RunFolder

__all__ = ["Finding", "diagnose", "render"]


def diagnose(run: RunFolder, config: RunConfig, draft: Path | None = None, *, traffic: Path | None = None) -> list[Finding]:
    """Findings about the run's exported draft, or the one in `draft`, causes first, the costliest at the top.

    `traffic` is JSON Lines with `output_ids` of real replies. Writes `diagnosis.json` into the run folder. Raises
    `ConfigError` or `ArtifactError` where the draft itself does not fit the target: that then is the diagnosis.
    """
    target = load_target(config.target)
    head = load_head(target, torch.float32)
    corpus = Corpus.open(run)
    found = read_draft(draft or run.export, target, head.embed_tokens)
    bench = Bench(run=run, config=config, target=target, head=head, corpus=corpus, found=found)
    findings = [
        *(data.mask(bench), data.places(bench), data.precision(bench), data.reasoning(bench, traffic)),
        *(
            handover.alignment(bench),
            *handover.layers(bench),
            handover.norm(bench),
            handover.rope(bench),
            *handover.vocabulary(bench),
        ),
        *(
            outcome.deeper_steps(bench),
            outcome.gap(bench),
            outcome.datasets(bench),
            outcome.positions(bench),
            outcome.served(bench),
        ),
    ]
    order = {"cause": 0, "unknown": 1, "fine": 2}
    findings.sort(key=lambda item: (order[item.verdict], -item.cost))
    write_json(run.root / "diagnosis.json", [asdict(item) for item in findings])
    return findings


def render(findings: Sequence[Finding]) -> str:
    """The findings as text, causes first."""
    causes = [item for item in findings if item.verdict == "cause"]
    lines = [f"{len(causes)} of {len(findings)} causes found" + (", the costliest first:" if causes else ".")]
    for item in findings:
        cost = f" (costs about {item.cost:.1%} of drafted tokens)" if item.verdict == "cause" and item.cost else ""
        if item.cost == UPSTREAM:
            cost = " (mend it first: all else was measured on these states)"
        lines.append(f"[{item.verdict}] {item.cause}: {item.seen}; wanted {item.bound}{cost}")
        if item.verdict == "cause":
            lines.append(f"        {item.advice}")
    return "\n".join(lines)
