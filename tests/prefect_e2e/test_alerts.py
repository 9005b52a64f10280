"""Alerts reach a real webhook: an Alert block, its automations, an event of a run, and an HTTP server that listens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, get_args

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import Alert
from blocks.alerts import AlertEvent
from deployments.automations import JSON_DATA
from deployments.register import register
from tasks.events import emit
from tests.prefect.paper import config_with
from tests.prefect.test_watch import running
from tests.prefect_e2e.conftest import Stack, until

EVENTS: set[AlertEvent] = set(get_args(AlertEvent))

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *details: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", received
    server.shutdown()


async def test_everything_worth_telling_reaches_the_webhook(stack: Stack, inbox: tuple[str, list[dict[str, Any]]]) -> None:
    url, received = inbox

    def told(event: str) -> str:
        return str(until(lambda: [item["text"] for item in received if item["event"] == f"Eyas: {event}"], within_s=300)[0])

    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        pager = CustomWebhookNotificationBlock(name="pager", url="{{url}}", json_data=JSON_DATA, secrets={"url": url})
        await pager.save("pager", overwrite=True)  # type: ignore[misc]
        await Alert(to=["custom-webhook/pager"]).save("ops", overwrite=True)  # type: ignore[misc]
        await register(stack.runs)
        await register(stack.runs)  # by name: nothing doubles
    automations = stack.call("POST", "/automations/filter").json()
    names = [automation["name"] for automation in automations]
    assert len(names) == len(set(names))
    assert set(names) == {"Eyas: end zombie runs", *(f"Eyas: {event} → ops" for event in EVENTS)}

    stack.wait_state(stack.start("alerting", server_block="nowhere"), "FAILED")
    assert "no SGLang Server block named 'nowhere'" in told("run failed")
    stack.wait_state(stack.start("alerting", name="watch/watch-every-5-minutes"), "COMPLETED")
    assert told("run finished").startswith("watch alerting")
    ended = stack.start("alerting", name="watch/watch-every-5-minutes", scheduled=True)
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "zombie: as the automation says it"}
    stack.call("POST", f"/flow_runs/{ended}/set_state", state=crashed, force=True)
    assert "zombie: as the automation says it" in told("zombie run")

    gate = {"generation": {"gates": {"empty": {"warn": 0.02, "stop": 0.2}}}}
    stalled = config_with(operate={"stall_s": 10}, server={"kind": "sglang", "urls": ["http://127.0.0.1:9"]}, **gate)
    running(stack.runs / "watched" / "night", stalled, age_s=60, gate_empty=0.1)  # in this process, which lives
    stack.wait_state(stack.start("watched", name="watch/watch-every-5-minutes"), "COMPLETED")
    assert "no progress" in told("run stalled")
    assert "B1_glaive: empty 10.0%" in told("gate breached")
    assert "does not answer" in told("server down")
    received.clear()

    for event in EVENTS - {"run failed", "run finished", "zombie run"}:  # what Eyas itself tells
        with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
            emit(event, stack.runs / "alerting", f'"{event}" it is')
        assert told(event) == f'alerting: "{event}" it is'
