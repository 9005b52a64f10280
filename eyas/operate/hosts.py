"""The host of the target: what brings its servers into the mode that a phase needs, and proves it.

The same processors serve generation, then free themselves for extraction and training, then serve with
the draft. Three ways: `EmbeddedHost` starts and ends Eyas' own engine; `ManualHost` asks the operator;
`CommandHost` runs the operator's commands. The last two wait until every server answers and verify
that it serves the wanted model, with the draft in the wanted shape or without one, before any prompt is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import httpx

from eyas.config import RunConfig
from eyas.errors import ConfigError, ServerError
from eyas.operate.children import child_process, last_lines, wait_for
from eyas.operate.config import Mode
from eyas.operate.wording import duration
from eyas.speculate.config import DraftShape
from eyas.speculate.deploy import identity_checks
from eyas.speculate.results import Side
from eyas.speculate.servers import Serve, server_info
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

if TYPE_CHECKING:
    from eyas.engine.keeper import Keeper
    from eyas.engine.process import EngineProcess

Say = Callable[[str], None]


@dataclass(frozen=True)
class Draft:
    """What is served in mode draft."""

    folder: Path
    shape: DraftShape


class TargetHost(Protocol):
    """Whoever can bring the target's servers into a mode."""

    def enter(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> list[str]:
        """Bring the servers into `mode` and leave them there; gives their base URLs ([] where the mode has no server).

        `alone` waits for a target without any draft, which generation does not ask for: a draft changes no reply.
        """

    def serving(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> AbstractContextManager[list[str]]:
        """The same while a block runs; whatever was started for it ends with it."""


def sides_of(host: TargetHost, export: Path) -> Serve:
    """How a benchmark brings `host` from the target alone to the target with the draft, and back."""

    def serve(side: Side, shape: DraftShape) -> AbstractContextManager[list[str]]:
        draft = None if side == "off" else Draft(export.resolve(), shape)
        return host.serving("draft" if draft else "generate", draft=draft, alone=draft is None)

    return serve


def host_of(run: RunFolder, config: RunConfig, *, api_key: str = "", say: Say = print) -> TargetHost:
    """The host that the config names."""
    if config.server.kind == "embedded":
        return EmbeddedHost(run, config, api_key=api_key, say=say)
    if config.operate.host.kind == "command":
        return CommandHost(run, config, api_key=api_key, say=say)
    return ManualHost(config, api_key=api_key, say=say)


@dataclass
class EmbeddedHost:
    """Eyas' own engine: a child process, for as long as a phase needs it or until the next mode.

    One that dies while it generates (the kernel's OOM killer picks the largest) is started again on its port: the
    session waits for its server and nobody else would bring it back. A benchmark has no use for a server that began anew.
    """

    run: RunFolder
    config: RunConfig
    api_key: str = field(default="", repr=False)
    say: Say = print
    _engine: EngineProcess | None = field(default=None, repr=False)
    _keeper: Keeper | None = field(default=None, repr=False)

    def enter(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> list[str]:
        from eyas.engine.keeper import Keeper
        from eyas.engine.process import EngineProcess

        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None
        if self._engine is not None:
            self._engine.stop()
            self._engine = None
        if mode in ("extract", "none"):  # the states come from transformers, in our own process
            return []
        self._engine = EngineProcess(
            load_target(self.config.target).folder,
            config=self.config.server.engine,
            draft_dir=draft.folder if draft else None,
            num_draft_tokens=draft.shape.num_steps if draft else 0,
            context_length=self.config.target.context_length,
            api_key=self.api_key,
            log=self.run.logs / f"engine-{mode}.log",
        )
        self.say(
            f"engine: starting with the target{' and the draft' if draft else ''} (log {self.run.logs / f'engine-{mode}.log'})"
        )
        began = time.monotonic()
        self._engine.start()
        self.say(f"engine: ready at {self._engine.url} after {duration(time.monotonic() - began)}")
        if mode == "generate" and not alone:
            self._keeper = Keeper(self._engine)
        return [self._engine.url]

    @contextmanager
    def serving(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> Iterator[list[str]]:
        try:
            yield self.enter(mode, draft=draft, alone=alone)
        finally:
            self.enter("none")


@dataclass(frozen=True)
class ManualHost:
    """Servers that a person starts: says what is needed, waits, verifies."""

    config: RunConfig
    api_key: str = field(default="", repr=False)
    say: Say = print

    def enter(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> list[str]:
        if mode == "none" or (mode == "extract" and self.config.hidden.source != "sglang"):
            return []
        wanted = f" with the draft {draft.folder} ({draft.shape})" if draft else ""
        note = f"waiting for {', '.join(self.config.server.urls)} in mode {mode}{wanted}: start the servers now"
        wait_until_serving(self.config, api_key=self.api_key, note=lambda: self.say(note), draft=draft, alone=alone)
        return list(self.config.server.urls)

    @contextmanager
    def serving(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> Iterator[list[str]]:
        yield self.enter(mode, draft=draft, alone=alone)


@dataclass(frozen=True)
class CommandHost:
    """Servers that the operator's commands start and stop; each command returns once it has done its part."""

    run: RunFolder
    config: RunConfig
    api_key: str = field(default="", repr=False)
    say: Say = print

    def enter(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> list[str]:
        if mode not in self.config.operate.host.commands:
            if mode != "extract":
                raise ConfigError(f"operate.host.commands has no command for mode {mode}; add it")
            mode = "none"
        self._run_command(mode, draft)
        if mode == "none":
            return []
        wait_until_serving(self.config, api_key=self.api_key, draft=draft, alone=alone)
        return list(self.config.server.urls)

    @contextmanager
    def serving(self, mode: Mode, *, draft: Draft | None = None, alone: bool = False) -> Iterator[list[str]]:
        urls: list[str] = []
        try:
            urls = self.enter(mode, draft=draft, alone=alone)
            yield urls
        finally:
            if mode != "none" and (urls or mode in self.config.operate.host.commands):
                self._run_command("none", None)

    def _run_command(self, mode: Mode, draft: Draft | None) -> None:
        command = self.config.operate.host.commands[mode]
        shape = draft.shape if draft else None
        values = {
            "draft": str(draft.folder if draft else ""),
            "steps": str(shape.num_steps if shape else ""),
            "top_k": str(shape.top_k if shape else ""),
            "tokens": str(shape.verified if shape else ""),
        }
        for name, value in values.items():
            command = command.replace(f"{{{name}}}", value)
        log = self.run.logs / f"host-{mode}.log"
        self.say(f"host: mode {mode}: {command}")
        with child_process(["/bin/sh", "-c", command], log=log, keeps_group=True) as process:
            code = wait_for(process, lambda: None)
        if code:
            raise ServerError(
                f"host command for mode {mode} ended with code {code}: {last_lines(log) or 'no output'} (log {log}); "
                f"mend operate.host.commands.{mode} and run again"
            )


def wait_until_serving(
    config: RunConfig,
    *,
    api_key: str = "",
    note: Callable[[], None] = lambda: None,
    draft: Draft | None = None,
    alone: bool = False,
) -> None:
    """Poll every URL until it is ready and serves the wanted model; `note` is called once if one is not yet there.

    With `draft`, a server that answers without one, or with another, is not yet there, and with `alone` one that drafts
    at all: it is still the one before.

    Raises `ServerError` after `operate.host.ready_timeout_s`, `ConfigError` at once for another model.
    """
    deadline = time.monotonic() + config.operate.host.ready_timeout_s
    is_noted = False
    for url in config.server.urls:
        while fault := check_server(url, config, api_key=api_key) or _drafting_fault(url, draft, api_key, alone=alone):
            if not is_noted:
                note()
                is_noted = True
            if time.monotonic() > deadline:
                raise ServerError(
                    f"server {url} was not ready within {config.operate.host.ready_timeout_s:.0f} s: {fault}; "
                    "read its log, then run again"
                )
            time.sleep(1.0)


def _drafting_fault(url: str, draft: Draft | None, api_key: str, *, alone: bool) -> str:
    """Why the server does not draft as wanted; "" where it does."""
    if draft is None and not alone:
        return ""
    info = server_info(url.rstrip("/"), api_key)
    if draft is None:
        return "it serves with a draft, wanted the target alone" if info.get("speculative_algorithm") else ""
    checks = identity_checks(info, target=str(info.get("model_path")), draft=str(draft.folder), shape=draft.shape)
    return "; ".join(f"{check.name} is {check.seen}, wanted {check.wanted}" for check in checks if not check.holds)


def check_server(url: str, config: RunConfig, *, api_key: str = "") -> str:
    """Why the server does not answer as SGLang does, in words; "" once it does and serves the wanted model.

    Raises `ConfigError` for another model or a refused key.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(
            f"{url.rstrip('/')}/model_info", headers=headers, timeout=config.server.connect_timeout_s, trust_env=False
        )
    except httpx.HTTPError as error:
        return f"no answer ({error!r})"
    if reply.status_code == 401:
        raise ConfigError(f"server {url} refuses the API key (401); set EYAS_API_KEY or server.api_key_file")
    try:
        info = reply.json() if reply.status_code == 200 else None
    except ValueError:
        info = None
    if not isinstance(info, dict):
        by = reply.headers.get("server", "an unnamed server")
        return f"{by} answers /model_info with {reply.status_code}: it is starting, or another program uses this port"
    served = {str(info.get(key, "")) for key in ("model_path", "served_model_name", "tokenizer_path")} - {""}
    wanted = config.server.model or str(load_target(config.target).folder)
    if not any(Path(name).name == Path(wanted).name for name in served):
        raise ConfigError(
            f"server {url} serves {' / '.join(sorted(served)) or 'an unnamed model'}, the target is {wanted}; "
            "give the server of this target in server.urls, or the name it serves in server.model"
        )
    return ""
