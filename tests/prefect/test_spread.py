"""Where tasks run: here by default, and a clear word where Ray is wanted and not installed. Real Ray: tests/prefect_e2e."""

from __future__ import annotations

import sys

import pytest

from eyas.errors import ConfigError
from eyas.operate.config import RunnerConfig
from tasks.prepare import prepare_candidates
from tasks.spread import Spread, spread_over


async def test_without_ray_the_config_is_refused_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    monkeypatch.setitem(sys.modules, "prefect_ray.context", None)
    async with spread_over(RunnerConfig(kind="ray")) as spread:
        with pytest.raises(ConfigError, match=r"pip install 'eyas\[ray\]'"):
            await spread.run(prepare_candidates)


async def test_a_thread_in_this_process_is_the_default() -> None:
    assert not Spread(RunnerConfig()).is_wide
