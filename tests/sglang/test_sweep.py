"""The sweep on a loopback server, and its advice on made-up numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.errors import EyasError, ServerError
from eyas.sglang import sweep as sweep_module
from eyas.sglang.client import RequestRefused
from eyas.sglang.config import ServerConfig
from eyas.sglang.sweep import Level, Sweep, advise, sweep
from tests.sglang.loopback import LoopbackServer
from tests.sglang.tiny import build_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_target(tmp_path_factory.mktemp("target") / "tiny")


async def test_a_sweep_measures_levels_and_writes_table_and_plot(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock moves by one second each time it is read: at the start and the end of a level and of each request in it."""
    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    with LoopbackServer(target, delay_s=0.4) as server:
        result = await sweep(server.url, ServerConfig(), [5] * 20, vocab_size=200, levels=(1, 4), new_tokens=8, rounds=1)
    assert [level.concurrency for level in result.levels] == [1, 4]
    assert [level.tokens_per_s for level in result.levels] == [8 / 3, 4 * 8 / 9]
    assert (result.levels[0].latency_s, result.levels[0].latency_p90_s) == (1, 1)
    assert server.peak_running == 4
    result.write(tmp_path)
    assert "| 4 | 3.6 |" in (tmp_path / "sweep.md").read_text()
    assert (tmp_path / "sweep.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("fault", "error", "words"), [("status:400", RequestRefused, "as told"), ("html", ServerError, "without output_ids")]
)
async def test_a_server_that_does_not_play_along_is_one_clear_error(
    target: Path, fault: str, error: type[EyasError], words: str
) -> None:
    def behave(payload: dict[str, Any], nth: int) -> str | None:
        return fault if nth > 1 else None

    with LoopbackServer(target, behave=behave) as server, pytest.raises(error, match=words):
        await sweep(server.url, ServerConfig(), [5] * 20, vocab_size=200, levels=(2,), new_tokens=8)


def made_up(rates: list[float], **changes: float | int) -> Sweep:
    usual = {"latency_s": 1.0, "latency_p90_s": 2.0, "token_usage": 0.5, "num_retractions": 0, "num_waiting": 0}
    levels = [Level(concurrency=2**index, tokens_per_s=value, **{**usual, **changes}) for index, value in enumerate(rates)]
    return Sweep(url="http://s", prompt_tokens=9000, new_tokens=64, settings={}, levels=levels)


def test_the_knee_is_the_last_level_worth_its_latency() -> None:
    assert advise(made_up([100, 190, 360, 370, 372]))[0].startswith("server.max_concurrency: 4 gives 360")


def test_advice_names_the_setting_that_the_numbers_point_to() -> None:
    retracting = made_up([100, 200], num_retractions=3, token_usage=0.98)
    retracting.settings = {"mem_fraction_static": 0.7, "chunked_prefill_size": 4096, "cuda_graph_max_bs_decode": 1}
    text = " ".join(advise(retracting))
    for flag in ("--mem-fraction-static (now 0.7)", "--schedule-conservativeness", "--chunked-prefill-size", "--cuda-graph-max-bs"):
        assert flag in text
    waiting = made_up([100, 200], num_waiting=5)
    waiting.settings = {"max_running_requests": 2}
    assert "--max-running-requests (now 2)" in " ".join(advise(waiting))
