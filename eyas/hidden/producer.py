"""The child process that extracts shards on demand, one after the other, while a training reads them.

It reads one JSON line with the run's config, then one line for each wanted shard, and answers each with a line:
`{}` or the error. The end of its input, which a parent's death is too, ends it at once: a shard is whole or
absent. Signals meant for the trainer do not reach it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from eyas.config import RunConfig, parse_config
from eyas.errors import ConfigError, EyasError
from eyas.hidden.plan import ShardPlan
from eyas.workspace import RunFolder

LOG_NAME = "window.log"


class ExtractionFailed(EyasError):
    """The extraction beside a training ended; what was trained is kept."""


class Producer:
    """The parent's end: `ask` for shards, `wait` for the next of them to be whole."""

    def __init__(self, run: RunFolder, config: RunConfig, *, threads: int) -> None:
        self.log = run.logs / LOG_NAME
        self.pending: deque[str] = deque()
        """Shards that were asked for and not answered yet, in that order."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eyas.hidden.producer", str(run.root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        config = config.model_copy(update={"hidden": config.hidden.model_copy(update={"threads": threads})})
        self._say(config.model_dump(mode="json"))

    def ask(self, plan: ShardPlan) -> None:
        """Have a shard extracted after those that were asked for before."""
        self.pending.append(plan.name)
        self._say(plan.model_dump())

    def wait(self) -> None:
        """Until one more shard is done; raises the extraction's own error in the family of its exit code."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"its process ended with code {self._process.wait()}"}
        if "error" in answer:
            family = ConfigError if answer.get("exit_code") == ConfigError.exit_code else ExtractionFailed
            raise family(
                f"extraction beside the training: {answer['error']} (log {self.log}); the last checkpoint is kept: run the same "
                "command again to continue from it"
            )
        self.pending.popleft()

    def close(self) -> None:
        """End the child at once, in the middle of a shard if need be."""
        self._process.kill()
        self._process.communicate()

    def _say(self, value: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the next `wait` says so, and why


def main() -> None:
    """Serve the parent until its end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    from eyas.hidden.extract import extract_shard

    run = RunFolder(Path(sys.argv[1]))
    config = parse_config(json.loads(sys.stdin.readline()), where="of the training")
    wanted: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(wanted,), daemon=True).start()
    while True:
        plan = ShardPlan.model_validate_json(wanted.get())
        answer: dict[str, Any] = {}
        try:
            extract_shard(run, config, plan)
        except EyasError as error:
            answer = {"error": str(error), "exit_code": error.exit_code}
        print(json.dumps(answer), flush=True)
        if answer:
            return


def _listen(wanted: queue.Queue[str]) -> None:
    for line in sys.stdin:
        wanted.put(line)
    os._exit(0)  # the trainer is gone, perhaps killed: who continues it has an extraction of its own


if __name__ == "__main__":
    main()
