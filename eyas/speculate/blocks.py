"""The blocks of a benchmark and where they are kept: one file per block, so that a killed benchmark goes on with the next.

A *block* is one set of prompts sent once to one side with a fixed number in flight. Order: without draft, with, with,
without (A-B-B-A), so that a drifting machine favours neither. Where both servers run side by side the order is kept
within each point; where one host is restarted, within a round of all points, and a restart stands between two blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from eyas.files import write_bytes
from eyas.speculate.config import BenchmarkConfig, DraftShape
from eyas.speculate.load import Block
from eyas.speculate.results import Side

Kind = Literal["count", "sample", "time"]
SIDES: tuple[Side, ...] = ("off", "on", "on", "off")

_BLOCK = TypeAdapter(Block)


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one block sends: a set, for counting, for the test of sampling, or timed at `concurrency` in flight."""

    kind: Kind
    set: str
    concurrency: int


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Points sent one after the other to one side; `place` is its number among the four sides of a round."""

    shape: DraftShape
    side: Side
    round: int
    place: int
    points: tuple[Point, ...]

    def key(self, point: Point) -> str:
        """Name of one block; the target's own counted and sampled replies are the same for every shape of the draft."""
        shape = str(self.shape).replace(" ", "-") if point.kind == "time" or self.side == "on" else "target"
        return "_".join([point.set, shape, self.side, point.kind, str(point.concurrency), str(self.round), str(self.place)])


def visits_of(config: BenchmarkConfig, sizes: dict[str, int], *, is_side_by_side: bool) -> Iterator[Visit]:
    """Every visit in order; `sizes` gives the prompts of each set by its name."""
    for shape in config.shapes:
        points = list(_points(config, sizes, has_sampling=shape == config.shape and config.sampled_replies > 0))
        for group in [[point] for point in points] if is_side_by_side else [points]:
            for number in range(config.repeats):
                for place, side in enumerate(SIDES):
                    wanted = tuple(point for point in group if point.kind == "time" or (number == 0 and place < 2))
                    if wanted:
                        yield Visit(shape=shape, side=side, round=number, place=place, points=wanted)


def _points(config: BenchmarkConfig, sizes: dict[str, int], *, has_sampling: bool) -> Iterator[Point]:
    for name, size in sizes.items():
        in_flight = min(config.counting_concurrency, size)
        yield Point(kind="count", set=name, concurrency=in_flight)
        if has_sampling and name == next(iter(sizes)):
            yield Point(kind="sample", set=name, concurrency=config.counting_concurrency)
        for concurrency in config.concurrency:
            yield Point(kind="time", set=name, concurrency=concurrency)


@dataclass(frozen=True)
class BlockStore:
    """Finished blocks, one JSON file each."""

    folder: Path

    def has(self, keys: Sequence[str]) -> bool:
        """Whether every block of these names is kept."""
        return all(self._path(key).is_file() for key in keys)

    def get(self, key: str, make: Callable[[], Block]) -> Block:
        """The kept block, or the one that `make` gives, kept from then on."""
        path = self._path(key)
        try:
            return _BLOCK.validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            block = make()
        write_bytes(path, _BLOCK.dump_json(block))
        return block

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
