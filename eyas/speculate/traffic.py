"""How much of replies is reasoning: in what a draft was trained on, and in what it serves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from eyas.config import RunConfig
from eyas.draft.corpus import Corpus
from eyas.errors import ConfigError
from eyas.files import read_json_lines
from eyas.target.reasoning import ReasoningFormat, find_reasoning_format
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer

RECORDS = 256


def reasoning_shares(config: RunConfig, target: TargetSpec, corpus: Corpus, traffic: Path | None) -> tuple[float, float] | None:
    """Share of generated tokens inside think sections in training and in `traffic` (or held-out); None without think tokens.

    Raises `ConfigError` for a traffic file that is not JSON Lines with `output_ids`.
    """
    form = find_reasoning_format(load_tokenizer(target), config.target, end_token_ids=set(target.eos_token_ids))
    if not form.close_ids:
        return None
    trained = think_share(form, (_generated(corpus, item) for item in corpus.train[:RECORDS]))
    other = _read(traffic) if traffic else (_generated(corpus, item) for item in corpus.heldout[:RECORDS])
    return trained, think_share(form, other)


def think_share(form: ReasoningFormat, replies: Iterable[Sequence[int]]) -> float:
    """Share of the tokens of `replies` that come before the close of a think section; a reply without a close has none."""
    inside = total = 0
    for ids in replies:
        total += len(ids)
        inside += _end_of_thinking(list(ids), list(form.close_ids))
    return inside / max(1, total)


def _end_of_thinking(ids: list[int], close: list[int]) -> int:
    width = len(close)
    return next((start + width for start in range(len(ids) - width + 1) if ids[start : start + width] == close), 0)


def _generated(corpus: Corpus, record_id: str) -> list[int]:
    record = corpus.record(record_id)
    found: list[int] = record.tokens[record.loss_mask.bool()].tolist()
    return found


def _read(path: Path) -> Iterable[list[int]]:
    if not path.is_file():
        raise ConfigError(f"traffic file {path} does not exist; give JSON Lines with output_ids")
    for number, line in read_json_lines(path):
        try:
            ids = json.loads(line)["output_ids"]
            if not all(isinstance(item, int) for item in ids):
                raise TypeError("output_ids are not whole numbers")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: no reply with output_ids ({error!r}); give JSON Lines with output_ids") from error
        yield ids
