"""From arguments to a serving process: model, pool, engine thread and HTTP server put together."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numba
import psutil
import torch
import uvicorn

from eyas.engine.config import EngineConfig
from eyas.engine.draft_model import DraftModel
from eyas.engine.model import TargetModel, check_supported
from eyas.engine.pages import PAGE, PagePool
from eyas.engine.runner import TargetRunner
from eyas.engine.scheduler import Runner, Scheduler
from eyas.engine.scripted import ScriptedRunner
from eyas.engine.server import create_app
from eyas.engine.service import Service
from eyas.engine.speculation import SpeculativeRunner
from eyas.target.config import TargetConfig
from eyas.target.precision import native_dtype
from eyas.target.spec import TargetSpec, load_target
from eyas.target.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)
_CACHE_SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one server process is started with."""

    target: TargetConfig
    config: EngineConfig
    draft_dir: Path | None = None
    num_draft_tokens: int = 3
    served_model: str = ""
    api_key: str = ""
    is_scripted: bool = False


def build_service(launch: Launch) -> Service:
    """Load everything and start the engine's thread; raises `ConfigError` for what cannot be served."""
    spec = load_target(launch.target)
    tokenizer = load_tokenizer(spec)
    config = launch.config
    end_ids = set(spec.eos_token_ids)
    args: dict[str, object] = {"engine": "eyas", "scripted_reasoning": launch.is_scripted, "speculative_algorithm": None}

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    runner: Runner
    if launch.is_scripted:
        runner = ScriptedRunner(lambda text: tokenizer.encode(text, add_special_tokens=False), decode, spec.eos_token_ids[0])
    else:
        check_supported(spec)
        dtype = getattr(torch, native_dtype() if config.dtype == "auto" else config.dtype)
        model = TargetModel(spec, dtype)
        model.warm_up()
        kv_heads = [spec.num_kv_heads] * spec.num_layers
        args["dtype"] = str(dtype).removeprefix("torch.")
        if launch.draft_dir is None:
            runner = TargetRunner(model, make_pool(spec, config, dtype, kv_heads), end_ids)
        else:
            draft = DraftModel(launch.draft_dir, model)
            pool = make_pool(spec, config, dtype, [*kv_heads, draft.spec.num_kv_heads])
            runner = SpeculativeRunner(model, draft, pool, end_ids, launch.num_draft_tokens)
            args |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(launch.draft_dir),
                "speculative_num_steps": launch.num_draft_tokens,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": launch.num_draft_tokens + 1,
            }
    scheduler = Scheduler(
        runner,
        end_ids=end_ids,
        decode=decode,
        max_running=config.max_running_requests,
        max_queued=config.max_queued_requests,
        chunk_tokens=config.prefill_chunk_tokens,
        on_death=lambda error: os._exit(1),  # as a real server: the port closes, clients see a reset
        prepare=lambda: set_threads(config.threads),
    )
    scheduler.start()
    return Service(
        spec=spec,
        tokenizer=tokenizer,
        scheduler=scheduler,
        config=config,
        served_model=launch.served_model or str(spec.folder),
        server_args=args,
        api_key=launch.api_key,
    )


def set_threads(count: int) -> None:
    """Let this thread's torch and compiled kernels use `count` threads; 0 takes every core."""
    cores = os.cpu_count() or 1
    torch.set_num_threads(count or cores)
    numba.set_num_threads(min(count or cores, numba.get_num_threads()))


def make_pool(spec: TargetSpec, config: EngineConfig, dtype: torch.dtype, kv_heads: list[int]) -> PagePool:
    """The KV cache of `max_total_tokens`, or of what a quarter of the free memory holds."""
    bytes_per_token = 2 * sum(kv_heads) * spec.head_dim * dtype.itemsize
    affordable = int(psutil.virtual_memory().available * _CACHE_SHARE_OF_MEMORY) // bytes_per_token
    tokens = config.max_total_tokens or min(config.max_running_requests * spec.context_length, affordable)
    num_pages = max(tokens, spec.context_length) // PAGE + 2  # one request of full length always fits
    return PagePool(kv_heads=kv_heads, num_pages=num_pages, head_dim=spec.head_dim, dtype=dtype)


def serve(service: Service, bound: socket.socket, *, parent_pid: int = 0) -> None:
    """Serve until SIGTERM, SIGINT or the end of `parent_pid`; requests under way are given two seconds."""
    config = uvicorn.Config(
        create_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=2, timeout_keep_alive=5
    )
    server = _Server(config)
    if parent_pid:
        threading.Thread(target=_follow_parent, args=(parent_pid,), daemon=True).start()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
        host, port = bound.getsockname()[:2]
        logger.info("serving url=http://%s:%d pid=%d model=%s", host, port, os.getpid(), service.served_model)
        await server.serve(sockets=[bound])

    asyncio.run(run())
    service.scheduler.stop()
    service.scheduler.join(timeout=5)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`, which ends with exit code 0."""
        yield


def _follow_parent(parent_pid: int) -> None:
    """End this process when its parent has died. (The kernel's parent-death signal follows the parent's *thread*.)"""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(0)
