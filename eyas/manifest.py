"""Manifests: the finished marker, the gate and the account of every stage.

A manifest is written last and atomically. A stage starts only on inputs whose manifests verify, and
*in = done + rejected + pending* holds in each. `fingerprint` covers the inputs and everything that
changes the bytes, so an equal fingerprint with verified files means that nothing need be redone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eyas import __version__
from eyas.errors import ArtifactError
from eyas.files import digest_file, digest_json, read_sealed, write_sealed

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1


class Counts(BaseModel):
    """What became of the records of a stage; `in` = `done` + `rejected` + `pending`."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    num_in: int = Field(alias="in", ge=0)
    done: int = Field(ge=0)
    rejected: int = Field(default=0, ge=0)
    pending: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _nothing_vanishes(self) -> Counts:
        if self.num_in != self.done + self.rejected + self.pending:
            raise ValueError(f"in={self.num_in} is not done={self.done} + rejected={self.rejected} + pending={self.pending}")
        return self

    @classmethod
    def of(cls, *, done: int, rejected: int = 0, pending: int = 0) -> Counts:
        """Counts whose `in` is the sum of what became of the records."""
        return cls(num_in=done + rejected + pending, done=done, rejected=rejected, pending=pending)


class FileEntry(BaseModel):
    """One file of a stage: path relative to the manifest's folder, size in bytes, SHA-256."""

    model_config = ConfigDict(extra="forbid")

    path: str
    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """The account of one finished (or paused) stage."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    stage: str
    stage_version: int
    name: str = ""
    fingerprint: str
    inputs: dict[str, str] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    counts: Counts
    rejected_by_reason: dict[str, int] = Field(default_factory=dict)
    files: list[FileEntry] = Field(default_factory=list)
    figures: dict[str, Any] = Field(default_factory=dict)
    started_at: str = ""
    finished_at: str = ""
    eyas_version: str = __version__

    @model_validator(mode="after")
    def _reasons_add_up(self) -> Manifest:
        if sum(self.rejected_by_reason.values()) != self.counts.rejected:
            raise ValueError(f"rejected_by_reason {self.rejected_by_reason} does not sum to {self.counts.rejected}")
        return self

    @property
    def is_complete(self) -> bool:
        """True if nothing is pending."""
        return self.counts.pending == 0

    def digest(self) -> str:
        """Digest of what the stage made: fingerprint, counts and files; times and figures stand outside."""
        return digest_json(
            {
                "stage": self.stage,
                "name": self.name,
                "fingerprint": self.fingerprint,
                "counts": self.counts.model_dump(by_alias=True),
                "files": [entry.model_dump() for entry in self.files],
            }
        )

    def write(self, folder: Path) -> Manifest:
        """Write `folder/manifest.json`, stamping `finished_at` where it is empty; returns what was written."""
        stamped = self if self.finished_at else self.model_copy(update={"finished_at": now()})
        write_sealed(folder / MANIFEST_NAME, stamped.model_dump(by_alias=True))
        return stamped


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def fingerprint(stage: str, stage_version: int, *, inputs: dict[str, str], config: dict[str, Any]) -> str:
    """Digest of everything that changes a stage's bytes; `inputs` maps names to manifest digests."""
    return digest_json({"stage": stage, "version": stage_version, "inputs": inputs, "config": config})


def file_entries(folder: Path, names: list[str]) -> list[FileEntry]:
    """Entries (size, SHA-256) of `names` inside `folder`, in the order given."""
    return [FileEntry(path=name, size_bytes=(folder / name).stat().st_size, sha256=digest_file(folder / name)) for name in names]


def load_manifest(folder: Path) -> Manifest:
    """Read `folder/manifest.json`; raises `ArtifactError` if it is missing, unreadable, edited or of another schema."""
    path = folder / MANIFEST_NAME
    try:
        manifest = Manifest.model_validate(read_sealed(path))
    except ValidationError as error:
        raise ArtifactError(f"{path} is not a manifest: {error.errors()[0]['msg']}; run its phase again") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} has schema version {manifest.schema_version}, this code reads {SCHEMA_VERSION}; run its phase again"
        )
    return manifest


def verify_manifest(folder: Path, *, checks_digests: bool = True, unread: str = "") -> Manifest:
    """Load a manifest and check every file it names; raises `ArtifactError` naming the first that differs.

    `checks_digests=False` compares sizes only, for files that are checked again when they are read; `unread` does so for
    the files whose name ends like it.
    """
    manifest = load_manifest(folder)
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            raise ArtifactError(f"{path} is missing, its manifest names it; run phase {manifest.stage!r} again")
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            raise ArtifactError(
                f"{path} has {size_bytes} bytes, its manifest says {entry.size_bytes}; run phase {manifest.stage!r} again"
            )
        if checks_digests and not (unread and path.name.endswith(unread)) and digest_file(path) != entry.sha256:
            raise ArtifactError(f"{path} differs from the digest in its manifest; run phase {manifest.stage!r} again")
    return manifest


def finished_manifest(folder: Path, wanted_fingerprint: str) -> Manifest | None:
    """The manifest in `folder` if it is complete, verifies and has `wanted_fingerprint`; otherwise None (redo it)."""
    try:
        manifest = verify_manifest(folder)
    except ArtifactError:
        return None
    return manifest if manifest.is_complete and manifest.fingerprint == wanted_fingerprint else None
