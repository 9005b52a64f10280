"""One run at a time on a host of servers, also where a work queue cannot see to it.

The queue `target-host` lets one run in at a time and gives its place away while a run is paused; a person who then lets
that run go on would bring a second one onto the same servers, which have one mode at a time. So a run holds a file lock for
every server while it uses them, and waits for whoever holds it; the kernel frees it with the process. Runs on several
machines are kept apart by the queue alone.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from prefect.logging import get_run_logger

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.files import digest_json
from eyas.workspace import exclusive

POLL_S = 2.0


@asynccontextmanager
async def turn(config: RunConfig) -> AsyncIterator[None]:
    """Hold the servers of `server.urls` while the block runs; Eyas' own engine is nobody else's, and is not waited for."""
    urls = sorted(set(config.server.urls)) if config.server.kind == "sglang" else []
    folder = Path(tempfile.gettempdir()) / f"eyas-{os.getuid()}"
    with ExitStack() as held:
        for url in urls:  # in one order everywhere, so that two runs never wait for each other
            lock, is_told = folder / f"server-{digest_json(url)[:16]}.lock", False
            while True:
                try:
                    held.enter_context(exclusive(lock, f"server {url}"))
                    break
                except ConfigError as error:
                    if not is_told:
                        get_run_logger().info("waits for its turn: %s", error)
                        is_told = True
                    await asyncio.sleep(POLL_S)
        yield
