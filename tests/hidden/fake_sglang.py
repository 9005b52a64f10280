"""A loopback server that answers `/generate` and `/server_info` as SGLang 0.5.23 does in its two state modes.

States come from a plain forward of the tiny target; with a sink they go through the real plugin's `capture`.
Faults: `prefix_cache` drops the rows of a common head, `no_plugin` writes no file, `busy` answers 503 once, `other_ids` gives
the states of other ids beside the right token, `other_request` those and their token, `shifted_layers` the aux states of the
blocks before, `truncates` reads two ids fewer, `other_rid` answers another request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eyas.hidden.sources.sglang_plugin import capture
from tests.hidden.tiny import greedy, plain_states


@contextmanager
def fake_sglang(
    target: Path, *, mode: str, sink: Path | None = None, fault: str = "", info: dict[str, Any] | None = None
) -> Iterator[str]:
    """A server in mode `aux` or `final`; yields its URL."""
    flags = {"enable_return_aux_hidden_states": mode == "aux", "enable_return_hidden_states": mode == "final"}
    answers = {**flags, "disable_radix_cache": True, "chunked_prefill_size": -1, **(info or {})}
    forward = threading.Lock()
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, answers)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body["rid"])
            if fault == "busy" and len(seen) == 1:
                self.answer(503, {"object": "error", "message": "The request queue is full."})
                return
            ids, rid = body["input_ids"], body["rid"]
            if fault == "truncates":
                ids = ids[2:]
            with forward:
                other = ids[1:] + ids[:1]
                token = greedy(target, other if fault == "other_request" else ids, 1)[-1]
                blocks = (0, 2, 3) if fault == "shifted_layers" else (1, 3, 4)
                aux, final = plain_states(target, other if fault in ("other_ids", "other_request") else ids, blocks)
            cached = 4 if fault == "prefix_cache" else 0
            rows: list[Any] = (aux if mode == "aux" else final)[cached:].tolist()
            if sink is not None and fault != "no_plugin":
                output = SimpleNamespace(hidden_states=aux, last_hidden_states=final)
                full = SimpleNamespace(is_full=lambda: True)
                request = SimpleNamespace(rid=rid)
                owner = SimpleNamespace(model_worker=SimpleNamespace(tp_rank=0))
                named = {"req": request, "logits_output": output, "hidden_state_offset": 0, "extend_input_len": len(ids)}
                capture(sink, lambda *_, **__: 0, owner, capture_hidden_mode=full, **named)
                rows = []
            meta = {
                "id": "another" if fault == "other_rid" else rid,
                "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": len(ids),
                "completion_tokens": 1, "cached_tokens": cached, "hidden_states": [rows] if rows else [],
            }  # fmt: skip
            self.answer(200, {"text": "", "output_ids": [token], "meta_info": meta})

        def answer(self, code: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
