"""A server that answers at once with prepared replies of the reference's lengths; `python -m tests.sglang.instant TARGET MEAN`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from tests.sglang.tiny import END_ID, FIRST_BYTE_ID

CLASSES = 64


def prepared(target: Path, mean: int) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """(reply before and after the places of rid and prompt length, chat replies) for 64 lengths, log-normal like the reference."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    rng = np.random.default_rng(0)
    raw = np.exp(rng.normal(np.log(0.457 * mean), 1.25, CLASSES))
    replies, chats = [], []
    for length in np.clip(raw * mean / raw.mean(), 2, 10_240).astype(int):
        ids = [int(value) for value in rng.integers(FIRST_BYTE_ID + 33, FIRST_BYTE_ID + 120, length)] + [END_ID]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        head = json.dumps({"text": text, "output_ids": ids})[:-1] + ',"meta_info":{"finish_reason":{"type":"stop","matched":2},'
        replies.append(
            (head.encode(), f'"completion_tokens":{len(ids)},"cached_tokens":0,"e2e_latency":0.1,"queue_time":0.0'.encode())
        )
        chats.append(json.dumps({"choices": [{"message": {"content": text}, "prompt_token_ids": []}]}).encode())
    return replies, chats


async def main(target: Path, mean: int) -> None:
    replies, chats = prepared(target, mean)
    tokenizer = AutoTokenizer.from_pretrained(target)
    context = json.loads((target / "config.json").read_text())["max_position_embeddings"]

    def answer(route: bytes, body: bytes) -> bytes:
        if route == b"/generate":
            rid = body[8 : body.index(b'"', 8)]  # the client sends {"rid":"…","input_ids":[…],…}
            start = body.index(b"[") + 1
            prompt_tokens = body[start : body.index(b"]", start)].count(b",") + 1
            if rid.startswith((b"eyas-probe", b"eyas-fingerprint")):
                ids = [FIRST_BYTE_ID + 40] * (1 if rid.startswith(b"eyas-probe") else 16)
                meta = {"id": rid.decode(), "finish_reason": {"type": "length", "length": len(ids)}, "prompt_tokens": prompt_tokens}
                return json.dumps({"text": "", "output_ids": ids, "meta_info": {**meta, "completion_tokens": len(ids)}}).encode()
            head, tail = replies[hash(rid) % CLASSES]
            return head + b'"id":"' + rid + b'","prompt_tokens":' + str(prompt_tokens).encode() + b"," + tail + b"}}"
        payload = json.loads(body) if body else {}
        if route == b"/v1/chat/completions":
            if not payload.get("return_prompt_token_ids"):
                return chats[hash(body) % CLASSES]
            text = tokenizer.apply_chat_template(payload["messages"], add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return json.dumps({"choices": [{"prompt_token_ids": ids}]}).encode()
        answers = {
            b"/v1/models": {"data": [{"id": target.name, "max_model_len": context}]},
            b"/model_info": {"model_path": str(target), "weight_version": "default"},
            b"/server_info": {"max_running_requests": 256},
            b"/v1/loads": {"loads": [{"num_running_reqs": 100, "num_waiting_reqs": 0, "queues": {}}]},
            b"/tokenize": {"tokens": tokenizer(payload.get("prompt", ""), add_special_tokens=False)["input_ids"]},
        }
        return json.dumps(answers.get(route, {})).encode()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                low = head.lower()
                at = low.find(b"content-length:")
                size = int(low[at + 15 : low.index(b"\r\n", at)]) if at >= 0 else 0
                body = await reader.readexactly(size)
                reply = answer(head.split(b" ", 2)[1], body)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply
                )
        writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 24)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
