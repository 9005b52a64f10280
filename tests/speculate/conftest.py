"""A tiny target, and a loopback server that answers for it as an engine with or without a draft would."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN = 96, 32


def tiny_target() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


_replies: dict[tuple[int, ...], list[int]] = {}  # (id of the model, *prompt)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], cap: int, stop: list[int]) -> list[int]:
    """The slow truth, one whole forward per token; what was made once is kept."""
    reply = _replies.setdefault((id(model), *prompt), [])
    while len(reply) < cap:
        reply.append(int(model(torch.tensor([prompt + reply])).logits[0, -1].argmax()))
    end = next((place for place, token in enumerate(reply[:cap]) if token in stop), cap - 1)
    return reply[: end + 1]


@torch.inference_mode()
def top_logprobs(model: Any, prompt: list[int], reply: list[int], count: int) -> list[list[tuple[float, int, None]]]:
    """SGLang's shape: per generated token the likeliest as [log-probability, id, text or null]."""
    logprobs = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [
        [(value, token, None) for value, token in zip(*row, strict=True)]
        for row in zip(*map(torch.Tensor.tolist, logprobs.topk(count)), strict=True)
    ]


@dataclass
class FakeEngine:
    """Speaks `/generate` and `/server_info`; with `accepted` set it claims that many accepted drafts per verification."""

    model: Any
    info: dict[str, Any] = field(default_factory=dict)
    accepted: int | None = None
    change: Callable[[list[int]], list[int]] = lambda ids: ids
    requests: list[dict[str, Any]] = field(default_factory=list)
    meta_changes: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    keys: list[str] = field(default_factory=list)

    async def generate(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        sampling = body["sampling_params"]
        stop = sampling.get("stop_token_ids", [2])  # the fingerprint leaves it to the server
        ids = self.change(greedy(self.model, body["input_ids"], sampling["max_new_tokens"], stop))
        is_stopped = ids[-1] in stop
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]} if is_stopped else {"type": "length", "length": len(ids)},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "first_token_latency": 0.01,
        }
        if self.accepted is not None:
            verifications = -(-(len(ids) - 1) // (1 + self.accepted))
            meta |= {"spec_verify_ct": verifications, "spec_num_correct_drafts": verifications * self.accepted}
        if body.get("return_logprob"):
            top = top_logprobs(self.model, body["input_ids"], ids, body["top_logprobs_num"])
            meta |= {"output_top_logprobs": top, "output_token_logprobs": [step[0] for step in top]}
        return JSONResponse({"text": "", "output_ids": ids, "meta_info": meta | self.meta_changes}, status_code=self.status)

    async def server_info(self, request: Request) -> JSONResponse:
        self.keys.append(request.headers.get("authorization", ""))
        return JSONResponse({"dtype": "float32", "max_running_requests": 8, "model_path": "tiny"} | self.info)


@contextlib.contextmanager
def served(engine: FakeEngine) -> Iterator[str]:
    routes = [Route("/generate", engine.generate, methods=["POST"]), Route("/server_info", engine.server_info)]
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 240
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=240)


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_target()
