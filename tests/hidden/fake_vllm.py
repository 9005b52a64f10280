"""A loopback server that answers `/v1/models` and `/v1/completions` as vLLM 0.32 does with its hidden-states connector.

States come from a plain forward of the tiny target: inputs of blocks 2, 4, 5 and the last block's output before
the norm. The file appears a moment after the answer, under its lock. Faults: `busy` answers 503 once,
`prefix_cache` leaves out a head, `other_ids` writes another prompt's ids, `no_connector` writes nothing, `refuses` answers 400,
`shifted_layers` gives the inputs of the blocks before.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.hidden.tiny import load_plain


@torch.inference_mode()
def block_inputs(target: Path, ids: list[int], shift: int = 0) -> torch.Tensor:
    """[T, 4, H] bf16; the last is taken by a hook, since transformers gives its own last state after the norm."""
    model, caught = load_plain(target).model, []
    handle = model.norm.register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    handle.remove()
    return torch.stack([*(states[block + shift][0] for block in (2, 4, 5)), caught[0][0]], 1).bfloat16()


@contextmanager
def fake_vllm(target: Path, sink: Path, *, fault: str = "") -> Iterator[str]:
    """Yields the server's URL."""
    sink.mkdir(parents=True, exist_ok=True)
    forward = threading.Lock()
    seen: list[int] = []

    def write(path: Path, tensors: dict[str, torch.Tensor], lock: Any) -> None:
        time.sleep(0.05)  # the answer is there before the file
        save_file(tensors, path)
        lock.close()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(1)
            if fault == "refuses" or (fault == "busy" and len(seen) == 1):
                self.answer(400 if fault == "refuses" else 503, {"error": {"message": "no", "code": 400}})
                return
            ids, path = body["prompt"], sink / f"cmpl-{len(seen)}-{threading.get_ident()}.safetensors"
            assert (body["model"], body["max_tokens"]) == ("tiny", 1)
            with forward:
                states = block_inputs(target, ids, shift=-1 if fault == "shifted_layers" else 0)
            if fault == "prefix_cache":
                states = states[4:].contiguous()
            shown = [7 for _ in ids] if fault == "other_ids" else ids
            params = None
            if fault != "no_connector":
                lock = open(f"{path}.lock", "w")  # noqa: SIM115 - closed by the writer
                fcntl.flock(lock, fcntl.LOCK_EX)
                tensors = {"hidden_states": states, "token_ids": torch.tensor(shown)}
                threading.Thread(target=write, args=(path, tensors, lock)).start()
                params = {"hidden_states_path": f"/elsewhere/{path.name}"}
            self.answer(200, {"id": "cmpl", "choices": [{"text": "x"}], "kv_transfer_params": params})

        def answer(self, status: int, content: dict[str, Any]) -> None:
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, format: str, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
