"""Several requests in flight against servers, one sequence each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

from eyas.hidden.sources.protocol import States, TokenIds


def concurrently(
    sequences: Sequence[TokenIds], concurrency: int, states_of: Callable[[int, TokenIds], States]
) -> Iterator[tuple[int, States]]:
    """`states_of(index, sequence)` of each sequence in `concurrency` threads, as they finish; its first error is raised here."""
    waiting = iter(range(len(sequences)))
    with ThreadPoolExecutor(concurrency) as pool:
        running: dict[Future[States], int] = {}
        while True:
            for index in islice(waiting, concurrency * 2 - len(running)):
                running[pool.submit(states_of, index, sequences[index])] = index
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
