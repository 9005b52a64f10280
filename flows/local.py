"""A flow started from a shell, against the configured Prefect server or one of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from prefect import Flow, State

from eyas.config import RunConfig, load_config
from eyas.errors import ConfigError, EyasError
from flows.server import QUIET, configured_url, default_home, is_healthy, local_server, ui_url, used_here

INTERRUPTED = 130


def run_here(flow: Flow[..., Any], arguments: list[str] | None = None) -> int:
    """Run `flow` in this process with the config of a file; the exit code is the CLI's (0, 1, 2, 3 or 130)."""
    parser = argparse.ArgumentParser(prog=f"python -m flows.{flow.name}", description="Run the flow here and now.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--run", type=Path, required=True, help="run folder; an existing one is continued")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one config value")
    parser.add_argument("--ui", action="store_true", help="open the Prefect UI, and keep it open after the run")
    options = parser.parse_args(arguments)
    os.environ.update(QUIET)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` starts us with SIGINT ignored
    try:
        config = load_config(options.config, options.set)
        with _server() as (url, hint):
            return asyncio.run(_run(flow, options, config, url, hint))
    except KeyboardInterrupt:
        print(f"interrupted; run the same command again to continue {options.run}", file=sys.stderr)
        return INTERRUPTED
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


async def _run(flow: Flow[..., Any], options: argparse.Namespace, config: RunConfig, url: str, hint: str) -> int:
    print(f"Prefect UI while it runs: {ui_url(url)}/runs", file=sys.stderr, flush=True)
    if options.ui:
        webbrowser.open(f"{ui_url(url)}/runs")
    sections = {name: getattr(config, name) for name in RunConfig.model_fields if name != "name"}
    state: State[Any] = await cast(Any, flow)(run=str(options.run), **sections, return_state=True)
    flow_run_id = str(state.state_details.flow_run_id or "")
    outcome = await state.aresult(raise_on_failure=False)
    if isinstance(outcome, BaseException):
        print(f"error: {outcome}", file=sys.stderr)
    print(f"To open this run in the Prefect UI: {hint or ui_url(url, flow_run_id)}{' ' + flow_run_id if hint else ''}", flush=True)
    if options.ui:
        print(f"Prefect UI: {ui_url(url, flow_run_id)}   (Ctrl-C ends it)", flush=True)
        await asyncio.to_thread(signal.sigwait, {signal.SIGINT, signal.SIGTERM})
    if isinstance(outcome, EyasError):
        return outcome.exit_code
    return 0 if state.is_completed() else 1


@contextmanager
def _server() -> Iterator[tuple[str, str]]:
    """API URL and, for a server that ends with us, the command that brings its UI back."""
    if url := configured_url():
        if not is_healthy(url):
            raise ConfigError(f"no Prefect server answers at {url} (PREFECT_API_URL); start it, or unset the variable")
        yield url, ""
        return
    home = default_home()
    print("Prefect: starting a server for this run, some seconds", file=sys.stderr, flush=True)
    with local_server(home=home) as url, used_here(url, home):
        yield url, shlex.join([sys.executable, "-m", "flows.server", "--flow-run"])
