"""`python -m deployments [register | up | down]`: everything in Prefect that makes Eyas a product, by name.

register  block types, work pool, deployments, schedules and automations, on the configured server
up        a Prefect server and a worker on this machine, registered; prints what there is and where to begin
down      ends what `up` started
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from deployments import stack
from eyas.errors import EyasError
from flows.server import QUIET, UI_PORT, configured_url, default_home


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; the exit code is the CLI's."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "command", nargs="?", default="register", choices=["register", "up", "down", "serve"], help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--runs-home", type=Path, default=Path.cwd(), help="folder below which relative run folders lie (default: here)"
    )
    parser.add_argument("--port", type=int, default=UI_PORT, help="port of the server that up starts (default %(default)s)")
    parser.add_argument("--home", type=Path, default=default_home(), help="folder of that server's database (default %(default)s)")
    parser.add_argument("--database-url", default="", help="database of that server instead, for instance postgresql+asyncpg://…")
    options = parser.parse_args(arguments)
    options.runs_home = options.runs_home.resolve()
    os.environ.update(QUIET)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return 130
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    if options.command == "up":
        print(account(stack.up(options.home, options.port, options.runs_home, options.database_url), options.home))
    elif options.command == "down":
        print("ended" if stack.down(options.home) else "nothing of ours is running")
    elif options.command == "serve":
        stack.serve(options.home, options.port, options.runs_home, options.database_url)
    else:
        from deployments.register import register

        if not configured_url():
            print("error: no Prefect server is configured; set PREFECT_API_URL, or use: python -m deployments up", file=sys.stderr)
            return 2
        print("\n".join(described(asyncio.run(register(options.runs_home)))))
    return 0


def account(running: dict[str, Any], home: Path) -> str:
    """What `up` says: where things are, what was registered, what to do next, how to end it."""
    from blocks import Alert, RunStorage, SGLangServer, TargetHost

    ui = running["ui"]
    blocks = ", ".join(str(block._block_type_name) for block in (SGLangServer, TargetHost, RunStorage, Alert))
    down = "make down" if home == default_home() else shlex.join([sys.executable, "-m", "deployments", "down", "--home", str(home)])
    lines = [
        f"Prefect UI   {ui}",
        f"database     {running['database']}",
        f"worker       one on this machine, one run at a time on the target's processors (log {home / 'worker.log'})",
        f"run folders  below {running['runs_home']}",
        f"blocks       {blocks} ({ui}/blocks)",
        "deployments",
        *(f"  {line}" for line in described(running["deployments"])),
        f"begin        {ui}/deployments: choose local-smollm2-quick (no GPU, some minutes), press Run, read the form, Submit",
        f"end          {down}",
    ]
    return "\n".join(lines)


def described(names: list[str]) -> list[str]:
    """Deployments, each with the first sentence of what it does."""
    from deployments.catalogue import catalogue

    says = {f"{entry.flow.name}/{entry.name}": entry.description for entry in catalogue()}
    width = max(map(len, names), default=0)
    return [
        f"{name:<{width}}  {' '.join(says.get(name, '').split()).partition('. ')[0].removesuffix('.')}".rstrip() for name in names
    ]


if __name__ == "__main__":
    sys.exit(main())
