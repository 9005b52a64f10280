"""The host of the target: what brings its servers into the mode that a phase needs, and proves it.

The same processors serve generation, then free themselves for extraction and training, then serve with
the draft. Three ways: `EmbeddedHost` starts and ends Eyas' own engine; `ManualHost` asks the operator;
`CommandHost` runs the operator's commands. The last two wait until every server answers and verify
that it serves the wanted model before any prompt is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from eyas.config import RunConfig
from eyas.errors import ConfigError, ServerError
from eyas.operate.children import child_process, last_lines, wait_for
from eyas.operate.config import Mode
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

Say = Callable[[str], None]


class TargetHost(Protocol):
    """Whoever can bring the target's servers into a mode."""

    def serving(self, mode: Mode, *, draft: Path | None = None) -> AbstractContextManager[list[str]]:
        """Servers in `mode` while the block runs; gives their base URLs ([] where the mode has no server)."""


def host_of(run: RunFolder, config: RunConfig, *, api_key: str = "", say: Say = print) -> TargetHost:
    """The host that the config names."""
    if config.server.kind == "embedded":
        return EmbeddedHost(run, config)
    if config.operate.host.kind == "command":
        return CommandHost(run, config, api_key=api_key, say=say)
    return ManualHost(config, api_key=api_key, say=say)


@dataclass(frozen=True)
class EmbeddedHost:
    """Eyas' own engine: a child process for as long as a phase needs it."""

    run: RunFolder
    config: RunConfig

    @contextmanager
    def serving(self, mode: Mode, *, draft: Path | None = None) -> Iterator[list[str]]:
        if mode in ("extract", "none"):  # the states come from transformers, in our own process
            yield []
            return
        from eyas.engine.process import EngineProcess

        spec = load_target(self.config.target)
        engine = EngineProcess(
            spec.folder,
            config=self.config.server.engine,
            draft_dir=draft,
            num_draft_tokens=self.config.benchmark.num_draft_tokens,
            context_length=self.config.target.context_length,
            log=self.run.logs / f"engine-{mode}.log",
        )
        with engine:
            yield [engine.url]


@dataclass(frozen=True)
class ManualHost:
    """Servers that a person starts: says what is needed, waits, verifies."""

    config: RunConfig
    api_key: str = field(default="", repr=False)
    say: Say = print

    @contextmanager
    def serving(self, mode: Mode, *, draft: Path | None = None) -> Iterator[list[str]]:
        if mode == "none" or (mode == "extract" and self.config.hidden.source != "sglang"):
            yield []
            return
        wanted = f" with the draft {draft}" if mode == "draft" else ""
        note = f"waiting for {', '.join(self.config.server.urls)} in mode {mode}{wanted}: start the servers now"
        wait_until_serving(self.config, api_key=self.api_key, note=lambda: self.say(note))
        yield list(self.config.server.urls)


@dataclass(frozen=True)
class CommandHost:
    """Servers that the operator's commands start and stop; each command returns once it has done its part."""

    run: RunFolder
    config: RunConfig
    api_key: str = field(default="", repr=False)
    say: Say = print

    @contextmanager
    def serving(self, mode: Mode, *, draft: Path | None = None) -> Iterator[list[str]]:
        if mode not in self.config.operate.host.commands:
            if mode != "extract":
                raise ConfigError(f"operate.host.commands has no command for mode {mode}; add it")
            mode = "none"
        self._run_command(mode, draft)
        if mode == "none":
            yield []
            return
        try:
            wait_until_serving(self.config, api_key=self.api_key)
            yield list(self.config.server.urls)
        finally:
            self._run_command("none", None)

    def _run_command(self, mode: Mode, draft: Path | None) -> None:
        command = self.config.operate.host.commands[mode].replace("{draft}", str(draft or ""))
        log = self.run.logs / f"host-{mode}.log"
        self.say(f"host: mode {mode}: {command}")
        with child_process(["/bin/sh", "-c", command], log=log, keeps_group=True) as process:
            code = wait_for(process, lambda: None)
        if code:
            raise ServerError(
                f"host command for mode {mode} ended with code {code}: {last_lines(log) or 'no output'} (log {log}); "
                f"mend operate.host.commands.{mode} and run again"
            )


def wait_until_serving(config: RunConfig, *, api_key: str = "", note: Callable[[], None] = lambda: None) -> None:
    """Poll every URL until it is ready and serves the wanted model; `note` is called once if one is not yet there.

    Raises `ServerError` after `operate.host.ready_timeout_s`, `ConfigError` at once for another model.
    """
    deadline = time.monotonic() + config.operate.host.ready_timeout_s
    is_noted = False
    for url in config.server.urls:
        while not check_server(url, config, api_key=api_key):
            if not is_noted:
                note()
                is_noted = True
            if time.monotonic() > deadline:
                raise ServerError(
                    f"server {url} was not ready within {config.operate.host.ready_timeout_s:.0f} s; read its log, then run again"
                )
            time.sleep(1.0)


def check_server(url: str, config: RunConfig, *, api_key: str = "") -> bool:
    """True if the server answers and serves the wanted model, False if it does not answer.

    Raises `ConfigError` for another model or a refused key.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(f"{url.rstrip('/')}/model_info", headers=headers, timeout=config.server.connect_timeout_s)
    except httpx.HTTPError:
        return False
    if reply.status_code == 401:
        raise ConfigError(f"server {url} refuses the API key (401); set EYAS_API_KEY or server.api_key_file")
    if reply.status_code != 200:
        return False
    info = reply.json()
    served = {str(info.get(key, "")) for key in ("model_path", "served_model_name", "tokenizer_path")} - {""}
    wanted = config.server.model or str(load_target(config.target).folder)
    if not any(Path(name).name == Path(wanted).name for name in served):
        raise ConfigError(
            f"server {url} serves {' / '.join(sorted(served)) or 'an unnamed model'}, the target is {wanted}; "
            "give the server of this target in server.urls, or the name it serves in server.model"
        )
    return True
