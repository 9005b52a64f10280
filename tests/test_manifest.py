"""Manifests gate: a damaged, missing or edited file is named, and nothing vanishes from the counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from eyas.errors import ArtifactError
from eyas.files import read_json
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, load_manifest, verify_manifest


def write_stage(folder: Path, **changes: object) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "data.bin").write_bytes(b"12345")
    manifest = Manifest(
        stage="merge",
        stage_version=1,
        fingerprint="f",
        counts=Counts.of(done=3, rejected=1),
        rejected_by_reason={"empty": 1},
        files=file_entries(folder, ["data.bin"]),
    )
    return manifest.model_copy(update=changes).write(folder)


def test_counts_that_lose_a_record_are_refused() -> None:
    with pytest.raises(ValidationError, match="in=5 is not done=3"):
        Counts.model_validate({"in": 5, "done": 3, "rejected": 1, "pending": 0})


def test_reasons_that_do_not_sum_to_the_rejects_are_refused() -> None:
    with pytest.raises(ValidationError, match="does not sum to 2"):
        Manifest(stage="s", stage_version=1, fingerprint="f", counts=Counts.of(done=0, rejected=2), rejected_by_reason={"a": 1})


def test_counts_are_written_under_the_name_in(tmp_path: Path) -> None:
    write_stage(tmp_path)
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert written["counts"] == {"in": 4, "done": 3, "rejected": 1, "pending": 0}


def test_what_was_written_verifies(tmp_path: Path) -> None:
    written = write_stage(tmp_path)
    assert verify_manifest(tmp_path) == written
    assert finished_manifest(tmp_path, "f") == written


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b"1234"), "has 4 bytes, its manifest says 5"),
        (lambda path: path.write_bytes(b"12346"), "differs from the digest"),
    ],
)
def test_damage_is_named_and_the_stage_redone(tmp_path: Path, damage: object, message: str) -> None:
    write_stage(tmp_path)
    damage(tmp_path / "data.bin")  # type: ignore[operator]
    with pytest.raises(ArtifactError, match=message):
        verify_manifest(tmp_path)
    assert finished_manifest(tmp_path, "f") is None


def test_another_fingerprint_or_pending_records_mean_redo(tmp_path: Path) -> None:
    write_stage(tmp_path)
    assert finished_manifest(tmp_path, "g") is None
    write_stage(tmp_path, counts=Counts.of(done=3, rejected=1, pending=1))
    assert finished_manifest(tmp_path, "f") is None


def test_digest_ignores_times_and_sees_bytes(tmp_path: Path) -> None:
    one = write_stage(tmp_path, started_at="2026-01-01T00:00:00+00:00")
    two = write_stage(tmp_path, started_at="2026-01-02T00:00:00+00:00", figures={"seconds": 3})
    assert one.digest() == two.digest()
    (tmp_path / "data.bin").write_bytes(b"54321")
    assert one.model_copy(update={"files": file_entries(tmp_path, ["data.bin"])}).digest() != one.digest()


def test_every_part_of_a_fingerprint_counts() -> None:
    base = fingerprint("s", 1, inputs={"a": "1"}, config={"k": 1})
    assert base == fingerprint("s", 1, inputs={"a": "1"}, config={"k": 1})
    others = [
        fingerprint("t", 1, inputs={"a": "1"}, config={"k": 1}),
        fingerprint("s", 2, inputs={"a": "1"}, config={"k": 1}),
        fingerprint("s", 1, inputs={"a": "2"}, config={"k": 1}),
        fingerprint("s", 1, inputs={"a": "1"}, config={"k": 2}),
    ]
    assert len({base, *others}) == 5


def test_another_schema_or_unknown_keys_are_refused(tmp_path: Path) -> None:
    write_stage(tmp_path)
    path = tmp_path / "manifest.json"
    raw = read_json(path)
    del raw["sha256_of_the_rest"]
    path.write_text(json.dumps({**raw, "schema_version": 99}))
    with pytest.raises(ArtifactError, match="schema version 99"):
        load_manifest(tmp_path)
    path.write_text(json.dumps({**raw, "colour": "red"}))
    with pytest.raises(ArtifactError, match="is not a manifest"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    "change", [{"counts": {"in": 4, "done": 2, "rejected": 2, "pending": 0}}, {"figures": {"accept_length": 9}}]
)
def test_a_manifest_edited_by_hand_is_found_and_the_stage_redone(tmp_path: Path, change: dict[str, object]) -> None:
    write_stage(
        tmp_path, rejected_by_reason={"empty": 1}, figures={"by": {1: (2.5, None)}}
    )  # JSON keeps neither tuples nor numbers as keys
    path = tmp_path / "manifest.json"
    assert load_manifest(tmp_path).figures == {"by": {"1": [2.5, None]}}
    path.write_text(json.dumps(read_json(path) | change))
    with pytest.raises(ArtifactError, match=r"manifest\.json was changed after it was written"):
        load_manifest(tmp_path)
    assert finished_manifest(tmp_path, "f") is None


def test_rejects_without_a_reason_are_refused() -> None:
    with pytest.raises(ValidationError, match="does not sum to 1"):
        Manifest(stage="s", stage_version=1, fingerprint="f", counts=Counts.of(done=0, rejected=1))
