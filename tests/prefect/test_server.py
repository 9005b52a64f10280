"""The Prefect server of one machine, as its clients reach it."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.server import bypass_proxies_on_loopback, is_healthy


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.mark.parametrize("excepted", ["", "intranet.example,127.0.0.1"])
def test_a_proxy_in_the_environment_does_not_stand_before_the_own_server(excepted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, excepted)
    bypass_proxies_on_loopback()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert is_healthy(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    hosts = os.environ["NO_PROXY"].split(",")
    assert set(hosts) == {*filter(None, excepted.split(",")), "127.0.0.1", "localhost"}
    assert len(set(hosts)) == len(hosts)
