"""`python -m deployments [register | up | down]`: everything in Prefect that makes Eyas a product, by name.

register  block types, work pool, deployments, schedules and automations, on the configured server
up        a Prefect server and a worker on this machine, registered; prints the UI's address
down      ends what `up` started
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

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
        print(f"Prefect UI: {stack.up(options.home, options.port, options.runs_home, options.database_url)}")
    elif options.command == "down":
        print("ended" if stack.down(options.home) else "nothing of ours is running")
    elif options.command == "serve":
        stack.serve(options.home, options.port, options.runs_home, options.database_url)
    else:
        from deployments.register import register

        if not configured_url():
            print("error: no Prefect server is configured; set PREFECT_API_URL, or use: python -m deployments up", file=sys.stderr)
            return 2
        for name in asyncio.run(register(options.runs_home)):
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
