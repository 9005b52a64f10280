"""When the run will end: a median and an 80 % interval, from replies that are mostly not finished yet.

The first replies to finish are the shortest, so their mean is far too low (the straight line through them is
what promised 57 h). Here requests in flight count as right-censored at their age in tokens. Per dataset the
hazard of ending in each length bin is drawn from a beta process (Kaplan–Meier where there are data; Hjort,
Annals of Statistics 18, 1990) around a log-normal tail cut at the cap, which is itself shrunk towards all
datasets pooled. 200 draws of the remaining tokens, divided by a measured throughput curve, give the interval;
it costs 50 ms for eight datasets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_DRAWS = 200
CONCENTRATION = 4.0  # replies' worth of trust in the log-normal tail, at every length
POOLED_REPLIES = 8.0  # replies' worth of trust in the pooled shape
BLOCK = 256
DRIFT_Z = 4.0
MIN_LOOKS = 20  # measurements of a context before another speed at it counts as odd
ODD_LOOKS = 10  # measurements in a row that their contexts do not explain, before all are forgotten
WARM_UP_S = 30.0  # start-up may take so long: caches, graphs, the first prompts
STRETCHES = 8
NEIGHBOURS = 10  # looks that follow each other tell as much as one
SLOPES = np.concatenate([[0.0], np.geomspace(1 / 64_000, 1 / 500, 600)])  # candidate costs of a context, per token of it
_FIRST_GUESS = (6.0, 1.2)  # log-normal of the reference run's replies: median 403 … mean 829, before the first sample


class LengthBins:
    """Length bins of one cap: exact to 32 tokens, then 3 % wide, and a last bin that holds the cap alone."""

    def __init__(self, cap: int) -> None:
        edges = [float(length) for length in range(1, min(32, cap) + 1)]
        while edges[-1] * 1.03 + 1 < cap:
            edges.append(math.floor(edges[-1] * 1.03 + 1))
        if edges[-1] < cap:
            edges.append(float(cap))
        self.cap = cap
        self.edges = np.array([*edges, cap + 1.0])  # bin b holds lengths edges[b] ≤ n < edges[b + 1]
        self.lengths = (self.edges[:-1] + self.edges[1:] - 1) / 2
        self.lengths[-1] = cap

    def index(self, tokens: float) -> int:
        """The bin of a length; anything above the cap lies in the last."""
        return min(len(self.lengths) - 1, max(0, int(np.searchsorted(self.edges, tokens, side="right")) - 1))


class LengthSample:
    """The replies of one dataset so far, as counts per bin, kept in blocks of start order so that drift can be seen."""

    def __init__(self, cap: int) -> None:
        self.bins = LengthBins(cap)
        self._blocks: list[Floats] = []

    def add(self, length: int, start_number: int) -> None:
        """Count one finished reply of `length` tokens, the `start_number`-th that was sent."""
        block = start_number // BLOCK
        while len(self._blocks) <= block:
            self._blocks.append(np.zeros(len(self.bins.lengths)))
        self._blocks[block][self.bins.index(length)] += 1

    def copy(self) -> LengthSample:
        """A snapshot that another thread may read."""
        other = LengthSample.__new__(LengthSample)
        other.bins, other._blocks = self.bins, [block.copy() for block in self._blocks]
        return other

    @property
    def count(self) -> int:
        return int(sum(block.sum() for block in self._blocks))

    def events(self) -> tuple[Floats, int]:
        """(counts per bin, first start number that they include): all blocks, or those since the lengths drifted."""
        if not self._blocks:
            return np.zeros(len(self.bins.lengths)), 0
        first = self._drift_at()
        return np.sum(self._blocks[first:], axis=0), first * BLOCK

    def _drift_at(self) -> int:
        """The block from which on the mean log length differs from before beyond doubt, or 0."""
        logs = np.log(self.bins.lengths)
        full = [block for block in self._blocks if block.sum() >= BLOCK * 0.98]  # the others lack their long replies still
        if len(full) < 4:
            return 0
        counts = np.array([block.sum() for block in full])
        sums = np.array([block @ logs for block in full])
        squares = np.array([block @ logs**2 for block in full])
        spread = math.sqrt(max(1e-9, squares.sum() / counts.sum() - (sums.sum() / counts.sum()) ** 2))
        best, at = DRIFT_Z, 0
        for split in range(2, len(full) - 1):
            before, after = counts[:split].sum(), counts[split:].sum()
            delta = abs(sums[:split].sum() / before - sums[split:].sum() / after)
            z = delta / (spread * math.sqrt(1 / before + 1 / after))
            if z > best:
                best, at = z, split
        return at


@dataclass(kw_only=True)
class DatasetOutlook:
    """What a forecast needs of one dataset; `ages` are (tokens so far, start number) of the requests in flight."""

    name: str
    sample: LengthSample
    num_pending: int
    ages: Sequence[tuple[float, int]] = ()
    prompt_tokens: float = 0.0
    """Mean prompt, in tokens."""


@dataclass
class _ContextLooks:
    """Measurements at about one context: mean context, mean seconds a token, sum of squared deviations of the latter."""

    context: float = 0.0
    token_s: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, context: float, token_s: float) -> None:
        """Count one; after 1,000 the old ones fade (Welford's update with a bounded count)."""
        if self.count >= 1000:
            self.squares *= 1 - 1 / self.count
            self.count -= 1
        self.count += 1
        delta = token_s - self.token_s
        self.context += (context - self.context) / self.count
        self.token_s += delta / self.count
        self.squares += delta * (token_s - self.token_s)


class RateCurve:
    """Tokens per second as measured: R(n, c) = peak · (1 − exp(−n / scale)) / (1 + slope · c), n running of mean context c.

    `scale` is fitted to all levels seen (ramp-up shows the low ones), `slope` to the contexts seen at full load; the
    peak at today's context follows the last `window_s` seconds, prefill included.
    """

    def __init__(self, *, window_s: float = 1800.0) -> None:
        self._window_s = window_s
        self._recent: list[tuple[float, float, float, float]] = []
        self._levels: dict[int, tuple[float, int]] = {}
        self._contexts: dict[int, _ContextLooks] = {}
        self._most_running = 0.0
        self._num_odd = 0
        self._first_s = math.inf

    def add(self, time_s: float, running: float, tokens_per_s: float, context: float = 0.0) -> None:
        """One measurement over some seconds, `context` in tokens a request; those with nothing running are left out."""
        if running < 0.5 or tokens_per_s <= 0:
            return
        self._first_s = min(self._first_s, time_s)
        self._recent.append((time_s, running, tokens_per_s, context))
        while self._recent[0][0] < time_s - self._window_s:
            self._recent.pop(0)
        level = round(4 * math.log2(running))
        mean, count = self._levels.get(level, (0.0, 0))
        count = min(count + 1, 200)
        self._levels[level] = (mean + (tokens_per_s - mean) / count, count)
        self._most_running = max(self._most_running, running)
        if context > 0 and running >= 0.9 * self._most_running:
            self._learn_context(context, 1 / tokens_per_s)

    @property
    def is_known(self) -> bool:
        return bool(self._recent)

    def fit(self) -> tuple[float, float, float]:
        """(peak tokens/s at today's context, scale in requests, relative standard error of the peak)."""
        scale = self._scale()
        peaks = np.array([rate / (1 - math.exp(-running / scale)) for _, running, rate, _ in self._recent])
        slope = float(SLOPES @ self._slope_posterior())  # what contexts that grow explain is no wandering
        error = _wander(peaks * (1 + slope * np.array([context for *_, context in self._recent])))
        measured_s = self._recent[-1][0] - self._first_s
        warm_up = 0.5 * min(1.0, 2 * WARM_UP_S / max(measured_s, 1e-9)) ** 2  # a median soon forgets it
        return float(np.median(peaks)), scale, max(0.003, math.hypot(error, warm_up))

    def slowdown(self, contexts: Floats, rng: np.random.Generator) -> Floats:
        """Draws of the seconds a token takes at mean `contexts`, relative to today's; [draws] as `contexts`."""
        slopes = rng.choice(SLOPES, size=len(contexts), p=self._slope_posterior())
        today = float(np.median([item[3] for item in self._recent]))
        ratios: Floats = (1 + slopes * contexts) / (1 + slopes * today)
        return ratios if today else np.ones(len(contexts))

    def _learn_context(self, context: float, token_s: float) -> None:
        looks = self._contexts.setdefault(round(8 * math.log2(context)), _ContextLooks())
        if looks.count >= MIN_LOOKS:
            self._num_odd = 0 if 0.8 < token_s / looks.token_s < 1.25 else self._num_odd + 1
            if self._num_odd >= ODD_LOOKS:  # other servers now: what was measured before says nothing of them
                self._contexts.clear()
                looks = self._contexts.setdefault(round(8 * math.log2(context)), _ContextLooks())
                self._num_odd = 0
        looks.add(context, token_s)

    def _slope_posterior(self) -> Floats:
        """Probability of each of `SLOPES`, from the seconds a token took at the contexts seen.

        Before any evidence half of it lies on "no cost" and half evenly (in the logarithm) on the others: while little
        is known, an interval must allow for contexts that will be longer than today's.
        """
        prior = np.full(len(SLOPES), 0.5 / (len(SLOPES) - 1))
        prior[0] = 0.5
        looks = list(self._contexts.values())
        if len(looks) < 2:
            return prior
        contexts, seconds = np.array([item.context for item in looks]), np.array([item.token_s for item in looks])
        counts = np.array([item.count for item in looks])
        noise = sum(item.squares for item in looks) / max(1, sum(item.count - 1 for item in looks)) / seconds.mean() ** 2
        weights = np.maximum(1.0, counts / NEIGHBOURS) / max(noise, 1e-4)
        shapes = 1 + SLOPES[:, None] * contexts[None, :]  # [slopes, contexts]
        shares = seconds / shapes  # of the seconds at context 0; equal where the slope is right
        centres = shares @ weights / weights.sum()
        misfit = ((shares / centres[:, None] - 1) ** 2) @ weights
        misfit /= max(1.0, misfit.min() / max(1, len(looks) - 2))  # contexts alone do not explain what is left
        likely: Floats = prior * np.exp(-0.5 * (misfit - misfit.min()))
        posterior: Floats = likely / likely.sum()
        return posterior

    def _scale(self) -> float:
        running = np.array([2 ** (level / 4) for level in self._levels])
        rates = np.array([mean for mean, _ in self._levels.values()])
        weights = np.sqrt([count for _, count in self._levels.values()])
        if len(running) < 3 or running.max() / running.min() < 2:
            return float(running.max()) / 4  # nothing measured below full load: taken as saturated
        best, best_scale = math.inf, float(running.max()) / 4
        for scale in running.max() * np.geomspace(0.02, 20, 60):
            shape = 1 - np.exp(-running / scale)
            peak = float((weights * rates * shape).sum() / (weights * shape**2).sum())
            loss = float((weights * (rates - peak * shape) ** 2).sum())
            if loss < best:
                best, best_scale = loss, float(scale)
        return best_scale


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds from now to the end: median and 80 % interval; tokens and seconds left per dataset are medians."""

    median_s: float
    low_s: float
    high_s: float
    tokens_left: float
    tokens_per_s: float
    mean_tokens: dict[str, float] = field(default_factory=dict)
    tokens_left_by_dataset: dict[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float | int | str]:
        """Seconds and tokens that the whole run still takes, 80 % interval included."""
        return {
            "remaining_s": round(self.median_s),
            "remaining_low_s": round(self.low_s),
            "remaining_high_s": round(self.high_s),
            "run_tokens_left": round(self.tokens_left),
        }


def forecast(datasets: Sequence[DatasetOutlook], rate: RateCurve, capacity: int, *, seed: int = 0) -> Forecast | None:
    """The end of the run on servers that hold `capacity` requests together; None before any throughput is measured."""
    if not rate.is_known:
        return None
    rng = np.random.default_rng(seed)
    pooled = _pooled_shape(datasets)
    left, weighted, means, by_dataset, residuals = np.zeros(NUM_DRAWS), np.zeros(NUM_DRAWS), {}, {}, []
    shortest: tuple[float, Floats, Floats] | None = None
    for dataset in datasets:
        lengths = dataset.sample.bins.lengths
        density = _draw_densities(dataset, pooled, rng)  # [draws, bins]
        mean = density @ lengths
        means[dataset.name] = float(np.median(mean))
        spread = np.sqrt(np.maximum(0.0, density @ lengths**2 - mean**2))
        pending = dataset.num_pending * mean + math.sqrt(dataset.num_pending) * spread * rng.standard_normal(NUM_DRAWS)
        flying = _draw_residuals(dataset, density, rng)  # [draws, in flight]
        residuals.append(flying)
        tokens = np.maximum(0.0, pending) + flying.sum(axis=1)
        by_dataset[dataset.name] = float(np.median(tokens))
        left += tokens
        weighted += tokens * (dataset.prompt_tokens + density @ lengths**2 / (2 * mean))  # a token's mean context
        if dataset.num_pending and (shortest is None or mean.mean() < shortest[0]):
            shortest = (float(mean.mean()), density, lengths)
    peak, scale, error = rate.fit()
    peaks = peak * np.exp(error * rng.standard_normal(NUM_DRAWS))
    drain = _last_requests(np.concatenate(residuals, axis=1), shortest, capacity, rng)  # [draws, last in flight]
    peaks = peaks / rate.slowdown(weighted / np.maximum(1.0, left), rng)  # longer answers cost twice: more tokens, more context
    full_rate = peaks * (1 - math.exp(-max(1, capacity) / scale))
    seconds = np.maximum(0.0, left - drain.sum(axis=1)) / full_rate + _drain_seconds(drain, peaks, scale)
    low, median, high = np.quantile(seconds, [0.1, 0.5, 0.9])
    return Forecast(
        median_s=float(median),
        low_s=float(low),
        high_s=float(high),
        tokens_left=float(np.median(left)),
        tokens_per_s=float(np.median(full_rate)),
        mean_tokens=means,
        tokens_left_by_dataset=by_dataset,
    )


def _wander(rates: Floats) -> float:
    """Relative error of these rates' mean for the time to come, from the means of up to eight successive stretches.

    Noise averages out within a stretch. The speed of a machine that wanders, under other work or at another temperature,
    does not: its stretches resemble their neighbours, and the share of the variance that they have in common (their
    autocorrelation) stays in the future's mean, however long it is (batch means; Law and Kelton, Simulation Modeling).
    """
    means = np.array([stretch.mean() for stretch in np.array_split(rates, min(STRETCHES, len(rates)))])
    if len(means) < 2:
        return 0.0
    deviations = means - means.mean()
    alike = float(deviations[1:] @ deviations[:-1] / max(1e-12, float(deviations @ deviations)))
    return float(means.std(ddof=1) / means.mean() * math.sqrt(1 / len(means) + max(1 / len(means), alike)))


def _draw_densities(dataset: DatasetOutlook, pooled: tuple[float, float], rng: np.random.Generator) -> Floats:
    """Draws of the probability of each length bin, [draws, bins]."""
    bins = dataset.sample.bins
    events, first = dataset.sample.events()
    censored = _censored(dataset, first)
    mu, sigma, count = _fit_lognormal(events, censored, bins, pooled, POOLED_REPLIES)
    mus = mu + sigma / math.sqrt(count) * rng.standard_normal(NUM_DRAWS)
    sigmas = sigma * np.sqrt(count / np.maximum(1.0, rng.chisquare(count, NUM_DRAWS)))
    # A bin's hazard: of those that reach it, the share that ends in it.
    tail = _normal_tail((np.log(bins.edges[None, :-1] - 0.5) - mus[:, None]) / sigmas[:, None])
    prior = np.clip(1 - tail[:, 1:] / np.maximum(tail[:, :-1], 1e-12), 1e-6, 1 - 1e-6)
    prior = np.concatenate([prior, np.ones((NUM_DRAWS, 1))], axis=1)
    ended = np.cumsum(events[::-1])[::-1]
    alive = np.cumsum(censored[::-1])[::-1] - censored / 2  # the actuarial half: in their own bin they are at risk in part
    at_risk = ended + alive
    successes = CONCENTRATION * prior + events
    failures = CONCENTRATION * (1 - prior) + (at_risk - events)
    hazard = rng.beta(np.maximum(successes, 1e-9), np.maximum(failures, 1e-9))
    hazard[:, -1] = 1.0
    survival = np.concatenate([np.ones((NUM_DRAWS, 1)), np.cumprod(1 - hazard[:, :-1], axis=1)], axis=1)
    density: Floats = survival * hazard
    return density


def _draw_residuals(dataset: DatasetOutlook, density: Floats, rng: np.random.Generator) -> Floats:
    """Draws of the tokens that each request in flight still lacks, given the age it has reached; [draws, in flight]."""
    ages = np.array([age for age, _ in dataset.ages])
    if not len(ages):
        return np.zeros((NUM_DRAWS, 0))
    bins = dataset.sample.bins
    reached = np.array([bins.index(age) for age in ages])
    cumulative = np.cumsum(density, axis=1)
    result = np.empty((NUM_DRAWS, len(ages)))
    for draw in range(NUM_DRAWS):
        before = np.concatenate([[0.0], cumulative[draw]])[reached]
        target = before + (1 - before) * rng.random(len(ages))
        ends = np.minimum(np.searchsorted(cumulative[draw], target), len(bins.lengths) - 1)
        result[draw] = np.maximum(1.0, bins.lengths[ends] - ages)
    return result


def _last_requests(
    residuals: Floats, shortest: tuple[float, Floats, Floats] | None, capacity: int, rng: np.random.Generator
) -> Floats:
    """Tokens that the requests lack which run when nothing is pending any more.

    Those of today if nothing is pending; otherwise requests of the dataset with the shortest answers, which the
    scheduler keeps for the end, each met at a uniform point of a length-biased answer.
    """
    if shortest is None:
        return residuals
    _, density, lengths = shortest
    biased = density.mean(axis=0) * lengths
    picks = rng.choice(len(lengths), size=(NUM_DRAWS, max(1, capacity)), p=biased / biased.sum())
    result: Floats = lengths[picks] * rng.random(picks.shape)
    return result


def _drain_seconds(drain: Floats, peaks: Floats, scale: float) -> Floats:
    """Time in which requests that lack `drain` tokens end together: all n that run advance at R(n) / n."""
    ordered = np.sort(drain, axis=1)
    steps = np.diff(np.concatenate([np.zeros((len(drain), 1)), ordered], axis=1), axis=1)
    running = np.arange(drain.shape[1], 0, -1, dtype=np.float64)
    rates = 1 - np.exp(-running / scale)
    seconds: Floats = (steps * running / rates).sum(axis=1) / peaks
    return seconds


def _censored(dataset: DatasetOutlook, first: int) -> Floats:
    bins = dataset.sample.bins
    counts = np.zeros(len(bins.lengths))
    for age, start_number in dataset.ages:
        if start_number >= first:
            counts[bins.index(max(1.0, age))] += 1
    return counts


def _pooled_shape(datasets: Sequence[DatasetOutlook]) -> tuple[float, float]:
    """Log-normal shape of all datasets together, each with equal weight."""
    fits = []
    for dataset in datasets:
        events, first = dataset.sample.events()
        if events.sum() >= 8:
            fits.append(_fit_lognormal(events, _censored(dataset, first), dataset.sample.bins, _FIRST_GUESS, 1.0))
    if not fits:
        return _FIRST_GUESS
    mu = float(np.mean([fit[0] for fit in fits]))
    between = float(np.var([fit[0] for fit in fits]))
    return mu, math.sqrt(float(np.mean([fit[1] ** 2 for fit in fits])) + between)


def _fit_lognormal(
    events: Floats, censored: Floats, bins: LengthBins, prior: tuple[float, float], strength: float
) -> tuple[float, float, float]:
    """(mu, sigma, effective count) by EM; replies at the cap and requests in flight are right-censored."""
    logs, starts = np.log(bins.lengths), np.log(np.maximum(bins.edges[:-1] - 0.5, 0.5))
    exact, cut = events.copy(), censored.copy()
    cut[-1] += exact[-1]
    exact[-1] = 0.0
    mu, sigma = prior
    total = exact.sum() + cut.sum() + strength
    for _ in range(40):
        z = (starts - mu) / sigma
        mills = _normal_density(z) / np.maximum(_normal_tail(z), 1e-12)
        first = mu + sigma * mills
        second = mu**2 + sigma**2 + sigma * (starts + mu) * mills
        new_mu = (exact @ logs + cut @ first + strength * prior[0]) / total
        square = (exact @ logs**2 + cut @ second + strength * (prior[1] ** 2 + prior[0] ** 2)) / total
        new_sigma = math.sqrt(max(0.01, square - new_mu**2))
        is_still = abs(new_mu - mu) + abs(new_sigma - sigma) < 1e-4
        mu, sigma = float(new_mu), new_sigma
        if is_still:
            break
    return mu, sigma, float(exact.sum() + strength)


def _normal_density(z: Floats) -> Floats:
    density: Floats = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return density


def _normal_tail(z: Any) -> Floats:
    """P(Z > z) to 1e-7 (Abramowitz and Stegun 7.1.26 on erfc)."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = 0.5 * poly * np.exp(-(x**2))
    tail: Floats = np.where(z >= 0, upper, 1 - upper)
    return tail
