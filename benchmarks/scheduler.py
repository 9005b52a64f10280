"""Makespan of the reference run under three orders, against the bound total tokens / peak rate.

python -m benchmarks.scheduler
"""

from __future__ import annotations

import numpy as np

from benchmarks.generation_model import LIMIT, by_scheduler, one_after_the_other, rate, reference_work, simulate, with_barrier


def main() -> None:
    print(f"R(n) = 1350 (1 - exp(-n / 16)) tokens/s, at most {LIMIT} running; 88,088 prompts in eight datasets, seed 0")
    print("| order | makespan, h | above the bound |\n|---|---|---|")
    for label, pick in [("eyas", by_scheduler), ("dataset after dataset", one_after_the_other), ("with a barrier", with_barrier)]:
        works = reference_work(np.random.default_rng(0))
        bound = sum(sum(work.lengths) for work in works) / rate(LIMIT)
        seconds = 0.0
        for clock, _, _ in simulate(works, pick):
            seconds = clock.seconds
        print(f"| {label} | {seconds / 3600:.2f} | {seconds / bound - 1:+.2%} |")


if __name__ == "__main__":
    main()
