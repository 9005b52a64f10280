"""The two servers that a benchmark compares: the same target without and with the draft.

The embedded engine is started here, twice; real SGLang servers are taken as they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.config import RunConfig
from eyas.engine.process import EngineProcess
from eyas.errors import ConfigError, ServerError
from eyas.speculate.deploy import Check, identity_checks
from eyas.speculate.load import Server
from eyas.speculate.results import Side
from eyas.target.spec import TargetSpec
from eyas.workspace import RunFolder


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Both servers, what they say of themselves, and whether the one with the draft is what it claims to be."""

    servers: dict[Side, Server]
    dtype: str
    details: dict[str, Any]
    identity: list[Check]


@contextmanager
def open_servers(run: RunFolder, config: RunConfig, spec: TargetSpec, *, cache_tokens: int, api_key: str) -> Iterator[Pair]:
    """Start or find both servers; embedded ones hold `cache_tokens` each, so that two fit side by side.

    Raises `ConfigError` where no server with the draft is named, `ServerError` where one does not answer.
    """
    with ExitStack() as stack:
        if config.server.kind == "embedded":
            urls = _start_embedded(stack, run, config, spec, cache_tokens, api_key)
        elif not config.benchmark.draft_urls:
            raise ConfigError(
                f"benchmark.draft_urls is empty; start SGLang with the draft as {run.benchmark}/launch.sh does, and give its URL"
            )
        else:
            urls = {"off": config.server.urls[0], "on": config.benchmark.draft_urls[0]}
        infos = {side: _server_info(url, api_key) for side, url in urls.items()}
        yield Pair(
            servers={
                side: Server(
                    url=url, config=config.server, has_draft=side == "on", stop_token_ids=tuple(spec.eos_token_ids), api_key=api_key
                )
                for side, url in urls.items()
            },
            dtype={"auto": spec.dtype}.get(infos["on"]["dtype"], infos["on"]["dtype"]),
            details={"dtype": infos["on"]["dtype"], "max_running_requests": infos["on"].get("max_running_requests")},
            identity=identity_checks(
                infos["on"],
                target=str(infos["off"].get("model_path")),
                draft=str(run.export.resolve()),
                num_draft_tokens=config.benchmark.num_draft_tokens,
            ),
        )


def _start_embedded(
    stack: ExitStack, run: RunFolder, config: RunConfig, spec: TargetSpec, cache_tokens: int, api_key: str
) -> dict[Side, str]:
    run.logs.mkdir(parents=True, exist_ok=True)
    engine = config.server.engine.model_copy(update={"dtype": config.benchmark.dtype, "port": 0, "max_total_tokens": cache_tokens})
    context_length = config.target.context_length
    off = stack.enter_context(
        EngineProcess(
            spec.folder, config=engine, context_length=context_length, api_key=api_key, log=run.logs / "benchmark-off.log"
        )
    )
    # Both sides in one precision: what `auto` found for the first holds for the second.
    engine = engine.model_copy(update={"dtype": _server_info(off.url, api_key)["dtype"]})
    on = stack.enter_context(
        EngineProcess(
            spec.folder,
            config=engine,
            draft_dir=run.export.resolve(),
            num_draft_tokens=config.benchmark.num_draft_tokens,
            context_length=context_length,
            api_key=api_key,
            log=run.logs / "benchmark-on.log",
        )
    )
    return {"off": off.url, "on": on.url}


def _server_info(url: str, api_key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/server_info", headers=headers, timeout=30.0, trust_env=False)
        response.raise_for_status()
        info: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{url}/server_info cannot be read: {error!r}; is the server up and the key right?") from error
    return info
