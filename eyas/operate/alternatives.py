"""What else could be done before the long phases, and what it costs: the table a person decides by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.config import RunConfig
from eyas.operate.codec_result import kept_in_words, passed
from eyas.operate.forecast import Forecast, TargetSizes, forecast, whole_phase
from eyas.operate.phases import Phase
from eyas.operate.status import PhaseStatus
from eyas.operate.volumes import Volumes
from eyas.operate.wording import size

SUBSETS = (0.5, 0.25)
WINDOW_SHARE = 0.25
"""Of all hidden states, what the plan offers to keep on disk at a time."""


def alternatives(
    config: RunConfig,
    sizes: TargetSizes,
    counted: Volumes,
    statuses: dict[Phase, PhaseStatus],
    curve: Mapping[str, Any] | None = None,
    codecs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """All prompts, subsets, a lower cap, smaller states, more servers: what each holds and costs in hours, GPU-hours and
    disk, and the accept length that the learning curve `curve` expects of it; None: unknown. Smaller states are
    offered once they have passed this target's own probe, `codecs`."""
    base = forecast(config, sizes, counted, statuses)
    rows = [_row("all prompts, as configured", "", counted, base, config) | _expected(curve, 1.0)]
    for share in SUBSETS:
        account = counted.scaled(share)
        outlook = _instead(base, config, sizes, counted, account, statuses)
        rows.append(
            _row(
                f"{share:.0%} of every dataset", f"prompts.subsample={config.prompts.subsample * share:g}", account, outlook, config
            )
            | _expected(curve, share)
        )
    caps = [min(item.max_new_tokens, config.generation.max_new_tokens or item.max_new_tokens) for item in config.prompts.datasets]
    if caps:
        account = counted.scaled(1.0, caps=0.5)
        outlook = _instead(base, config, sizes, counted, account, statuses)
        rows.append(_row("replies capped at half", f"generation.max_new_tokens={max(caps) // 2}", account, outlook, config))
    for codec, row in passed(codecs).items() if config.hidden.codec == "bf16" else ():
        outlook = forecast(_with_hidden(config, codec=codec), sizes, counted, statuses)
        name = f"hidden states in {codec}: {kept_in_words(row)}"
        rows.append(_row(name, f"hidden.codec={codec}", counted, outlook, config))
    whole = whole_phase("extract", _with_hidden(config, disk_budget=0), sizes, counted).disk_bytes
    budget = 0 if config.hidden.disk_budget else round(whole * WINDOW_SHARE)
    name = f"training extracts within {size(budget)}" if budget else "all hidden states stored, extracted once"
    outlook = forecast(_with_hidden(config, disk_budget=budget), sizes, counted, statuses)
    rows.append(_row(name, f"hidden.disk_budget={budget}", counted, outlook, config))
    if config.server.kind == "sglang":
        num_servers = len(config.server.urls)
        outlook = _instead(base, config, sizes, counted, counted, statuses, speed=2.0)
        more = _row(f"{2 * num_servers} servers instead of {num_servers}", "server.urls", counted, outlook, config)
        rows.append(more | _expected(curve, 1.0))
    return rows


def _expected(curve: Mapping[str, Any] | None, share: float) -> dict[str, Any]:
    """Accept length with `share` of the records, its 80 % interval and what is lost against all: from the learning curve."""
    found = next((row for row in (curve or {}).get("predictions", []) if row["share"] == share), None)
    if found is None:
        return {}
    return {"accept_length": [found["accept_length"], found["low"], found["high"]], "accept_length_lost": found["rest_buys"]}


def _with_hidden(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"hidden": config.hidden.model_copy(update=changes)})


def _instead(
    base: Forecast,
    config: RunConfig,
    sizes: TargetSizes,
    counted: Volumes,
    account: Volumes,
    statuses: dict[Phase, PhaseStatus],
    *,
    speed: float = 1.0,
) -> Forecast:
    """The outlook with another account: each phase's rest, in proportion to the tokens that would be left of it."""
    phases = []
    for item in base.phases:
        before, after = (whole_phase(item.phase, config, sizes, volume) for volume in (counted, account))
        counts = statuses[item.phase].counts
        done = 1 - counts["pending"] / counts["in"] if counts.get("in") else 0.0
        hours = item.hours
        if hours is not None:
            hours *= _rest(after.tokens, before.tokens, done) / (speed if item.phase == "generate" else 1.0)
        disk_bytes = round(item.disk_bytes * _rest(after.disk_bytes, before.disk_bytes, done))
        phases.append(item.model_copy(update={"hours": hours, "disk_bytes": disk_bytes}))
    known = [item.hours for item in phases if item.hours is not None]
    return base.model_copy(
        update={
            "phases": phases,
            "hours": sum(known) if len(known) == len(phases) else None,
            "disk_bytes_to_write": sum(item.disk_bytes for item in phases),
        }
    )


def _rest(after: int, before: int, done: float) -> float:
    """What would be left of a phase, as a share of what is left now, if it were to handle `after` instead of `before`."""
    ratio = after / before if before else 1.0
    return max(0.0, ratio - done) / (1 - done) if done < 1 else 0.0


def _row(name: str, setting: str, account: Volumes, outlook: Forecast, config: RunConfig) -> dict[str, Any]:
    num_gpus = config.operate.host.num_gpus
    return {
        "name": name,
        "set": setting,
        "prompts": account.num_prompts if account.is_known else None,
        "tokens": account.response_tokens if account.is_known else None,
        "hours": outlook.hours,
        "gpu_hours": outlook.hours * num_gpus if outlook.hours is not None and num_gpus else None,
        "disk_bytes": outlook.disk_bytes_to_write if outlook.is_known else None,
        "accept_length": None,
        "accept_length_lost": None,
    }
