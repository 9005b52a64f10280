"""`kill -9` at seeded points of merge and extraction: the next run gives the bytes of an unbroken one."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.hidden.extract import extract
from eyas.manifest import verify_manifest
from eyas.merging.merge import merge
from tests.hidden.child import finish, start
from tests.hidden.tiny import TinyRun

STAGES = {"merge": merge, "extract": extract}
CHANGES = {"merge": 60, "extract": 70}  # a little more than an unbroken run makes: late points do not kill at all


def contents(folder: Path) -> dict[str, bytes]:
    names = [path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    return {name: (folder / name).read_bytes() for name in sorted(names) if name not in ("manifest.json", "kind.json")}


def config_of(tiny: TinyRun) -> RunConfig:
    return tiny.hidden_config("a", "b", shard_bytes=1 << 20)


def test_what_a_killed_process_left_half_written_is_cleared(tiny: TinyRun) -> None:
    tiny.write_random("a", 5)
    tiny.run.hidden.mkdir(parents=True)
    for name in ("kind.json", "probe.json", "index.parquet", "rejects.jsonl", "manifest.json", "shard-a-00000.json"):
        (tiny.run.hidden / f".{name}.4242.tmp").write_bytes(b"{")
    extract(tiny.run, config_of(tiny).model_copy(update={"prompts": tiny.hidden_config("a").prompts}))
    assert not list(tiny.run.hidden.glob(".*.tmp"))


def check_kill_points(stage: str, tiny: TinyRun, points: list[int]) -> None:
    config = config_of(tiny)
    folder = {"merge": tiny.run.merged, "extract": tiny.run.hidden}[stage]
    digest = STAGES[stage](tiny.run, config).digest()
    wanted = contents(folder)
    killed = 0
    for point in points:
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
        killed += finish(start(lambda: STAGES[stage](tiny.run, config), point)) == -signal.SIGKILL
        assert STAGES[stage](tiny.run, config).digest() == digest, point
        assert contents(folder) == wanted, point
        verify_manifest(folder)
        assert not list(folder.glob(".*.tmp")), point
        assert not (folder / ".work").exists(), point
    assert killed >= len(points) // 2


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_kill_9_anywhere_changes_no_byte(stage: str, tiny: TinyRun) -> None:
    tiny.write_random("a", 150)
    tiny.write_random("b", 20)
    check_kill_points(stage, tiny, random.Random(stage).sample(range(1, CHANGES[stage]), 10))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", sorted(STAGES))
def test_soak_kill_9_at_a_hundred_points(stage: str, tiny: TinyRun) -> None:
    tiny.write_random("a", 150)
    tiny.write_random("b", 20)
    check_kill_points(stage, tiny, [random.Random(n).randrange(1, CHANGES[stage]) for n in range(100)])


def test_two_extractors_divide_the_shards_and_overwrite_none(tiny: TinyRun) -> None:
    tiny.write_random("a", 400)
    tiny.write_random("b", 40)
    config = config_of(tiny)
    children = [start(lambda: extract(tiny.run, config)) for _ in range(2)]
    assert [finish(pid) for pid in children] == [0, 0]
    manifest = verify_manifest(tiny.run.hidden)
    shared = contents(tiny.run.hidden)
    for file in tiny.run.hidden.iterdir():
        if file.is_file():
            file.unlink()
    assert extract(tiny.run, config).digest() == manifest.digest()
    assert contents(tiny.run.hidden) == shared
