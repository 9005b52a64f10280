"""Who is told what, as a Prefect block on top of Prefect's own notification blocks."""

from __future__ import annotations

from typing import Literal, get_args

from prefect.blocks.core import Block
from pydantic import Field

AlertEvent = Literal[
    "run stalled",
    "gate breached",
    "disk low",
    "server down",
    "zombie run",
    "run failed",
    "run finished",
    "decision wanted",
    "rehearsal failed",
    "codecs tried",
    "learning curve",
    "draft deployed",
    "draft refused",
    "draft rolled back",
]


class Alert(Block):
    """Sends chosen events to Prefect notification blocks (Slack, mail, Teams, Custom Webhook, …)."""

    _block_type_name = "Alert"
    _block_type_slug = "eyas-alert"
    _description = "Which events of a run are sent where; run `python -m deployments` after a change."
    _code_example = 'Alert(to=["slack-webhook/ops"], events=["run failed", "gate breached"]).save("ops")'

    to: list[str] = Field(
        min_length=1, description='Blocks that deliver, as a list of type/name: `["slack-webhook/ops", "custom-webhook/pager"]`.'
    )
    events: list[AlertEvent] = Field(default=list(get_args(AlertEvent)), description="Events that are sent.")
