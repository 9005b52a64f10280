"""Load for the benchmark: the same prompts, ids in and ids out, with a fixed number in flight.

The pause between two requests is the client's own and the same on both sides. A reply that is not whole
raises: a benchmark over failed requests means nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.errors import ServerError
from eyas.sglang.client import SGLangClient
from eyas.sglang.config import ServerConfig
from eyas.speculate.accept import AcceptCounts, counts_from_sglang
from eyas.speculate.sets import BenchmarkPrompt


@dataclass(frozen=True, kw_only=True)
class ServedReply:
    """One reply: its ids (end token included), times in seconds, and raw counts where a draft was on."""

    id: str
    output_ids: list[int]
    latency_s: float
    first_token_s: float | None
    counts: AcceptCounts | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """All replies of one block and its wall time."""

    replies: list[ServedReply]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(reply.output_ids) for reply in self.replies)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server under load; `has_draft` says that its replies must carry counts of the draft."""

    url: str
    config: ServerConfig
    has_draft: bool
    stop_token_ids: tuple[int, ...]
    api_key: str = ""


def run_block(
    server: Server, prompts: Sequence[BenchmarkPrompt], caps: Sequence[int], concurrency: int, *, temperature: float = 0.0
) -> Block:
    """Send `prompts` in order, `concurrency` in flight, each with its cap in new tokens; replies in the same order."""
    return asyncio.run(_run_block(server, prompts, caps, concurrency, temperature))


async def _run_block(
    server: Server, prompts: Sequence[BenchmarkPrompt], caps: Sequence[int], concurrency: int, temperature: float
) -> Block:
    async with SGLangClient(server.url, server.config, api_key=server.api_key) as client:
        turns = asyncio.Semaphore(concurrency)

        async def one(number: int, prompt: BenchmarkPrompt, cap: int) -> ServedReply:
            async with turns:
                return await _ask(client, server, prompt, cap, temperature, rid=f"benchmark-{number}-{prompt.id}")

        started = time.perf_counter()
        numbered = enumerate(zip(prompts, caps, strict=True))
        tasks = [asyncio.create_task(one(number, prompt, cap)) for number, (prompt, cap) in numbered]
        try:
            replies = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # the others are aborted on the server while the client is still open
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return Block(replies=list(replies), wall_s=time.perf_counter() - started)


async def _ask(
    client: SGLangClient, server: Server, prompt: BenchmarkPrompt, cap: int, temperature: float, *, rid: str
) -> ServedReply:
    sampling = {
        "temperature": temperature,
        "max_new_tokens": cap,
        "stop_token_ids": list(server.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    payload = {"rid": rid, "input_ids": prompt.input_ids, "sampling_params": sampling}
    deadline_s = server.config.deadline_floor_s + cap / server.config.min_tokens_per_s
    started = time.perf_counter()
    body = await client.generate_raw(payload, rid=rid, deadline_s=deadline_s)
    return _reply(body, server, prompt, latency_s=time.perf_counter() - started)


def _reply(body: bytes, server: Server, prompt: BenchmarkPrompt, *, latency_s: float) -> ServedReply:
    try:
        value = json.loads(body)
        meta_info, output_ids = value["meta_info"], value["output_ids"]
        finish_reason = (meta_info["finish_reason"] or {}).get("type")
        seen = (meta_info["prompt_tokens"], meta_info["completion_tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{server.url}/generate gave prompt {prompt.id} no reply of the contract: {error!r}") from error
    if finish_reason not in ("stop", "length") or seen != (len(prompt.input_ids), len(output_ids)):
        raise ServerError(
            f"{server.url}/generate gave prompt {prompt.id} no whole reply: finish_reason={finish_reason!r}, "
            f"{seen[0]} prompt tokens (sent {len(prompt.input_ids)}), {seen[1]} completion tokens (got {len(output_ids)} ids)"
        )
    first_token_s = meta_info.get("first_token_latency")
    return ServedReply(
        id=prompt.id,
        output_ids=output_ids,
        latency_s=latency_s,
        first_token_s=None if first_token_s is None else float(first_token_s),
        # A reply of one token came from the prefill alone: nothing was verified.
        counts=counts_from_sglang(meta_info) if server.has_draft and len(output_ids) > 1 else None,
    )
