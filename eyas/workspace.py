"""The run folder: where each phase reads and writes, and who may write now.

One folder holds one run; a lock file with the holder's pid keeps a second process out. What is on
disk decides what is done: there is no database beside it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import ConfigError


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run; nothing is created by asking for a path."""

    root: Path

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def plan_json(self) -> Path:
        return self.root / "plan.json"

    @property
    def plan_md(self) -> Path:
        return self.root / "plan.md"

    def prompts(self, dataset: str) -> Path:
        return self.root / "prompts" / dataset

    def responses(self, dataset: str) -> Path:
        return self.root / "responses" / dataset

    @property
    def merged(self) -> Path:
        return self.root / "merged"

    @property
    def hidden(self) -> Path:
        return self.root / "hidden"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def export(self) -> Path:
        return self.root / "draft" / "export"

    @property
    def baseline(self) -> Path:
        """Another's draft of this target, in our own format: what the run is measured against."""
        return self.root / "baseline"

    @property
    def benchmark(self) -> Path:
        return self.root / "benchmark"

    @property
    def progress(self) -> Path:
        """Small JSON files that say how far each piece of work is; safe to delete."""
        return self.root / "progress"

    @property
    def logs(self) -> Path:
        """Output of child processes (engine, trainer)."""
        return self.root / "logs"

    def create(self) -> RunFolder:
        """Make the folder and prove that it can be written; raises `ConfigError` otherwise."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".writable.{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"run folder {self.root} cannot be written ({error.strerror}); choose another with --run or fix its permissions"
            ) from error
        return self


@dataclass(frozen=True)
class BaselineRun(RunFolder):
    """The run as the benchmark of `draft.baseline` sees it: another's draft, and not yet a reply to learn from."""

    @property
    def export(self) -> Path:
        return self.baseline

    @property
    def benchmark(self) -> Path:
        return self.baseline / "benchmark"


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock file at `path` while the block runs; the kernel releases it if the process dies.

    Raises `ConfigError` with the holder's pid if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "unknown"
            raise ConfigError(f"{what} is in use by process {holder} (lock {path}); wait for it or stop it") from error
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield
