"""The few families of errors, told apart by type.

A message names the thing, the value seen, the value wanted, where, and the next step.
Each family has one consequence: `ConfigError` stops now (exit code 2), `RecordError` rejects one
record and is counted, `ServerError` is retried within a bounded time and then pauses the run,
`ArtifactError` means that a file is not what its manifest says, `StorageError` that a disk refuses.
"""

from __future__ import annotations


class EyasError(Exception):
    """Base of all errors that Eyas raises on purpose; `exit_code` is the CLI's."""

    exit_code = 1


class ConfigError(EyasError):
    """The configuration or the input as a whole is unusable; nothing was started."""

    exit_code = 2


class RecordError(EyasError):
    """One record cannot be used. `reason` is a short stable slug under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ServerError(EyasError):
    """A server did not answer, or answered with something that may heal."""


class ArtifactError(EyasError):
    """A file on disk is missing, damaged, or not the one its manifest names."""


class StorageError(EyasError):
    """The disk refuses: full, read-only, or gone."""


class GateError(EyasError):
    """A quality gate was breached at its stop level; the data made so far are kept."""


class TooManyRejects(EyasError):
    """The stage finished, with more rejects than its limit allows."""

    exit_code = 3
