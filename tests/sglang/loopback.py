"""A loopback server that speaks SGLang's protocol over real HTTP and misbehaves on command.

Answers are a function of the prompt alone, so that an interrupted run can be compared with an unbroken one.
`behave(payload, nth)` names a fault for the nth `/generate`, or None. Run as a process:
`python -m tests.sglang.loopback TARGET_FOLDER` prints its URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.sglang.tiny import END_ID, FIRST_BYTE_ID

Behave = Callable[[dict[str, Any], int], str | None]
OPEN_ID, CLOSE_ID = 3, 4


class LoopbackServer:
    """Serves on 127.0.0.1 from its own thread until `stop`; a context manager."""

    def __init__(
        self,
        target: Path,
        *,
        behave: Behave = lambda payload, nth: None,
        context_length: int = 2048,
        max_running_requests: int = 32,
        api_key: str = "",
        delay_s: float = 0.0,
        model_path: str = "",
        mean_tokens: int = 40,
        reasons: bool = True,
        port: int = 0,
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.model_path = model_path or str(target)
        self.behave = behave
        self.context_length = context_length
        self.max_running_requests = max_running_requests
        self.api_key = api_key
        self.delay_s = delay_s
        self.mean_tokens = mean_tokens
        self.reasons = reasons
        self.port = port
        self.is_ready = True
        self.payloads: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.peak_running = 0
        self.num_probes = 0
        self.num_connections = 0
        self.shift_logprobs = 0.0
        self.weight_version = "default"
        self.salt = b""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, input_ids: list[int], max_new_tokens: int) -> tuple[list[int], str]:
        """(output ids, finish reason), derived from the prompt and from `salt`, which stands for the weights."""
        seed = hashlib.blake2b(array("q", input_ids).tobytes() + self.salt, digest_size=64).digest()
        length = 3 + int.from_bytes(seed[:4], "big") % (2 * self.mean_tokens - 3)
        body = [FIRST_BYTE_ID + 33 + seed[(5 * i + i // 64) % 64] % 90 for i in range(length)]
        if OPEN_ID in input_ids[-3:] and self.reasons:
            body[length // 2] = CLOSE_ID
        ids = [*body, END_ID]
        return (ids, "stop") if len(ids) <= max_new_tokens else (ids[:max_new_tokens], "length")

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._connections: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=1 << 26)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        route = path.split("?")[0]
        is_open = not self.api_key or route in ("/ready", "/health", "/metrics")
        if not is_open and headers.get("authorization") != f"Bearer {self.api_key}":
            return await _send(writer, 401, {"error": "Unauthorized"})
        payload = json.loads(body) if body else {}
        if route == "/generate":
            return await self._generate(payload, writer)
        return await _send(writer, *self._admin(method, route, payload))

    def _admin(self, method: str, route: str, payload: dict[str, Any]) -> tuple[int, Any]:
        running = len(self.running)
        waiting = max(0, running - self.max_running_requests)
        if route in ("/ready", "/health"):
            return (200 if self.is_ready else 503), b""
        if route == "/v1/models":
            return 200, {"object": "list", "data": [{"id": Path(self.model_path).name, "max_model_len": self.context_length}]}
        if route == "/model_info":
            return 200, {
                "model_path": self.model_path,
                "served_model_name": Path(self.model_path).name,
                "weight_version": self.weight_version,
            }
        if route == "/server_info":
            return 200, {"context_length": self.context_length, "max_running_requests": self.max_running_requests}
        if route == "/v1/loads":
            load = {
                "num_running_reqs": running - waiting,
                "num_waiting_reqs": waiting,
                "token_usage": 0.1,
                "queues": {"retracted": 0},
            }
            return 200, {"loads": [load]}
        if route == "/tokenize":
            return 200, {"tokens": self.tokenizer(payload["prompt"], add_special_tokens=False)["input_ids"]}
        if route == "/metrics":
            return 404, b""
        if route == "/abort_request":
            self.aborted.append(payload["rid"])
            if event := self.running.get(payload["rid"]):
                event.set()
            return 200, b""
        if route == "/v1/chat/completions":
            text = self.tokenizer.apply_chat_template(
                payload["messages"], tools=payload.get("tools"), add_generation_prompt=True, tokenize=False
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return 200, {"choices": [{"message": {"content": "x"}, "prompt_token_ids": ids}]}
        return 404, {"detail": "Not Found"}

    async def _generate(self, payload: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        rid, input_ids, sampling = payload["rid"], payload["input_ids"], payload["sampling_params"]
        is_ours = rid.startswith(("eyas-probe", "eyas-fingerprint"))
        if is_ours:
            self.num_probes += 1
        else:
            self.payloads.append(payload)
        fault = None if is_ours else self.behave(payload, len(self.payloads))
        if not input_ids:
            self._stopping.set()  # an empty prompt ends a real server
            return False
        asked = sampling.get("max_new_tokens", 128)
        if len(input_ids) + asked > self.context_length:
            return await _send(writer, 400, {"error": {"message": "Requested token count exceeds the context length"}})
        started = time.time()
        self.running[rid] = asyncio.Event()
        self.peak_running = max(self.peak_running, len(self.running))
        try:
            delay = 3600.0 if fault == "never" else self.delay_s
            if delay:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.running[rid].wait(), delay)
            output_ids, finish = self.answer(input_ids, asked)
            if sampling.get("ignore_eos"):
                output_ids, finish = (output_ids * asked)[:asked], "length"
            reason: dict[str, Any] | None = (
                {"type": finish, "matched": END_ID} if finish == "stop" else {"type": finish, "length": asked}
            )
            if self.running[rid].is_set():
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        finally:
            self.running.pop(rid, None)
        reply = {
            "text": self.tokenizer.decode(output_ids, skip_special_tokens=False),
            "output_ids": output_ids,
            "meta_info": {
                "id": rid,
                "finish_reason": reason,
                "prompt_tokens": len(input_ids),
                "completion_tokens": len(output_ids),
                "cached_tokens": 0,
                "weight_version": self.weight_version,
                "num_retractions": 0,
                "queue_time": 0.0,
                "first_token_latency": 0.001,
                "e2e_latency": time.time() - started,
            },
        }
        if payload.get("return_logprob"):
            reply["meta_info"]["output_token_logprobs"] = [[-0.1 - self.shift_logprobs, token, None] for token in output_ids]
            reply["meta_info"]["output_top_logprobs"] = [[[-0.1, token, None], [-3.0, 0, None]] for token in output_ids]
        return await self._misbehave(fault, reply, input_ids, writer)

    async def _misbehave(
        self, fault: str | None, reply: dict[str, Any], input_ids: list[int], writer: asyncio.StreamWriter
    ) -> bool:
        meta = reply["meta_info"]
        if fault in (None, "never"):
            return await _send(writer, 200, reply)
        if fault.startswith("status:"):
            _, status, *after = fault.split(":")
            extra = {"Retry-After": after[0]} if after and after[0] else {}
            return await _send(writer, int(status), {"object": "error", "message": "as told", "code": int(status)}, extra)
        if fault == "echo":
            return await _send(writer, 500, {"object": "error", "message": f"failed on a prompt of {input_ids}", "code": 500})
        if fault == "redirect":
            return await _send(writer, 307, b"", {"Location": "http://127.0.0.1:9/generate"})
        if fault == "html":
            return await _send(writer, 200, b"<html><body>Bad gateway</body></html>", {"Content-Type": "text/html"})
        if fault == "die":
            self._stopping.set()
            return False
        if fault == "close_before":
            return False
        if fault == "reset_before":
            writer.transport.abort()
            return False
        if fault in ("reset_during", "drip"):
            raw = json.dumps(reply).encode()
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(raw)}\r\n\r\n".encode())
            if fault == "drip":
                for byte in raw:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.05)
            writer.write(raw[: len(raw) // 2])
            await writer.drain()
            writer.transport.abort()
            return False

        def stop_at(matched: int | str | None) -> None:
            meta.update(finish_reason={"type": "stop", "matched": matched})

        changes: dict[str, Callable[[], None]] = {
            "abort": lambda: meta.update(finish_reason={"type": "abort", "message": "gone", "status_code": None}),
            "abort_400": lambda: meta.update(finish_reason={"type": "abort", "message": "bad", "status_code": 400}),
            "placeholder": lambda: (
                reply.clear(),
                reply.update(text="[]", meta_info={"finish_reason": {"type": "abort", "status_code": 400}, "completion_tokens": 1}),
            ),
            "finish_null": lambda: meta.update(finish_reason=None),
            "finish_missing": lambda: meta.pop("finish_reason"),
            "nan": lambda: stop_at("NaN happened"),  # as SGLang does: the end token in place of the id outside the vocabulary
            "no_matched": lambda: stop_at(None),
            "other_stop": lambda: (stop_at(FIRST_BYTE_ID + 65), reply["output_ids"].__setitem__(-1, FIRST_BYTE_ID + 65)),
            "stop_400": lambda: meta.update(finish_reason={"type": "stop", "matched": END_ID, "status_code": 400}),
            "cut": lambda: meta.update(finish_reason={"type": "length", "length": len(reply["output_ids"])}),
            "over": lambda: (
                reply.update(output_ids=[FIRST_BYTE_ID + 65] * 400 + [END_ID]),
                meta.update(completion_tokens=401),
                stop_at(END_ID),
            ),
            "finish_other": lambda: meta.update(finish_reason={"type": "tool_calls"}),
            "wrong_count": lambda: meta.update(completion_tokens=meta["completion_tokens"] + 3),
            "prefix": lambda: reply.update(output_ids=input_ids + reply["output_ids"]),
            "prefix_counted": lambda: (
                reply.update(output_ids=input_ids + reply["output_ids"]),
                meta.update(completion_tokens=len(reply["output_ids"])),
            ),
            "truncated": lambda: meta.update(prompt_tokens=len(input_ids) - 5),
            "grown": lambda: meta.update(prompt_tokens=len(input_ids) + 1),
            "wrong_rid": lambda: meta.update(id="another"),
            "no_ids": lambda: reply.pop("output_ids"),
            "text": lambda: reply.update(text="something else"),
            "no_text": lambda: reply.update(text=""),
            "replacement": lambda: reply.update(text=reply["text"] + "\ufffd"),
            "big_id": lambda: reply["output_ids"].__setitem__(0, 100_000),
            "no_stop": lambda: (reply["output_ids"].pop(), meta.update(completion_tokens=len(reply["output_ids"]))),
            "batch": lambda: None,
        }
        if fault in ("one_id", "fffd"):
            token = FIRST_BYTE_ID + (65 if fault == "one_id" else 200)
            ids = [token] * 40 + [END_ID]
            meta.update(completion_tokens=len(ids), finish_reason={"type": "stop", "matched": END_ID})
            reply.update(output_ids=ids, text=self.tokenizer.decode(ids, skip_special_tokens=False))
        elif fault == "short":
            meta.update(completion_tokens=1, finish_reason={"type": "stop", "matched": END_ID})
            reply.update(output_ids=[END_ID], text="<|im_end|>")
        else:
            changes[fault]()
        return await _send(writer, 200, [reply] if fault == "batch" else reply)


REASONS = {200: "OK", 307: "Temporary Redirect", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 503: "Unavailable"}


async def _send(writer: asyncio.StreamWriter, status: int, body: Any, extra: dict[str, str] | None = None) -> bool:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Length": str(len(raw)), "Content-Type": "application/json", **(extra or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\n{head}\r\n".encode() + raw)
    await writer.drain()
    return True


if __name__ == "__main__":
    with LoopbackServer(Path(sys.argv[1]), max_running_requests=int(sys.argv[2]) if len(sys.argv) > 2 else 256) as loopback:
        print(loopback.url, flush=True)
        sys.stdin.read()
