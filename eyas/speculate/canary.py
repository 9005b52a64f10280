"""The canary of a deployment: prompts of the benchmark sent again to the server that is to serve the draft.

Four things that a server cannot say of itself: it computes what the target computed at generation (16 fixed prompts), its
replies are the target's own, its accept length is the predicted one, and the draft reads the right layers. For the last,
the replay is repeated with every layer one too low and one too high: the served counts, request by request, must be nearest
to the right one, ties of the draft granted to each. Accept length alone shows such a mistake late (1.265 with right and
1.261 with shifted layers for a barely trained draft).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import psutil

from eyas.config import RunConfig
from eyas.sglang.client import SGLangClient
from eyas.sglang.identity import TargetFingerprint, take_fingerprint
from eyas.speculate.accept import AcceptCounts, pool
from eyas.speculate.deploy import Check, identity_checks
from eyas.speculate.layers import layer_check
from eyas.speculate.load import Server, run_block
from eyas.speculate.lossless import LocalJudge, Measure, judge, load_judge
from eyas.speculate.predict import Predictor
from eyas.speculate.results import Row
from eyas.speculate.server_judge import gap_of
from eyas.speculate.servers import server_info
from eyas.speculate.sets import BenchmarkPrompt
from eyas.target.rendering import Renderer
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer

PROBED = 8
"""Identical replies whose counts are held against shifted layers; each costs the target six passes over it."""

_MEMORY_SHARE = 0.4


def fits_here(spec: TargetSpec) -> bool:
    """Whether a second copy of the target may be held in this process: within 40 % of the free memory."""
    weight_bytes = sum(path.stat().st_size for path in spec.folder.glob("*.safetensors"))
    return weight_bytes <= psutil.virtual_memory().available * _MEMORY_SHARE


def canary(
    url: str,
    rows: Sequence[Row],
    config: RunConfig,
    spec: TargetSpec,
    export: Path,
    *,
    at_generation: TargetFingerprint,
    api_key: str = "",
) -> list[Check]:
    """Every check of one server; `rows` are the benchmark's, with the target's own replies. Raises `ServerError`."""
    wanted = config.benchmark
    info = server_info(url, api_key)
    target = config.server.model or str(spec.folder)
    checks = identity_checks(info | {"model_path": Path(str(info.get("model_path"))).name}, target=Path(target).name,
                             draft=str(export), shape=wanted.shape)  # fmt: skip
    if not all(check.holds for check in checks):
        return checks  # another server: its replies say nothing of this draft
    epsilon = max((float(row.difference.get("epsilon") or 0.0) for row in rows), default=0.0)
    differences = at_generation.differences(asyncio.run(_fingerprint(url, config, spec, api_key)), noise=epsilon)
    seen = "; ".join(differences[:3]) or "the same"
    checks.append(_check("target", not differences, seen, "what the target computed at generation, on 16 fixed prompts"))
    server = Server(url=url, config=config.server, has_draft=True, stop_token_ids=tuple(spec.eos_token_ids), api_key=api_key)
    prompts = [BenchmarkPrompt(id=row.id, dataset=row.dataset, input_ids=row.prompt_ids) for row in rows]
    expected = [row.reference_ids[: row.loop_free_tokens] for row in rows]
    # A reply that was cut at its loop is asked for no further; one that ended by itself must end by itself again.
    caps = [
        len(ids) if len(ids) < len(row.reference_ids) else wanted.max_new_tokens for ids, row in zip(expected, rows, strict=True)
    ]
    replies = run_block(server, prompts, caps, min(wanted.counting_concurrency, len(rows))).replies
    model = load_judge(spec, {"auto": spec.dtype}.get(str(info["dtype"]), str(info["dtype"]))) if fits_here(spec) else None
    is_local = model is not None and config.server.kind == "embedded"
    measure: Measure = LocalJudge(model, wanted.num_draft_tokens) if is_local else _Recorded(server, epsilon)
    outcomes = [
        judge(measure, row.prompt_ids, ids, reply.output_ids).outcome
        for row, ids, reply in zip(rows, expected, replies, strict=True)
    ]
    counts = [reply.counts or AcceptCounts() for reply in replies]
    served, predicted = pool(counts).accept_length, _predicted(rows)
    checks.append(_check("canary replies", "wrong" not in outcomes, f"{outcomes.count('wrong')} of {len(rows)} wrong", "0 wrong"))
    checks.append(_check("accept length", served >= wanted.accept_floor, f"{served:.3f}", f">= {wanted.accept_floor}"))
    if predicted is not None:
        gap = abs(served - predicted) / predicted
        seen = f"served {served:.3f}, replayed {predicted:.3f}, {gap:.1%} apart"
        checks.append(_check("prediction", gap <= wanted.prediction_tolerance, seen, f"within {wanted.prediction_tolerance:.0%}"))
    if model is not None:
        same = [place for place, outcome in enumerate(outcomes) if outcome == "identical"][:PROBED]
        possible = {}
        for shift in (0, -1, 1):
            predictor = Predictor(export, spec, model, wanted.num_draft_tokens, shift=shift)
            possible[shift] = [predictor.possible(rows[place].prompt_ids, expected[place]) for place in same]
        checks.append(layer_check([counts[place] for place in same], possible))
    return checks


class _Recorded:
    """Ties on a server alone: its own gap between the two tokens, against the largest ε that the benchmark measured."""

    def __init__(self, server: Server, epsilon: float) -> None:
        self._server, self._epsilon = server, epsilon

    def __call__(self, prompt: list[int], common: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
        return asyncio.run(gap_of(self._server, [*prompt, *common], tokens)), self._epsilon


async def _fingerprint(url: str, config: RunConfig, spec: TargetSpec, api_key: str) -> TargetFingerprint:
    renderer = Renderer(spec, load_tokenizer(spec), config.target)
    async with SGLangClient(url, config.server, api_key=api_key) as client:
        return await take_fingerprint(client, renderer)


def _predicted(rows: Sequence[Row]) -> float | None:
    pairs = [row.predicted for row in rows if row.predicted is not None]
    return pool(AcceptCounts(verifications=pair[0], accepted=pair[1]) for pair in pairs).accept_length if pairs else None


def _check(name: str, holds: bool, seen: str, wanted: str) -> Check:
    return Check(name=name, holds=holds, seen=seen, wanted=wanted)
