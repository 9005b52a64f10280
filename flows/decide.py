"""The decision before the long phases, taken by a person in the Prefect UI, by the config, or by the default.

The run pauses with its plan on show and a small form. What is decided stands in plan.json, so a run that
is started again does not ask again; a chosen subset or cap is recorded as a setting and applied again.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Running
from pydantic import Field

from eyas.config import RunConfig
from eyas.files import read_json
from eyas.operate.decision import Declined
from eyas.operate.wording import duration, size
from eyas.workspace import RunFolder
from flows.phases import Job
from tasks.events import emit
from tasks.publish import artifact_key

logger = logging.getLogger(__name__)

_SETTING = "set "
_SUBSET, _CAP = "prompts.subsample=", "generation.max_new_tokens="


class Decision(RunInput):
    """What becomes of this plan."""

    choice: Literal["accept", "subset", "cap", "abort"] = Field(
        default="accept",
        description="accept goes on as planned; subset takes a share of every dataset; cap shortens replies; abort ends the run.",
    )
    subset_percent: float = Field(
        default=50.0, gt=0, le=100, description="For subset: per cent of every dataset's prompts. Above 0 and at most 100."
    )
    max_new_tokens: int = Field(default=4096, ge=2, description="For cap: longest reply, in tokens. At least 2.")
    note: str = Field(default="", description="Why, for the record.")


def recorded_settings(run: RunFolder) -> list[str]:
    """The `key=value` settings that earlier decisions of this run chose."""
    plan = read_json(run.plan_json) if run.plan_json.is_file() else {}
    return [item["what"].removeprefix(_SETTING) for item in plan.get("decisions", []) if item["what"].startswith(_SETTING)]


async def decide(job: Job, *, poll_s: int = 5) -> bool:
    """Have the plan decided; True if the decision changed the config. Raises `Declined` if the run is not to go on."""
    operate = job.config.operate
    if job.keeper.is_accepted:
        return False
    if operate.decision == "accept":
        job.keeper.decide("accept", who="config", why="operate.decision is accept")
        return False
    emit("decision wanted", job.run.root, f"{job.config.name} waits for a decision on its plan")
    plan = job.keeper.ask()
    form = Decision.with_initial_data(description=question(plan, job.config), max_new_tokens=half_cap(plan))
    try:
        decision = await apause_flow_run(wait_for_input=form, timeout=int(operate.decision_timeout_s), poll_interval=poll_s)
    except FlowPauseTimeout:
        await _keep_running()
        why = f"nobody answered within {operate.decision_timeout_s:.0f} s; this is operate.decision_default"
        return _record(job, Decision(choice=operate.decision_default), who="config", why=why)
    return _record(job, decision, who="operator", why=decision.note or "decided in the Prefect UI")


def _record(job: Job, decision: Decision, *, who: str, why: str) -> bool:
    settings = {
        "subset": f"{_SUBSET}{job.config.prompts.subsample * decision.subset_percent / 100:g}",
        "cap": f"{_CAP}{decision.max_new_tokens}",
    }
    if decision.choice == "abort":
        job.keeper.decide("abort", who=who, why=why)
        raise Declined(f"the plan was not accepted ({why}); change the config and run again to be asked again")
    setting = settings.get(decision.choice)
    if setting is not None:
        job.keeper.decide(_SETTING + setting, who=who, why=why)
    job.keeper.decide("accept", who=who, why=why)
    if setting is not None:
        job.apply([setting])
    return setting is not None


def question(plan: dict[str, Any], config: RunConfig) -> str:
    """What stands above the form, as Markdown: what is to come and its costs, each alternative with the choice that makes it.

    Lists, no tables: the dialogue is 470 pixels wide, and cuts what is wider off or folds it away.
    """
    outlook, rows = plan["forecast"], plan["alternatives"]
    to_come = [row for row in plan["phases"] if row["priority"]]
    lines = [
        f"### {plan['name']}: {_cost(rows[0]) if rows else 'nothing is left'}",
        *(f"- {row['title']}: {_cost(row['forecast'])}" for row in to_come),
        "",
        f"Free on the disk: {size(outlook['disk_free_bytes'])}. Tokens: {outlook['volumes_basis'] or 'no dataset'}. "
        f"All of it: artifact *{artifact_key(plan['name'], 'plan')}*.",
    ]
    if rows[1:]:
        lines += ["", "### Instead", *(f"- **{row['name']}** ({_how(row['set'], config)}): {_cost(row)}" for row in rows[1:])]
    lines += [f"\n{plan[name]}" for name in ("learning_curve", "baseline") if plan.get(name)]
    return "\n".join(lines)


def half_cap(plan: dict[str, Any]) -> int:
    """The cap that the plan's alternative proposes, to begin with."""
    proposed = [int(row["set"].removeprefix(_CAP)) for row in plan["alternatives"] if row["set"].startswith(_CAP)]
    return max(2, proposed[0]) if proposed else int(Decision.model_fields["max_new_tokens"].default)


def _how(setting: str, config: RunConfig) -> str:
    """The choice of the form that makes an alternative, or what to change for it."""
    name, _, value = setting.partition("=")
    if setting.startswith(_SUBSET):
        return f"choose *subset*, {100 * float(value) / config.prompts.subsample:g} per cent"
    if setting.startswith(_CAP):
        return f"choose *cap*, {value} tokens"
    return f"choose *abort*, and start again with another `{name}`" if not value else f"*abort*, then start with `{setting}`"


def _cost(row: dict[str, Any]) -> str:
    """Time, disk, GPU-hours and what is expected, as far as each is known."""
    hours, disk = row["hours"], row["disk_bytes"]
    said = ["time unknown" if hours is None else duration(hours * 3600), "disk unknown" if disk is None else size(disk)]
    if row.get("gpu_hours"):
        said.append(f"{row['gpu_hours']:,.1f} GPU-hours")
    if row.get("prompts"):
        said.append(f"{row['prompts']:,} prompts")
    if row.get("accept_length"):
        said.append("accept length {:.2f} ({:.2f}–{:.2f})".format(*row["accept_length"]))
    return ", ".join(said)


async def _keep_running() -> None:
    """A pause that timed out leaves the run Paused, and Prefect would soon fail it."""
    async with get_client() as client:
        await client.set_flow_run_state(flow_run.id, Running(message="nobody answered; the default holds"), force=True)
