"""The servers that a benchmark compares: the same target without and with the draft.

Three ways, one interface. `EmbeddedServers`: Eyas' engine twice, side by side, started here. `RunningServers`:
two real servers that run beside each other (`server.urls`, `benchmark.draft_urls`). `RestartedServers`: one
real host that is brought from one mode into the other, for a target that fills it. Whatever is given out has
said of itself that it speculates as asked, and serves as many requests at once as the other side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import httpx

from eyas.config import RunConfig
from eyas.engine.config import MOST_RUNNING
from eyas.engine.process import EngineProcess
from eyas.errors import ConfigError, ServerError
from eyas.speculate.config import DraftShape
from eyas.speculate.deploy import Check, identity_checks
from eyas.speculate.load import Server
from eyas.speculate.results import Side
from eyas.target.spec import TargetSpec
from eyas.workspace import RunFolder

Serve = Callable[[Side, DraftShape], AbstractContextManager[list[str]]]
"""Brings a host into serving without ("off") or with ("on") the draft in a shape; gives its URLs."""


class Servers(Protocol):
    """Who gives the servers out."""

    is_side_by_side: bool
    """Both sides at once, so that blocks can alternate as finely as one likes."""

    account: Account

    def get(self, side: Side, shape: DraftShape, *, fresh: bool = False) -> Server:
        """A ready server of that side; `fresh` asks for a restart where there is one host for both."""


class Account:
    """What the servers said of themselves."""

    def __init__(self, config: RunConfig, spec: TargetSpec, draft: str, api_key: str) -> None:
        self._config, self._spec, self._draft, self._api_key = config, spec, draft, api_key
        self._target = ""
        self._limits: dict[Side, int] = {}
        self.dtype = spec.dtype
        self.details: dict[str, Any] = {}
        self.identity: dict[str, list[Check]] = {}
        """Checks per shape of the draft, as the server with the draft answered them last."""

    def server(self, url: str, side: Side, shape: DraftShape) -> Server:
        """The server at `url`, after a look at its own account.

        Raises `ConfigError` where the side without draft has one, or the sides differ in what they may run at once.
        """
        info = server_info(url, self._api_key)
        if side == "off":
            self._target = str(info.get("model_path"))
            if info.get("speculative_algorithm"):
                raise ConfigError(
                    f"server {url} speculates ({info['speculative_algorithm']}), wanted the target alone; start it without a draft"
                )
        else:
            dtype = str(info["dtype"])
            self.dtype = {"auto": self._spec.dtype}.get(dtype, dtype)
            self.details = {"dtype": dtype, "max_running_requests": info.get("max_running_requests")}
            self.identity[str(shape)] = identity_checks(info, target=self._target, draft=self._draft, shape=shape)
        self._check_limit(url, side, info)
        stop_token_ids = tuple(self._spec.eos_token_ids)
        return Server(
            url=url, config=self._config.server, has_draft=side == "on", stop_token_ids=stop_token_ids, api_key=self._api_key
        )

    def _check_limit(self, url: str, side: Side, info: dict[str, Any]) -> None:
        limit, wanted = info.get("max_running_requests"), self._config.benchmark.most_in_flight
        if limit is None:
            return
        self._limits[side] = int(limit)
        if self._limits[side] < wanted:
            raise ConfigError(
                f"server {url} runs {limit} requests at once, the benchmark wants {wanted} in flight; "
                f"start it with --max-running-requests {wanted}, or lower benchmark.concurrency and counting_concurrency"
            )
        if len(set(self._limits.values())) > 1:
            raise ConfigError(
                f"--max-running-requests is {self._limits['off']} without the draft and {self._limits['on']} with it; "
                "give both the same, or the comparison says nothing (SGLang lowers it to 48 when it speculates)"
            )


class EmbeddedServers:
    """Eyas' own engine without the draft, and beside it one with the draft in the shape last asked for."""

    is_side_by_side = True

    def __init__(self, run: RunFolder, config: RunConfig, spec: TargetSpec, stack: ExitStack, account: Account, cache: int) -> None:
        self._run, self._spec, self._config, self._stack, self.account = run, spec, config, stack, account
        running = max(config.server.engine.max_running_requests, config.benchmark.most_in_flight)
        update = {"dtype": config.benchmark.dtype, "port": 0, "max_total_tokens": cache, "max_running_requests": running}
        self._engine = config.server.engine.model_copy(update=update)
        self._served: dict[Side, tuple[DraftShape, Server, EngineProcess]] = {}
        self._key = account._api_key
        run.logs.mkdir(parents=True, exist_ok=True)

    def get(self, side: Side, shape: DraftShape, *, fresh: bool = False) -> Server:
        if side == "on":
            self.get("off", shape)  # first, so that both run in the precision that it found
        if side in self._served and (side == "off" or self._served[side][0] == shape):
            return self._served[side][1]
        if side in self._served:
            self._served.pop(side)[2].stop()
        named: dict[str, Any] = (
            {"draft_dir": self._run.export.resolve(), "num_draft_tokens": shape.num_steps} if side == "on" else {}
        )
        process = EngineProcess(
            self._spec.folder,
            config=self._engine,
            context_length=self._config.target.context_length,
            api_key=self._key,
            log=self._run.logs / f"benchmark-{side}.log",
            **named,
        )
        self._stack.enter_context(process)
        server = self.account.server(process.url, side, shape)
        self._engine = self._engine.model_copy(update={"dtype": server_info(process.url, self._key)["dtype"]})
        self._served[side] = (shape, server, process)
        return server


class RunningServers:
    """Two real servers, started by the operator."""

    is_side_by_side = True

    def __init__(self, config: RunConfig, account: Account) -> None:
        self.account = account
        self._urls: dict[Side, str] = {"off": config.server.urls[0], "on": config.benchmark.draft_urls[0]}

    def get(self, side: Side, shape: DraftShape, *, fresh: bool = False) -> Server:
        if side == "on":
            self.account.server(self._urls["off"], "off", shape)
        return self.account.server(self._urls[side], side, shape)


class RestartedServers:
    """One host, brought from one side to the other; a restart costs the loading of the target."""

    is_side_by_side = False

    def __init__(self, serve: Serve, stack: ExitStack, account: Account) -> None:
        self._serve, self._stack, self.account = serve, stack, account
        self._now: tuple[Side, DraftShape | None, Server] | None = None

    def get(self, side: Side, shape: DraftShape, *, fresh: bool = False) -> Server:
        wanted = (side, shape if side == "on" else None)
        if self._now is not None and self._now[:2] == wanted and not fresh:
            return self._now[2]
        self._now = None
        self._stack.close()  # the other side goes before this one comes
        (url, *_) = self._stack.enter_context(self._serve(side, shape))
        server = self.account.server(url, side, shape)
        self._now = (*wanted, server)
        return server


def open_servers(
    run: RunFolder,
    config: RunConfig,
    spec: TargetSpec,
    stack: ExitStack,
    *,
    cache_tokens: int,
    api_key: str,
    serve: Serve | None = None,
) -> Servers:
    """The servers that the config describes; `stack` ends what they start. Embedded ones hold `cache_tokens` each.

    Raises `ConfigError` where no server with the draft can be had.
    """
    check_shapes(config)
    account = Account(config, spec, str(run.export.resolve()), api_key)
    if config.server.kind == "embedded":
        return EmbeddedServers(run, config, spec, stack, account, cache_tokens)
    if config.benchmark.draft_urls:
        return RunningServers(config, account)
    if serve is None:
        raise ConfigError(
            f"benchmark.draft_urls is empty; start SGLang with the draft as {run.benchmark}/launch.sh does, and give its URL"
        )
    return RestartedServers(serve, stack, account)


def check_shapes(config: RunConfig) -> None:
    """Raise `ConfigError` for what the servers that the config names cannot do."""
    if config.server.kind == "embedded":
        for shape in config.benchmark.shapes:
            if shape.top_k > 1:
                raise ConfigError(f"benchmark.grid: {shape} is a tree, the embedded engine drafts chains; leave it to SGLang")
        if config.benchmark.most_in_flight > MOST_RUNNING:
            raise ConfigError(
                f"benchmark wants {config.benchmark.most_in_flight} requests in flight, the embedded engine runs {MOST_RUNNING} "
                "at once; lower benchmark.concurrency and counting_concurrency"
            )
    elif config.benchmark.draft_urls and len(config.benchmark.shapes) > 1:
        raise ConfigError("benchmark.grid wants other shapes of the draft than the server of benchmark.draft_urls has; empty one")


def server_info(url: str, api_key: str) -> dict[str, Any]:
    """A server's own account; raises `ServerError` where it cannot be read."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/server_info", headers=headers, timeout=30.0, trust_env=False)
        response.raise_for_status()
        info: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{url}/server_info cannot be read: {error!r}; is the server up and the key right?") from error
    return info
