"""The counters: whoever holds a reply finds it counted."""

from __future__ import annotations

import threading

from eyas.engine.request import Request
from eyas.engine.scheduler import Scheduler
from eyas.engine.scripted import ScriptedRunner
from tests.engine.conftest import greedy


def test_a_reply_is_counted_before_it_goes_out() -> None:
    runner = ScriptedRunner(lambda text: list(range(3, 40)), lambda ids: "", end_id=2)
    seen: dict[str, int] = {}
    is_out = threading.Event()

    def emit(request: Request) -> None:
        seen.update(scheduler.stats.counters)
        is_out.set()

    scheduler = Scheduler(
        runner,
        end_ids={2},
        decode=lambda ids: "",
        max_running=2,
        max_queued=0,
        chunk_tokens=64,
        on_death=lambda error: is_out.set(),
    )
    request = Request(prompt_ids=[5, 6, 7], params=greedy(8), rid="a", emit=emit)
    scheduler.submit(request)
    scheduler.start()
    assert is_out.wait(30)
    scheduler.stop()
    scheduler.join(10)
    assert len(request.output_ids) == 8
    assert (seen["generation_tokens"], seen["prompt_tokens"], seen["requests"]) == (8, 3, 1)
