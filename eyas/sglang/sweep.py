"""Throughput and latency of a running server against concurrency, and which of its settings the numbers point to.

Closed loops of 1, 2, 4, … clients send prompts of a given length and take a fixed number of new tokens
(`ignore_eos`), so that levels can be compared. The server is used as it runs; nothing on it is changed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import EyasError, ServerError
from eyas.files import atomic_file, write_json
from eyas.progress import Progress, Report, silent
from eyas.sglang.client import SGLangClient
from eyas.sglang.config import ServerConfig
from eyas.sglang.metrics import parse_metrics

SETTINGS = (
    "max_running_requests",
    "mem_fraction_static",
    "kv_cache_dtype",
    "chunked_prefill_size",
    "cuda_graph_max_bs_decode",
    "schedule_conservativeness",
    "max_total_tokens",
)
GAIN = 1.05  # a level is worth its latency if it yields at least 5 % more


class Level(BaseModel):
    """One concurrency: tokens/s over all clients, seconds per reply (median, p90), KV use 0..1, retractions, longest queue."""

    model_config = ConfigDict(extra="forbid")

    concurrency: int
    tokens_per_s: float
    latency_s: float
    latency_p90_s: float
    token_usage: float
    num_retractions: int
    num_waiting: int


class Sweep(BaseModel):
    """A sweep's levels, the server's settings as it states them, and advice in sentences."""

    model_config = ConfigDict(extra="forbid")

    url: str
    prompt_tokens: int
    new_tokens: int
    settings: dict[str, Any] = Field(default_factory=dict)
    levels: list[Level] = Field(default_factory=list)
    advice: list[str] = Field(default_factory=list)

    def table(self) -> str:
        """The levels as a Markdown table."""
        rows = [
            f"| {level.concurrency} | {level.tokens_per_s:.1f} | {level.latency_s:.2f} | {level.latency_p90_s:.2f} "
            f"| {level.token_usage:.0%} | {level.num_waiting} | {level.num_retractions} |"
            for level in self.levels
        ]
        head = "| concurrency | tokens/s | latency, s | p90, s | KV cache | waiting | retracted |\n|---|---|---|---|---|---|---|"
        return "\n".join([head, *rows])

    def write(self, folder: Path) -> None:
        """Write `sweep.json`, `sweep.md` and `sweep.svg` into `folder`."""
        write_json(folder / "sweep.json", self.model_dump())
        with atomic_file(folder / "sweep.md", mode="w") as file:
            advice = "\n".join(f"- {line}" for line in self.advice)
            file.write(
                f"# {self.url}\n\n{self.prompt_tokens} prompt, {self.new_tokens} new tokens.\n\n{self.table()}\n\n{advice}\n"
            )
        _plot(self, folder / "sweep.svg")


async def sweep(
    url: str,
    config: ServerConfig,
    prompt_ids: list[int],
    *,
    vocab_size: int,
    api_key: str = "",
    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    new_tokens: int = 256,
    rounds: int = 2,
    report: Report = silent,
) -> Sweep:
    """Measure `url` level by level until more clients no longer help; `prompt_ids` is a prompt of typical length.

    Each client sends `rounds` requests per level. Raises `ServerError` if the server fails under
    the load or gives other replies than asked, `RequestRefused` if it takes no such prompt.
    """
    async with SGLangClient(url, config, api_key=api_key) as client:
        info = await client.server_info()
        result = Sweep(
            url=client.url,
            prompt_tokens=len(prompt_ids),
            new_tokens=new_tokens,
            settings={name: info[name] for name in SETTINGS if name in info},
        )
        await _request(client, prompt_ids, vocab_size, new_tokens)  # warm
        for number, concurrency in enumerate(levels):
            level = await _measure(client, prompt_ids, vocab_size, concurrency, new_tokens, rounds)
            result.levels.append(level)
            figures: dict[str, float | int | str] = {"concurrency": concurrency, "tokens_per_s": round(level.tokens_per_s, 1)}
            report(Progress(stage="sweep", done=number + 1, total=len(levels), unit="levels", figures=figures))
            if _is_past_the_knee(result.levels):
                break
        report(Progress(stage="sweep", done=len(result.levels), total=len(result.levels), unit="levels", is_final=True))
    result.advice = advise(result)
    return result


async def _measure(
    client: SGLangClient, prompt_ids: list[int], vocab_size: int, concurrency: int, new_tokens: int, rounds: int
) -> Level:
    before = parse_metrics(await client.metrics()).get("num_retracted_reqs", 0.0)
    peaks = {"token_usage": 0.0, "waiting": 0.0, "retracted": 0.0}
    watcher = asyncio.create_task(_watch(client, peaks))
    started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(_loop(client, prompt_ids, vocab_size, new_tokens, rounds)) for _ in range(concurrency)]
    except* EyasError as errors:
        raise errors.exceptions[0] from errors
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    elapsed_s = time.monotonic() - started
    latencies = sorted(latency for loop in loops for latency in loop.result())
    after = parse_metrics(await client.metrics()).get("num_retracted_reqs", 0.0)
    return Level(
        concurrency=concurrency,
        tokens_per_s=concurrency * rounds * new_tokens / elapsed_s,
        latency_s=latencies[len(latencies) // 2],
        latency_p90_s=latencies[min(len(latencies) - 1, int(0.9 * len(latencies)))],
        token_usage=peaks["token_usage"],
        num_retractions=int(max(0.0, after - before, peaks["retracted"])),
        num_waiting=int(peaks["waiting"]),
    )


async def _loop(client: SGLangClient, prompt_ids: list[int], vocab_size: int, new_tokens: int, rounds: int) -> list[float]:
    return [await _request(client, prompt_ids, vocab_size, new_tokens) for _ in range(rounds)]


async def _request(client: SGLangClient, prompt_ids: list[int], vocab_size: int, new_tokens: int) -> float:
    """Send one request with a first id of its own, so that no prefix is cached; returns its seconds."""
    rid = f"eyas-sweep-{uuid.uuid4().hex[:12]}"
    ids = [random.randrange(vocab_size), *prompt_ids[1:]]
    sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    started = time.monotonic()
    body = await client.generate_raw({"rid": rid, "input_ids": ids, "sampling_params": sampling}, rid=rid, deadline_s=3600.0)
    try:
        num_tokens = len(json.loads(body)["output_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(
            f"{client.url}/generate answers {len(body)} bytes without output_ids; is this an SGLang server?"
        ) from error
    if num_tokens != new_tokens:
        raise ServerError(f"{client.url}/generate gave {num_tokens} tokens, {new_tokens} were asked with ignore_eos; see its log")
    return time.monotonic() - started


async def _watch(client: SGLangClient, peaks: dict[str, float]) -> None:
    while True:
        load = await client.loads()
        for name in peaks:
            peaks[name] = max(peaks[name], load[name])
        await asyncio.sleep(0.5)


def _is_past_the_knee(levels: list[Level]) -> bool:
    """True after two levels in a row that bring less than 5 % over the best before them."""
    if len(levels) < 3:
        return False
    best = max(level.tokens_per_s for level in levels[:-2])
    return all(level.tokens_per_s < GAIN * best for level in levels[-2:])


def advise(result: Sweep) -> list[str]:
    """What the numbers say, in sentences that name the setting."""
    best = result.levels[0]
    for level in result.levels[1:]:
        if level.tokens_per_s >= GAIN * best.tokens_per_s:
            best = level
    last, settings = result.levels[-1], result.settings
    advice = [f"server.max_concurrency: {best.concurrency} gives {best.tokens_per_s:.0f} tokens/s; more only adds waiting."]
    limit = settings.get("max_running_requests")
    if isinstance(limit, int) and any(level.num_waiting > 0 for level in result.levels) and best.token_usage < 0.7:
        advice.append(
            f"requests waited while the KV cache was {best.token_usage:.0%} full: raise --max-running-requests (now {limit})."
        )
    if any(level.num_retractions for level in result.levels):
        advice.append(
            "requests were retracted: lower --max-running-requests, raise --schedule-conservativeness, or make room for the KV "
            f"cache with --mem-fraction-static (now {settings.get('mem_fraction_static')}) or --kv-cache-dtype fp8_e4m3."
        )
    elif best.token_usage > 0.9:
        advice.append(
            f"the KV cache was {best.token_usage:.0%} full at the best level: raise --mem-fraction-static "
            f"(now {settings.get('mem_fraction_static')}) or set --kv-cache-dtype fp8_e4m3 (now {settings.get('kv_cache_dtype')})."
        )
    if last is best and len(result.levels) > 1:
        advice.append("throughput still rose at the last level: sweep further.")
    elif _is_past_the_knee(result.levels):
        advice.append(f"the sweep ended at {last.concurrency}: two levels in a row brought less than 5 %.")
    graphs = settings.get("cuda_graph_max_bs_decode")
    if isinstance(graphs, int) and graphs < best.concurrency:
        advice.append(f"CUDA graphs stop at batch {graphs}, below the best level: raise --cuda-graph-max-bs.")
    chunk = settings.get("chunked_prefill_size")
    if isinstance(chunk, int) and 0 < chunk < result.prompt_tokens:
        advice.append(f"prompts of {result.prompt_tokens} tokens are prefilled in pieces of {chunk}: raise --chunked-prefill-size.")
    return advice


def _plot(result: Sweep, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    concurrency = [level.concurrency for level in result.levels]
    axes.plot(concurrency, [level.tokens_per_s for level in result.levels], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("tokens/s")
    second = axes.twinx()
    second.plot(concurrency, [level.latency_s for level in result.levels], marker=".", linestyle="--", color="gray")
    second.set_ylabel("median latency, s (dashed)")
    with atomic_file(path) as file:
        figure.savefig(file, format="svg")
