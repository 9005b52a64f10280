"""The monitor of a pool: readiness, load and progress of every server, and the probe that closes a breaker.

`/ready` says that a server is alive, `/v1/loads` and `generation_tokens_total` that it progresses. `/health`
is not used: it generates a token, fails when a server is merely busy and answers 200 when it hangs.
Nothing here restarts a server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid

from eyas.errors import ConfigError, EyasError
from eyas.sglang.metrics import parse_metrics
from eyas.sglang.pool import DEFAULT_LIMIT, Server, ServerPool

log = logging.getLogger(__name__)

PROBE_DEADLINE_S = 60.0


class PoolMonitor:
    """Polls every server of `pool` each `interval_s` until cancelled; `probe_ids` is a short valid prompt."""

    def __init__(self, pool: ServerPool, probe_ids: list[int], *, interval_s: float, fixed_limit: int = 0) -> None:
        self._pool = pool
        self._probe_ids = probe_ids
        self._interval_s = interval_s
        self._fixed_limit = fixed_limit
        self._retracted: dict[str, float] = {}
        self.admit = _admit_any

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            await self.poll()
            await asyncio.sleep(self._interval_s)

    async def poll(self) -> None:
        """One look at all servers, together."""
        await asyncio.gather(*(self._look(server) for server in list(self._pool.servers)))
        await self._pool.wake()

    async def _look(self, server: Server) -> None:
        if server.state in ("open", "joining"):
            if time.monotonic() >= server.probe_at:
                await self._probe(server)
            return
        try:
            load = await server.client.loads()
            metrics = parse_metrics(await server.client.metrics())
            info = await server.client.model_info()
        except EyasError as error:
            if not await server.client.is_ready():
                server.open_breaker(f"not ready ({type(error).__name__})")
            return
        load["generation_tokens"] = metrics.get("generation_tokens_total", 0.0)
        difference = server.difference(str(info.get("weight_version") or ""), str(info.get("model_path") or ""))
        if not difference and load["generation_tokens"] < server.load.get("generation_tokens", 0.0):
            difference = "its count of generated tokens fell, so it was started anew"
        if difference:
            server.load = {}
            server.doubt(difference)
            return
        retracted = max(metrics.get("num_retracted_reqs", 0.0), load["retracted"])
        new_retractions = retracted - self._retracted.get(server.url, 0.0)
        self._retracted[server.url] = retracted
        if self._fixed_limit:
            server.load = load
        else:
            server.adapt(load, int(max(0.0, new_retractions)))

    async def _probe(self, server: Server) -> None:
        """Half-open: the server must be ready, be the right one, and really generate a token."""
        rid = f"eyas-probe-{uuid.uuid4().hex[:12]}"
        payload = {"rid": rid, "input_ids": self._probe_ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            if server.state == "joining":
                await self.learn_limit(server)
            await self.admit(server)
            reply = json.loads(await server.client.generate_raw(payload, rid=rid, deadline_s=PROBE_DEADLINE_S))
            if reply["meta_info"]["finish_reason"]["type"] not in ("length", "stop"):
                raise ValueError("probe aborted")
        except ConfigError as error:
            server.is_proven = False
            server.open_breaker(f"probe: {error}")
        except EyasError as error:
            server.open_breaker(f"probe: {type(error).__name__}: {error}")
        except (ValueError, KeyError, TypeError):
            server.open_breaker("probe: not a reply of /generate")
        else:
            server.close_breaker()

    async def learn_limit(self, server: Server) -> None:
        """Set the server's limit: ours if configured, otherwise its own `max_running_requests`."""
        if self._fixed_limit:
            server.set_ceiling(self._fixed_limit)
            return
        info = await server.client.server_info()
        limit = info.get("max_running_requests")
        if not isinstance(limit, int) or limit < 1:
            limit = int((await server.client.loads())["max_running"]) or DEFAULT_LIMIT
        server.set_ceiling(limit)


async def _admit_any(server: Server) -> None:
    """The default check of a server that joins or returns: none."""
