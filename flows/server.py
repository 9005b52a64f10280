"""The Prefect server of one machine: started when nobody runs one, ended with whoever started it.

A laptop needs no set-up: a run starts a server on a free loopback port, on the SQLite database under
`~/.cache/eyas/prefect`, so that all runs of this machine stand in one place. A server named by
PREFECT_API_URL (or the active Prefect profile) is used instead. Analytics are off.

    python -m flows.server [--port 4200] [--flow-run ID]     opens the UI, until Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from eyas.errors import ConfigError, ServerError
from eyas.operate.children import child_process, last_lines

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "PREFECT_CLI_PROMPT": "false",
}
PATIENT = {"PREFECT_SERVER_DATABASE_TIMEOUT": "60", "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60"}
"""A statement that waits for a processor is no broken database: Prefect gives up after 10 and 5 seconds."""

UI_PORT = 4200
_START_S = 600.0


def default_home() -> Path:
    """Where the machine's own Prefect database lives."""
    return Path.home() / ".cache" / "eyas" / "prefect"


def configured_url() -> str:
    """URL of the API that the environment or the active Prefect profile names; "" for none."""
    from prefect.settings import PREFECT_API_URL

    return str(PREFECT_API_URL.value() or "")


@contextmanager
def local_server(*, home: Path, port: int = 0, database_url: str = "") -> Iterator[str]:
    """A Prefect server as a child process while the block runs; gives its API URL. `port` 0 takes a free one.

    `database_url` (SQLAlchemy, async driver) replaces the SQLite file under `home`. Raises `ConfigError`
    if the port is in use, `ServerError` if the server does not come up.
    """
    bypass_proxies_on_loopback()
    port = free_port(port)
    url = f"http://127.0.0.1:{port}/api"
    home.mkdir(parents=True, exist_ok=True)
    log = home / f"server-{port}.log"
    environment = {**QUIET, **PATIENT, "PREFECT_HOME": str(home), "PREFECT_API_URL": url, "PREFECT_SERVER_API_HOST": "127.0.0.1"}
    if database_url:
        environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url
    arguments = [f"{name}={value}" for name, value in environment.items()]
    command = ["/usr/bin/env", *arguments, sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--timeout-graceful-shutdown", "2"]
    with child_process(command, log=log, grace_s=8.0) as process:
        deadline = time.monotonic() + _START_S
        while not is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"the Prefect server did not start: {last_lines(log) or 'no output'} (log {log})")
            time.sleep(0.1)
        yield url


def bypass_proxies_on_loopback() -> None:
    """Let Prefect's clients, here and in children, reach this machine directly where the environment names a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host.strip()]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))


@contextmanager
def used_here(url: str, home: Path) -> Iterator[None]:
    """This process speaks to the server at `url` while the block runs; what it still has to tell is told before the block ends."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    with temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: home}):
        try:
            yield
        finally:  # while there still is a server to take the last lines
            APILogWorker.drain_all(timeout=10)
            EventsWorker.drain_all(timeout=10)


def is_healthy(url: str) -> bool:
    """True if a Prefect API answers under `url`."""
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def ui_url(api_url: str, flow_run_id: str = "") -> str:
    """Address of the UI behind an API, on one flow run if given."""
    root = api_url.removesuffix("/").removesuffix("/api")
    return f"{root}/runs/flow-run/{flow_run_id}" if flow_run_id else root


def free_port(wanted: int = 0) -> int:
    """`wanted` if nothing listens there, any free one for 0; raises `ConfigError` if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise ConfigError(
                f"port {wanted} is in use ({error.strerror}); end what listens there or give another --port"
            ) from error
        return int(probe.getsockname()[1])


def main(arguments: list[str] | None = None) -> int:
    """Serve the UI over the machine's own database until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m flows.server", description="Open the Prefect UI over this machine's runs.")
    parser.add_argument("--port", type=int, default=UI_PORT, help="port on loopback (default %(default)s)")
    parser.add_argument("--home", type=Path, default=default_home(), help="folder of the database (default %(default)s)")
    parser.add_argument("--flow-run", default="", help="id of the flow run to open")
    options = parser.parse_args(arguments)
    try:
        with local_server(home=options.home, port=options.port) as url:
            address = ui_url(url, options.flow_run)
            print(f"Prefect UI: {address}   (Ctrl-C ends it)", flush=True)
            webbrowser.open(address)
            signal.pause()
    except KeyboardInterrupt:
        return 130
    except (ConfigError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
