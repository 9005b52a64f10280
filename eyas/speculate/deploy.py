"""May the draft be served? The checks between a benchmark and a deployment, and the decision they give.

All must hold: the servers are what they claim to be, no canary reply is wrong, the accept length is above
its floor and near the replayed prediction. Otherwise the target goes on without a draft, and the
decision says why. A right output with a poor accept length is how a wrong layer id or a lost norm looks
(https://github.com/vllm-project/vllm/pull/50170), hence the last two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from eyas.speculate.config import BenchmarkConfig, DraftShape


class Check(BaseModel):
    """One condition of a deployment: what was seen, what was wanted."""

    model_config = ConfigDict(extra="forbid")

    name: str
    holds: bool
    seen: str
    wanted: str


class Decision(BaseModel):
    """Whether the draft is served; `reason` names every check that failed."""

    model_config = ConfigDict(extra="forbid")

    serves_draft: bool
    reason: str
    checks: list[Check]


def identity_checks(server_info: dict[str, Any], *, target: str, draft: str, shape: DraftShape) -> list[Check]:
    """Compare a server's own account (`/server_info`) with the target, draft and shape that were asked for."""
    wanted: dict[str, Any] = {
        "model_path": target,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": shape.num_steps,
        "speculative_eagle_topk": shape.top_k,
        "speculative_num_draft_tokens": shape.verified,
    }
    return [
        Check(name=key, holds=str(server_info.get(key)) == str(value), seen=str(server_info.get(key)), wanted=str(value))
        for key, value in wanted.items()
    ]


def result_checks(results: dict[str, Any], config: BenchmarkConfig) -> list[Check]:
    """Canary, floor and prediction, from `results.json`."""
    accept, wrong = results["accept_length"]["overall"], results["outputs"]["wrong"]
    predicted = results["predicted_accept_length"]
    checks = [
        Check(name="replies", holds=wrong == 0, seen=f"{wrong} of {results['outputs']['checked']} wrong", wanted="0 wrong"),
        Check(name="accept length", holds=accept >= config.accept_floor, seen=f"{accept:.3f}", wanted=f">= {config.accept_floor}"),
    ]
    if predicted is not None:
        gap = abs(accept - predicted) / predicted
        checks.append(
            Check(
                name="prediction",
                holds=gap <= config.prediction_tolerance,
                seen=f"served {accept:.3f}, replayed {predicted:.3f}, {gap:.1%} apart",
                wanted=f"within {config.prediction_tolerance:.0%}; else the server reads another layer, norm or vocabulary map",
            )
        )
    sampling = results["sampling"]
    if sampling is not None:
        checks.append(
            Check(
                name="distribution at temperature 1",
                holds=sampling["holds"],
                seen=f"p = {sampling['p_value']:.4f} over {sampling['replies_per_side']} replies a side",
                wanted="the same with the draft and without",
            )
        )
    return checks


def reservations(results: dict[str, Any]) -> list[str]:
    """What speaks against a draft that is otherwise in order: a drafter without a model may be as good, or nothing is gained."""
    accept, interval = results["accept_length"]["overall"], results["accept_length"]["interval_95"]
    said = []
    for name, value in results["baselines"].items():
        without = f"{name.replace('_', ' ')} reaches {value:.3f} without a model"
        if value >= accept:
            said.append(f"{without}, the draft {accept:.3f}")
        elif interval and value >= interval[0]:
            said.append(f"{without}, within the draft's interval (95 %: {interval[0]:.2f}–{interval[1]:.2f})")
    if results["speedup"] is not None and results["speedup"] < 1:
        said.append(f"it makes replies slower ({results['speedup']:.2f}×) at {results['timing'][0]['concurrency']} in flight")
    return said


def decide(checks: list[Check], reservations: Sequence[str] = ()) -> Decision:
    """Serve the draft if every check holds, with reservations if there are any; otherwise say what failed and was wanted."""
    failed = [f"{check.name}: {check.seen}, wanted {check.wanted}" for check in checks if not check.holds]
    holds = "all checks hold" + (", but see first whether it pays: " + "; ".join(reservations) if reservations else "")
    reason = "; ".join(failed) or holds
    return Decision(serves_draft=not failed, reason=reason, checks=checks)
