"""The decision before the long phases, taken by a person in the Prefect UI, by the config, or by the default.

The run pauses with its plan on show and a small form. What is decided stands in plan.json, so a run that
is started again does not ask again; a chosen subset or cap is recorded as a setting and applied again.
"""

from __future__ import annotations

import logging
from typing import Literal

from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Running
from pydantic import Field

from eyas.files import read_json
from eyas.operate.decision import Declined
from eyas.operate.plan import render_plan
from eyas.workspace import RunFolder
from flows.phases import Job
from tasks.events import emit

logger = logging.getLogger(__name__)

_SETTING = "set "


class Decision(RunInput):
    """What becomes of this plan."""

    choice: Literal["accept", "subset", "cap", "abort"] = Field(
        default="accept",
        description="accept goes on as planned; subset takes a share of every dataset; cap shortens replies; abort ends the run.",
    )
    subset_percent: float = Field(default=50.0, gt=0, le=100, description="For subset: per cent of every dataset's prompts.")
    max_new_tokens: int = Field(default=4096, ge=2, description="For cap: longest reply, in tokens.")
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
    plan = render_plan(job.keeper.refresh())
    form = Decision.with_initial_data(description=plan)
    try:
        decision = await apause_flow_run(wait_for_input=form, timeout=int(operate.decision_timeout_s), poll_interval=poll_s)
    except FlowPauseTimeout:
        await _keep_running()
        why = f"nobody answered within {operate.decision_timeout_s:.0f} s; this is operate.decision_default"
        return _record(job, Decision(choice=operate.decision_default), who="config", why=why)
    return _record(job, decision, who="operator", why=decision.note or "decided in the Prefect UI")


def _record(job: Job, decision: Decision, *, who: str, why: str) -> bool:
    settings = {
        "subset": f"prompts.subsample={job.config.prompts.subsample * decision.subset_percent / 100:g}",
        "cap": f"generation.max_new_tokens={decision.max_new_tokens}",
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


async def _keep_running() -> None:
    """A pause that timed out leaves the run Paused, and Prefect would soon fail it."""
    async with get_client() as client:
        await client.set_flow_run_state(flow_run.id, Running(message="nobody answered; the default holds"), force=True)
