"""Which dataset sends the next prompt: longest answers first, with a floor for every unfinished dataset.

Servers stay full to the end because what is left then is short: the makespan comes within a few percent of
total tokens / peak rate. Inside a dataset prompts go in file order, which is random with respect to content,
so that what has been answered is an honest sample. The floor (of requests in flight, and 128 early
samples each) feeds the forecast of every dataset from the first minutes. The order of datasets is settled by
those early samples and then stays: were it to follow the running means, the datasets left to the end would be
those whose means happen to be too low, and the forecast would say so too (4 % too early, simulated).
"""

from __future__ import annotations

from dataclasses import dataclass

EARLY_SAMPLES = 128


@dataclass(kw_only=True, eq=False)
class Share:
    """What the scheduler knows of one dataset. `mean_tokens` orders the datasets: the cap until the early samples are there."""

    name: str
    num_pending: int
    mean_tokens: float
    in_flight: int = 0
    num_started: int = 0

    def start(self) -> None:
        """One prompt goes out."""
        self.num_pending -= 1
        self.in_flight += 1
        self.num_started += 1

    def learn(self, num_replies: int, mean_tokens: float) -> None:
        """Take the mean answer of the first replies, in tokens; later ones no longer change the order."""
        if num_replies <= EARLY_SAMPLES:
            self.mean_tokens = mean_tokens


def choose(shares: list[Share], capacity: int, floor: float) -> Share | None:
    """The dataset whose prompt goes next on servers that hold `capacity` requests; None if nothing is pending.

    First whoever is below its floor (the emptiest first), then whoever still lacks early samples, then the
    longest answers.
    """
    waiting = [share for share in shares if share.num_pending > 0]
    if not waiting:
        return None
    least = max(1, int(capacity * floor))
    starved = [share for share in waiting if share.in_flight < least]
    if starved:
        return min(starved, key=lambda share: (share.in_flight, share.name))
    early = [share for share in waiting if share.num_started < EARLY_SAMPLES]
    if early:
        return min(early, key=lambda share: (share.num_started, share.name))
    return max(waiting, key=lambda share: (share.mean_tokens, share.name))
