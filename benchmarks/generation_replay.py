"""Replay of a finished run's journals: what the forecast would have said at each checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eyas.generation.forecast import DatasetOutlook, Forecast, LengthSample, RateCurve, forecast
from eyas.generation.journal import parse_line, read_journal


@dataclass(frozen=True, kw_only=True)
class _Reply:
    dataset: str
    start_s: float
    end_s: float
    tokens: int


def replayed_forecasts(folder: Path, checkpoints: list[float]) -> Iterator[tuple[float, Forecast, float]]:
    """Yield (share done, forecast made then, seconds it really took) for a run folder whose generation is finished."""
    replies = sorted(_replies(folder), key=lambda reply: reply.end_s)
    caps = {reply.dataset: max(other.tokens for other in replies if other.dataset == reply.dataset) for reply in replies}
    first, last = min(reply.start_s for reply in replies), replies[-1].end_s
    for share in checkpoints:
        moment = replies[min(len(replies) - 1, int(share * len(replies)))].end_s
        done = [reply for reply in replies if reply.end_s <= moment]
        flying = [reply for reply in replies if reply.start_s <= moment < reply.end_s]
        curve = _curve(replies, first, moment)
        token_s = sum(reply.end_s - reply.start_s for reply in done) / sum(reply.tokens for reply in done)
        outlooks = []
        for name, cap in caps.items():
            sample = LengthSample(cap)
            started = sorted(reply.start_s for reply in replies if reply.dataset == name and reply.start_s <= moment)
            number = {start: index for index, start in enumerate(started)}
            for reply in done:
                if reply.dataset == name:
                    sample.add(reply.tokens, number[reply.start_s])
            ages = [((moment - reply.start_s) / token_s, number[reply.start_s]) for reply in flying if reply.dataset == name]
            num_pending = sum(reply.dataset == name and reply.start_s > moment for reply in replies)
            outlooks.append(DatasetOutlook(name=name, sample=sample, num_pending=num_pending, ages=ages))
        capacity = max(len(flying), 1)
        guess = forecast(outlooks, curve, capacity)
        if guess is not None:
            yield len(done) / len(replies), guess, last - moment


def _curve(replies: list[_Reply], first: float, moment: float) -> RateCurve:
    """Throughput per slice of time: each reply's tokens spread evenly over its life."""
    curve = RateCurve()
    width = max((moment - first) / 60, 0.5)
    start = first
    while start + width <= moment:
        overlaps = [(min(reply.end_s, start + width) - max(reply.start_s, start), reply) for reply in replies]
        alive = [(seconds, reply) for seconds, reply in overlaps if seconds > 0]
        tokens = sum(reply.tokens * seconds / max(1e-9, reply.end_s - reply.start_s) for seconds, reply in alive)
        curve.add(start, sum(seconds for seconds, _ in alive) / width, tokens / width)
        start += width
    return curve


def _replies(folder: Path) -> Iterator[_Reply]:
    for path in sorted(folder.glob("responses/*/journal-*.jsonl")):
        for offset, _, line in read_journal(path):
            entry = parse_line(path, offset, line)
            if "reject" not in entry:
                yield _Reply(
                    dataset=path.parent.name,
                    start_s=datetime.fromisoformat(str(entry["started_at"])).timestamp(),
                    end_s=datetime.fromisoformat(str(entry["finished_at"])).timestamp(),
                    tokens=len(entry["output_ids"]),  # type: ignore[arg-type]
                )
