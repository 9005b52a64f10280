"""What automations send: valid JSON whatever a message holds, rendered by Prefect's own template engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.server.utilities.user_templates import render_user_template

from deployments.automations import _BODY, _JSON, zombie_automation


class Resource(dict[str, str]):
    @property
    def id(self) -> str:
        return self["prefect.resource.id"]

    name = property(lambda self: self.get("prefect.resource.name"))


def event(**payload: Any) -> SimpleNamespace:
    resource = Resource({"prefect.resource.id": "eyas.run.night", "prefect.resource.name": "night"})
    return SimpleNamespace(event="eyas.gate-breached", resource=resource, payload=payload)


@pytest.mark.parametrize("text", ["plain", 'with "quotes"', "two\nlines", "back\\slash", "◁think▷"])
async def test_a_webhook_receives_valid_json_whatever_the_message_holds(text: str) -> None:
    rendered = await render_user_template(_JSON % "gate breached", {"event": event(message=text)})
    assert json.loads(rendered) == {"event": "gate breached", "run": "night", "text": text}


async def test_a_state_change_gives_its_own_message() -> None:
    rendered = await render_user_template(_BODY, {"event": event(validated_state={"message": "no server"})})
    assert rendered == "night: no server"


async def test_an_event_without_a_message_still_names_the_run() -> None:
    assert (await render_user_template(_BODY, {"event": event()})).strip() == "night:"


def test_a_run_that_has_ended_is_out_of_the_zombie_automations_reach() -> None:
    """https://github.com/PrefectHQ/prefect/issues/18653: every end counts as a sign of life."""
    trigger = zombie_automation(90).trigger
    ends = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
    assert ends <= set(trigger.expect)  # type: ignore[union-attr]
