"""What automations send, rendered and delivered by Prefect's own template engine and blocks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.server.utilities.user_templates import render_user_template

from deployments.automations import _BODY, JSON_DATA, _action, zombie_automation
from eyas.errors import ConfigError


class Resource(dict[str, str]):
    @property
    def id(self) -> str:
        return self["prefect.resource.id"]

    name = property(lambda self: self.get("prefect.resource.name"))


def event(**payload: Any) -> SimpleNamespace:
    resource = Resource({"prefect.resource.id": "eyas.run.night", "prefect.resource.name": "night"})
    return SimpleNamespace(event="eyas.gate-breached", resource=resource, payload=payload)


@pytest.fixture
def webhook() -> Iterator[tuple[CustomWebhookNotificationBlock, list[dict[str, str]]]]:
    """A Custom Webhook block as docs/prefect.md shows it, and what its receiver got."""
    received: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *details: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield CustomWebhookNotificationBlock(name="pager", url=url, json_data=JSON_DATA), received
        server.shutdown()


@pytest.mark.parametrize("text", ["plain", 'with "quotes"', "two\nlines", "back\\slash", "◁think▷", "{{subject}} {{ 1/0 }}"])
async def test_a_webhook_receives_valid_json_whatever_the_message_holds(
    webhook: tuple[CustomWebhookNotificationBlock, list[dict[str, str]]], text: str
) -> None:
    block, received = webhook
    await block.notify(await render_user_template(_BODY, {"event": event(message=text)}), "Eyas: gate breached")
    assert received == [{"event": "Eyas: gate breached", "text": f"night: {text}"}]


async def test_alerts_of_one_moment_all_arrive(webhook: tuple[CustomWebhookNotificationBlock, list[dict[str, str]]]) -> None:
    block, received = webhook
    await asyncio.gather(*(block.notify(f"night: {number}") for number in range(100)))
    assert {item["text"] for item in received} == {f"night: {number}" for number in range(100)}


async def test_the_webhook_block_that_loses_calls_of_one_moment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'loses calls .* \{"event": "{{subject}}", .* deliver to custom-webhook/pager'):
        await _action(None, "webhook/pager", "run failed")  # type: ignore[arg-type]


async def test_a_state_change_gives_its_own_message() -> None:
    rendered = await render_user_template(_BODY, {"event": event(validated_state={"message": "no server"})})
    assert rendered == "night: no server"


async def test_an_event_without_a_message_still_names_the_run() -> None:
    assert await render_user_template(_BODY, {"event": event()}) == "night"


def test_a_run_that_has_ended_is_out_of_the_zombie_automations_reach() -> None:
    """https://github.com/PrefectHQ/prefect/issues/18653: every end counts as a sign of life."""
    trigger = zombie_automation(90).trigger
    ends = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
    assert ends <= set(trigger.expect)  # type: ignore[union-attr]
