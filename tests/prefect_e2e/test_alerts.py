"""Alerts reach a real webhook: an Alert block, its automations, an event of a run, and an HTTP server that listens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect.blocks.webhook import Webhook
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import Alert
from deployments.register import register
from tasks.events import emit
from tests.prefect_e2e.conftest import Stack, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


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


async def test_a_failed_run_and_a_wanted_decision_reach_the_webhook(stack: Stack, inbox: tuple[str, list[dict[str, Any]]]) -> None:
    url, received = inbox
    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        await Webhook(url=url, allow_private_urls=True).save("pager", overwrite=True)  # type: ignore[misc]
        await Alert(to=["webhook/pager"], events=["run failed", "decision wanted"]).save("ops", overwrite=True)  # type: ignore[misc]
        await register(stack.runs)
        await register(stack.runs)  # by name: nothing doubles
    automations = stack.call("POST", "/automations/filter").json()
    names = [automation["name"] for automation in automations]
    assert sorted(names) == sorted(set(names)) == ["Eyas: decision wanted → ops", "Eyas: end zombie runs", "Eyas: run failed → ops"]

    stack.wait_state(stack.start("alerting", server_block="nowhere"), "FAILED")
    message = until(lambda: [item for item in received if item["event"] == "run failed"], 60)[0]
    assert "no SGLang Server block named 'nowhere'" in message["text"]
    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        emit("decision wanted", stack.runs / "alerting", 'a "quoted" text')
    message = until(lambda: [item for item in received if item["event"] == "decision wanted"], 60)[0]
    assert (message["run"], message["text"]) == ("alerting", 'a "quoted" text')
