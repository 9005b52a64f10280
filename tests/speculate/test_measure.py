"""Load and measurement of one set against loopback servers that behave and misbehave."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.errors import EyasError, ServerError
from eyas.sglang.config import ServerConfig
from eyas.speculate.accept import AcceptCounts
from eyas.speculate.baselines import BigramTable
from eyas.speculate.config import BenchmarkConfig
from eyas.speculate.load import Server, run_block
from eyas.speculate.lossless import LocalJudge
from eyas.speculate.measure import measure_set, num_steps
from eyas.speculate.results import SetMeasurement
from eyas.speculate.sets import BenchmarkPrompt
from tests.speculate.conftest import FakeEngine, greedy, served

PROMPTS = [BenchmarkPrompt(id=f"p{start}", dataset="b1", input_ids=[start, start + 1, start + 2]) for start in (5, 20, 40)]
CONFIG = BenchmarkConfig(max_new_tokens=40, timed_prompts=2, concurrency=[1, 2], counting_concurrency=3)


def server(url: str, *, has_draft: bool) -> Server:
    return Server(url=url, config=ServerConfig(), has_draft=has_draft, stop_token_ids=(2,))


def measure(model: Any, draft: FakeEngine, config: BenchmarkConfig = CONFIG) -> tuple[SetMeasurement, FakeEngine, list[str]]:
    plain, steps = FakeEngine(model), []
    with served(plain) as off, served(draft) as on:
        measurement = measure_set(
            "heldout",
            PROMPTS,
            {"off": server(off, has_draft=False), "on": server(on, has_draft=True)},
            config,
            measure_tie=LocalJudge(model, config.num_draft_tokens),
            bigrams=BigramTable({}),
            predict=lambda pairs: [AcceptCounts(verifications=len(reply), accepted=1) for _, reply in pairs],
            step=steps.append,
        )
    return measurement, plain, steps


def test_same_prompts_as_ids_at_temperature_0_on_both_sides(model: Any) -> None:
    draft = FakeEngine(model, accepted=1)
    measurement, plain, steps = measure(model, draft)
    assert len(steps) == num_steps(CONFIG)
    for requests in (plain.requests, draft.requests):
        assert {tuple(request["input_ids"]) for request in requests} == {tuple(prompt.input_ids) for prompt in PROMPTS}
        assert all(request["sampling_params"]["temperature"] == 0 for request in requests)
        assert all("text" not in request for request in requests)
    assert all(row.outcome == "identical" for row in measurement.rows)
    assert [row.draft_ids for row in measurement.rows] == [
        greedy(model, row.prompt_ids, len(row.draft_ids), [2]) for row in measurement.rows
    ]


def test_timed_blocks_go_off_on_on_off_and_make_the_same_tokens(model: Any) -> None:
    measurement, _, _ = measure(model, FakeEngine(model, accepted=1))
    assert [block.side for block in measurement.blocks] == ["off", "on", "on", "off"] * 2
    assert [block.concurrency for block in measurement.blocks] == [1] * 4 + [2] * 4
    assert len({block.output_tokens for block in measurement.blocks if block.concurrency == 1}) == 1
    assert all(len(block.outcomes) == (len(block.latencies_s) if block.side == "on" else 0) for block in measurement.blocks)


def test_replies_are_cut_where_their_loop_begins(model: Any) -> None:
    """The tiny target loops; the part that is counted holds no repetition, and only that part is asked of the draft."""
    draft = FakeEngine(model, accepted=1)
    config = CONFIG.model_copy(update={"max_new_tokens": 120})
    measurement, _, _ = measure(model, draft, config)
    looping = [row for row in measurement.rows if row.loop_free_tokens < len(row.reference_ids)]
    assert looping
    for row in looping:
        asked = {r["sampling_params"]["max_new_tokens"] for r in draft.requests if r["input_ids"] == row.prompt_ids}
        assert asked == {row.loop_free_tokens}
        assert row.draft_ids == row.reference_ids[: row.loop_free_tokens]


def test_a_wrong_token_with_the_draft_is_found(model: Any) -> None:
    def spoil(ids: list[int]) -> list[int]:
        return [*ids[:5], (ids[5] + 1) % 96, *ids[6:]] if len(ids) > 6 else ids

    measurement, _, _ = measure(model, FakeEngine(model, accepted=1, change=spoil))
    assert {row.outcome for row in measurement.rows} == {"wrong"}
    assert all(row.difference["position"] == 5 and row.difference["gap"] > row.difference["epsilon"] for row in measurement.rows)
    assert {outcome for block in measurement.blocks for outcome in block.outcomes} == {"wrong"}


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
