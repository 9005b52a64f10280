"""The probe as a step of a run: on replies of its own datasets, once per store, remembered in `probe.json`."""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch

from eyas.config import RunConfig
from eyas.errors import ArtifactError, ConfigError
from eyas.files import read_json, write_json
from eyas.generation.sampling import resolve_sampling
from eyas.hidden.kind import StoreKind
from eyas.hidden.locks import held
from eyas.hidden.plan import checked_lines, record_rules
from eyas.hidden.probe import (
    MAX_SERVER_STATE_ERROR,
    MAX_STATE_ERROR,
    ProbeReply,
    check_blocks,
    check_greedy,
    probe_states,
)
from eyas.hidden.sources.protocol import Source
from eyas.hidden.sources.transformers import TransformersSource
from eyas.manifest import MANIFEST_NAME
from eyas.merging.records import RESPONSES_NAME
from eyas.target.spec import TargetSpec
from eyas.target.weights import load_head
from eyas.workspace import RunFolder

PROBE_NAME = "probe.json"
_PLAIN_REPLIES = 2
_MEMORY_SHARE = 0.7

logger = logging.getLogger(__name__)


def ensure_proven(run: RunFolder, config: RunConfig, spec: TargetSpec, kind: StoreKind, source: Source) -> dict[str, Any]:
    """Prove `source` on this run's replies unless that was done for this kind of states; returns the figures.

    Raises `GateError` with what is wrong. `hidden.probe_records` 0 skips the proof and is logged.
    """
    if not config.hidden.probe_records:
        logger.warning("the source is not proven: hidden.probe_records=0")
        return {}
    with held(run.hidden / ".probe.lock"):
        kept = _kept(run, kind)
        if kept is not None:
            return kept
        figures = _prove(run, config, spec, source)
        write_json(run.hidden / PROBE_NAME, {"kind": kind.digest(), "figures": figures})
        return figures


def _kept(run: RunFolder, kind: StoreKind) -> dict[str, Any] | None:
    try:
        kept = read_json(run.hidden / PROBE_NAME)
    except ArtifactError:
        return None
    fits = isinstance(kept, dict) and kept.get("kind") == kind.digest() and isinstance(kept.get("figures"), dict)
    return kept["figures"] if fits else None


def _prove(run: RunFolder, config: RunConfig, spec: TargetSpec, source: Source) -> dict[str, Any]:
    replies, are_greedy = probe_replies(run, config, spec)
    states = probe_states(source, replies, spec.hidden_size)
    figures: dict[str, Any] = {"records": len(replies), "tokens": sum(len(reply.tokens) for reply in replies)}
    if are_greedy:
        head = load_head(spec, torch.float32)
        figures |= check_greedy(states, replies, head, spec, config.hidden.min_greedy_agreement)
    else:
        logger.warning("no reply was generated at temperature 0 (prompts.heldout_share is 0): greedy agreement is not proven")
    plain = source if isinstance(source, TransformersSource) else _plain_target(spec)
    if plain is not None:
        largest = MAX_STATE_ERROR if plain is source else MAX_SERVER_STATE_ERROR
        checks = [
            check_blocks(state, plain.plain_forward(reply.tokens), spec, largest)
            for state, reply in list(zip(states, replies, strict=True))[:_PLAIN_REPLIES]
        ]
        figures["state_errors"] = {name: max(check[name] for check in checks) for name in checks[0]}
    return figures


def _plain_target(spec: TargetSpec) -> TransformersSource | None:
    """The target in this process, to compare a server's states with; None, with a warning, where it cannot be loaded here."""
    need_bytes = sum(path.stat().st_size for path in spec.folder.glob("*.safetensors"))
    have_bytes = psutil.virtual_memory().available
    if need_bytes > have_bytes * _MEMORY_SHARE:
        reason = f"its weights are {need_bytes / 1e9:.1f} GB, {have_bytes / 1e9:.1f} GB of memory are available"
    else:
        try:
            return TransformersSource(spec, dtype=spec.dtype, batch_tokens=1)
        except ConfigError as error:
            reason = str(error)
    logger.warning("blocks are not compared with a plain forward of the target: %s; the final state is proven", reason)
    return None


def probe_replies(run: RunFolder, config: RunConfig, spec: TargetSpec) -> tuple[list[ProbeReply], bool]:
    """The first usable replies of every dataset that is generated, in equal parts, and whether the target chose them greedily.

    Ids are random, so they are a fair sample. Above temperature 0 only held-out replies are greedy; others stand in
    if there are none.
    """
    if resolve_sampling(config.generation, spec)["temperature"] == 0:
        return _first_replies(run, config, spec, heldout_only=False), True
    greedy = _first_replies(run, config, spec, heldout_only=True)
    return (greedy, True) if greedy else (_first_replies(run, config, spec, heldout_only=False), False)


def _first_replies(run: RunFolder, config: RunConfig, spec: TargetSpec, *, heldout_only: bool) -> list[ProbeReply]:
    names = [item.name for item in config.prompts.datasets if (run.responses(item.name) / MANIFEST_NAME).is_file()]
    replies: list[ProbeReply] = []
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        share = -(-(config.hidden.probe_records - len(replies)) // left)
        for line in checked_lines(run.responses(name) / RESPONSES_NAME, record_rules(config, spec, name)):
            if share <= 0:
                break
            if line.record is not None and (line.record.is_heldout or not heldout_only):
                record = line.record
                replies.append(ProbeReply(id=record.id, tokens=record.tokens, prompt_tokens=record.prompt_tokens))
                share -= 1
    return replies
