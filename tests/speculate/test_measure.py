"""Load and measurement of one set against loopback servers that behave and misbehave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError, ServerError
from eyas.sglang.config import ServerConfig
from eyas.speculate.accept import AcceptCounts
from eyas.speculate.baselines import BigramTable
from eyas.speculate.blocks import BlockStore
from eyas.speculate.config import BenchmarkConfig, DraftShape
from eyas.speculate.load import Server, run_block
from eyas.speculate.lossless import LocalJudge
from eyas.speculate.measure import WARM_UP_TOKENS, collect, compare, num_blocks
from eyas.speculate.results import SetMeasurement, Side
from eyas.speculate.sets import BenchmarkPrompt
from tests.speculate.conftest import FakeEngine, greedy, served

PROMPTS = [BenchmarkPrompt(id=f"p{start}", dataset="b1", input_ids=[start, start + 1, start + 2]) for start in (5, 20, 40)]
CONFIG = BenchmarkConfig(max_new_tokens=40, timed_prompts=2, concurrency=[1, 2], counting_concurrency=3)


def server(url: str, *, has_draft: bool) -> Server:
    return Server(url=url, config=ServerConfig(), has_draft=has_draft, stop_token_ids=(2,))


class Given:
    """Servers that a test has started, each time they are asked for written down."""

    def __init__(self, off: str, on: str, *, is_side_by_side: bool = True) -> None:
        self.urls, self.is_side_by_side, self.asked = {"off": off, "on": on}, is_side_by_side, list[str]()

    def get(self, side: Side, shape: DraftShape, *, fresh: bool = False) -> Server:
        self.asked.append(f"{side} {shape}" if side == "on" else side)
        return server(self.urls[side], has_draft=side == "on")


def measure(
    model: Any, draft: FakeEngine, folder: Path, config: BenchmarkConfig = CONFIG, *, is_side_by_side: bool = True
) -> tuple[SetMeasurement, FakeEngine, list[str], list[str]]:
    plain, steps = FakeEngine(model), list[str]()
    with served(plain) as off, served(draft) as on:
        servers: Any = Given(off, on, is_side_by_side=is_side_by_side)
        blocks, asked = collect({"heldout": PROMPTS}, servers, config, BlockStore(folder), lambda _, word: steps.append(word))
        (measurement,) = compare(
            blocks,
            asked,
            config,
            measure_tie=LocalJudge(model, config.num_draft_tokens),
            bigrams=BigramTable({}),
            predict=lambda pairs: [AcceptCounts(verifications=len(reply), accepted=1) for _, reply in pairs],
        )
    return measurement, plain, steps, servers.asked


def test_same_prompts_as_ids_at_temperature_0_on_both_sides(model: Any, tmp_path: Path) -> None:
    draft = FakeEngine(model, accepted=1)
    measurement, plain, steps, _ = measure(model, draft, tmp_path)
    assert len(steps) == num_blocks(CONFIG, {"heldout": 3})["heldout"] == 10
    for requests in (plain.requests, draft.requests):
        assert {tuple(request["input_ids"]) for request in requests} == {tuple(prompt.input_ids) for prompt in PROMPTS}
        assert all(request["sampling_params"]["temperature"] == 0 for request in requests)
        assert all("text" not in request for request in requests)
    assert all(row.outcome == "identical" for row in measurement.rows)
    assert [row.draft_ids for row in measurement.rows] == [
        greedy(model, row.prompt_ids, len(row.draft_ids), [2]) for row in measurement.rows
    ]


def test_timed_blocks_go_off_on_on_off_and_make_the_same_tokens(model: Any, tmp_path: Path) -> None:
    measurement, _, steps, _ = measure(model, FakeEngine(model, accepted=1), tmp_path)
    assert ["without draft" not in step for step in steps[-8:]] == [False, True, True, False] * 2
    assert [block.side for block in measurement.blocks] == ["off", "on", "on", "off"] * 2
    assert [block.concurrency for block in measurement.blocks] == [1] * 4 + [2] * 4
    assert len({block.output_tokens for block in measurement.blocks if block.concurrency == 1}) == 1
    assert all(len(block.outcomes) == (len(block.latencies_s) if block.side == "on" else 0) for block in measurement.blocks)


def test_every_timed_block_begins_warm(model: Any, tmp_path: Path) -> None:
    """A server restarted for the block is cold, and its prefix cache empty: the same prompts come first, untimed and short."""
    draft = FakeEngine(model, accepted=1)
    measurement, _, _, _ = measure(model, draft, tmp_path, CONFIG.model_copy(update={"concurrency": [1]}))
    counted, *rest = [draft.requests[start : start + size] for start, size in ((0, 3), (3, 2), (5, 2), (7, 2), (9, 2))]
    assert len(draft.requests) == 11
    assert len(counted) == 3
    for warm_up, timed in (rest[:2], rest[2:]):
        assert [request["input_ids"] for request in warm_up] == [request["input_ids"] for request in timed]
        assert {request["sampling_params"]["max_new_tokens"] for request in warm_up} == {WARM_UP_TOKENS}
    on = [block for block in measurement.blocks if block.side == "on"]
    assert [len(block.latencies_s) for block in on] == [2, 2], "the warm-up is in no figure"


def test_replies_are_cut_where_their_loop_begins(model: Any, tmp_path: Path) -> None:
    """The tiny target loops; the part that is counted holds no repetition, and only that part is asked of the draft."""
    draft = FakeEngine(model, accepted=1)
    config = CONFIG.model_copy(update={"max_new_tokens": 120})
    measurement, _, _, _ = measure(model, draft, tmp_path, config)
    looping = [row for row in measurement.rows if row.loop_free_tokens < len(row.reference_ids)]
    assert looping
    for row in looping:
        asked = {r["sampling_params"]["max_new_tokens"] for r in draft.requests if r["input_ids"] == row.prompt_ids}
        assert asked == {row.loop_free_tokens, min(row.loop_free_tokens, WARM_UP_TOKENS)}
        assert row.draft_ids == row.reference_ids[: row.loop_free_tokens]


def test_a_wrong_token_with_the_draft_is_found(model: Any, tmp_path: Path) -> None:
    def spoil(ids: list[int]) -> list[int]:
        return [*ids[:5], (ids[5] + 1) % 96, *ids[6:]] if len(ids) > 6 else ids

    measurement, _, _, _ = measure(model, FakeEngine(model, accepted=1, change=spoil), tmp_path)
    assert {row.outcome for row in measurement.rows} == {"wrong"}
    assert all(row.difference["position"] == 5 and row.difference["gap"] > row.difference["epsilon"] for row in measurement.rows)
    assert {outcome for block in measurement.blocks for outcome in block.outcomes} == {"wrong"}


GRID = CONFIG.model_copy(update={"grid": [DraftShape(num_steps=2, top_k=4, num_verified=8)]})


def test_one_host_is_restarted_between_blocks_and_every_shape_is_compared_with_the_target(model: Any, tmp_path: Path) -> None:
    """Off, on, on, off for each shape, all points within one start: four starts per shape and round."""
    measurement, _, _, asked = measure(model, FakeEngine(model, accepted=1), tmp_path, GRID, is_side_by_side=False)
    tree = "on K=2 top-k=4 tokens=8"
    assert asked == ["off", "on K=3", "on K=3", "off", "off", tree, tree, "off"]
    assert [block.side for block in measurement.blocks] == ["off", "on", "on", "off"] * 2
    (point,) = measurement.grid
    assert str(point.shape) == "K=2 top-k=4 tokens=8"
    assert point.verifications == sum(row.verifications for row in measurement.rows)
    assert set(point.outcomes) == {"identical"}
    assert [block.concurrency for block in point.blocks] == [1] * 4 + [2] * 4


def test_a_killed_benchmark_goes_on_with_the_next_block(model: Any, tmp_path: Path) -> None:
    draft = FakeEngine(model, accepted=1)
    whole, plain, _, _ = measure(model, draft, tmp_path, GRID, is_side_by_side=False)
    sent = len(draft.requests)
    for path in sorted(tmp_path.glob("*_on_time_2_0_2.json")):  # both shapes' second block with the draft at two in flight
        path.write_bytes(path.read_bytes()[:50])
    again, plain, _, asked = measure(model, draft, tmp_path, GRID, is_side_by_side=False)
    assert len(draft.requests) - sent == 2 * 4 * 2  # four prompts at two in flight, for each shape, and their warm-up
    assert not plain.requests
    assert {name.split()[0] for name in asked} == {"on"}
    assert [row.model_dump() for row in again.rows] == [row.model_dump() for row in whole.rows]


def test_a_set_smaller_than_the_load_is_gone_through_again(model: Any, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"concurrency": [4]})
    measurement, _, _, _ = measure(model, FakeEngine(model, accepted=1), tmp_path, config)
    assert [len(block.latencies_s) for block in measurement.blocks] == [8] * 4
    assert all(set(block.outcomes) <= {"identical"} for block in measurement.blocks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta_changes": {"finish_reason": {"type": "abort", "message": "Aborted"}}}, "abort"),
        ({"meta_changes": {"finish_reason": None}}, "None"),
        ({"meta_changes": {"prompt_tokens": 2}}, r"2 prompt tokens \(sent 3\)"),
        ({"meta_changes": {"completion_tokens": 1}}, "1 completion tokens"),
        ({"status": 500}, "500"),
    ],
)
def test_reply_that_is_not_whole_stops_the_benchmark(model: Any, changes: dict[str, Any], message: str) -> None:
    with served(FakeEngine(model, **changes)) as url, pytest.raises(ServerError, match=message):
        run_block(server(url, has_draft=False), PROMPTS, [4] * 3, 2)


def test_server_that_runs_without_the_draft_is_named(model: Any) -> None:
    with served(FakeEngine(model)) as url, pytest.raises(ServerError, match="EAGLE3"):
        run_block(server(url, has_draft=True), PROMPTS, [4] * 3, 2)


def test_one_failure_ends_the_block_with_its_own_error_and_nothing_left_running(
    model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [BenchmarkPrompt(id=f"q{number}", dataset="b1", input_ids=[5, 6, 7 + number]) for number in range(20)]
    with served(FakeEngine(model, status=400)) as url, pytest.raises(EyasError, match="400"):
        run_block(server(url, has_draft=False), prompts, [4] * 20, 8)
    assert "unhandled" not in capfd.readouterr().err
