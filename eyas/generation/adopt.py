"""Take up responses that another script has already written, so that a run of hours is not thrown away.

Each row of a JSON Lines file is audited by the same rules as a reply of ours: it needs output *ids* (text is never
tokenised again), the prompt's ids or its exact rendered text, how it ended, and its reasoning where the target always
reasons. What passes goes into the journal as done; what does not stays pending and is generated, with its reason counted here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from eyas.config import RunConfig
from eyas.errors import ConfigError, RecordError
from eyas.files import read_json_lines
from eyas.generation.asking import Record, clock
from eyas.generation.dataset import STAGE, DatasetRun, require_dataset
from eyas.generation.records import PENDING, Prompt, done_entry
from eyas.generation.sampling import check_stop_tokens, record_seed, resolve_sampling
from eyas.progress import Progress, Report, silent
from eyas.sglang.replies import GenerateRequest, Reply, ReplyError, accept
from eyas.target.rendering import Renderer
from eyas.target.spec import load_target
from eyas.target.tokenizer import load_tokenizer
from eyas.workspace import RunFolder

log = logging.getLogger(__name__)

_PROMPT_IDS = ("input_ids", "prompt_token_ids", "prompt_ids")
_OUTPUT_IDS = ("output_ids", "response_token_ids", "output_token_ids", "completion_ids")


@dataclass(kw_only=True)
class Audit:
    """What became of the rows of some files; `rows` = `kept` + the sum of `refused`."""

    rows: int = 0
    kept: int = 0
    with_reasoning: int = 0
    cut_by_length: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """The first place (file:line) and detail of each reason."""

    def lines(self) -> list[str]:
        """The audit in words, for a terminal."""
        kept = max(1, self.kept)
        share = f"{self.with_reasoning / kept:.0%} with reasoning, {self.cut_by_length} cut by length"
        refused = [f"{count} refused: {reason} ({self.examples[reason]})" for reason, count in self.refused.most_common()]
        return [f"{self.rows} rows: {self.kept} kept ({share})", *refused]


def adopt(run: RunFolder, config: RunConfig, dataset: str, files: list[Path], report: Report = silent) -> Audit:
    """Audit `files` against the prompts of `dataset`, journal what passes, and report where generation stands then.

    Raises `ConfigError` if a file cannot be read or another process generates into this run.
    """
    for path in files:
        if not path.is_file():
            seen = "is no file" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {seen}; give JSON Lines files of responses")
    return asyncio.run(_adopt(run, config, dataset, files, report))


async def _adopt(run: RunFolder, config: RunConfig, name: str, files: list[Path], report: Report) -> Audit:
    require_dataset(config, run, name)
    spec = load_target(config.target)
    renderer = Renderer(spec, load_tokenizer(spec), config.target)
    check_stop_tokens(config.generation, spec, renderer.tokenizer)
    sampling = resolve_sampling(config.generation, spec)
    auditor = _Auditor(config, renderer, sampling)
    dataset = DatasetRun(run, config, spec, sampling, name, auditor.decode)
    await dataset.open(lambda error: None, retry_s=5.0, give_up_s=0.0)
    audit = Audit()
    try:
        prompts = {prompt.id: prompt for prompt in dataset.table.rows()}
        by_ids = {_digest(prompt.input_ids): prompt.id for prompt in prompts.values()}
        for where, raw in _rows(files):
            audit.rows += 1
            try:
                prompt, reply = auditor.check(raw, where, prompts, by_ids)
                if dataset.table.states[prompt.index] != PENDING:
                    raise RecordError("already_done", f"{prompt.id} has its outcome")
                entry = auditor.entry(prompt, reply, where)
            except (RecordError, ReplyError) as error:
                reason = error.reason
                audit.refused[reason] += 1
                audit.examples.setdefault(reason, f"{where}: {error}"[:300])
                continue
            await dataset.write(prompt, entry)
            audit.kept += 1
            audit.with_reasoning += entry["spans"]["reasoning"] is not None
            audit.cut_by_length += reply.finish_reason == "length"
        counts = dataset.counts()
        figures: dict[str, float | int | str] = {"done": counts.done, "rejected": counts.rejected, "pending": counts.pending}
        settled = counts.done + counts.rejected
        report(Progress(stage=STAGE, name=name, done=settled, total=counts.num_in, unit="records", figures=figures))
    finally:
        await dataset.close()
    log.info("adopted dataset=%s rows=%d kept=%d refused=%s", name, audit.rows, audit.kept, dict(audit.refused))
    return audit


class _Auditor:
    def __init__(self, config: RunConfig, renderer: Renderer, sampling: dict[str, Any]) -> None:
        self._config = config
        self._renderer = renderer
        self._sampling = sampling

    def decode(self, ids: list[int]) -> str:
        return str(self._renderer.tokenizer.decode(ids, skip_special_tokens=False))

    def check(self, raw: bytes, where: str, prompts: dict[str, Prompt], by_ids: dict[bytes, str]) -> tuple[Prompt, Reply]:
        """The prompt that a row answers and its reply; raises the reason why it cannot be kept."""
        row = _parse(raw)
        output_ids = _first(row, _OUTPUT_IDS)
        if output_ids is None:
            has_text = any(key in row for key in ("response", "text", "messages", "conversations", "output", "completion"))
            raise RecordError("text_only" if has_text else "no_response", "no output ids; text is never tokenised again")
        prompt = self._find_prompt(row, prompts, by_ids)
        meta = dict(row["meta_info"]) if isinstance(row.get("meta_info"), dict) else {}
        finish = meta.get("finish_reason", row.get("finish_reason"))
        if isinstance(finish, str):  # which token it stopped at is not told: it must be the last
            finish = {"type": finish, "matched": output_ids[-1] if isinstance(output_ids, list) and output_ids else None}
        body = {
            "output_ids": output_ids,
            "text": row.get("text") if isinstance(row.get("text"), str) else "",
            "meta_info": {
                "prompt_tokens": len(prompt.input_ids),
                "completion_tokens": len(output_ids) if isinstance(output_ids, list) else 0,
                **meta,
                "id": prompt.id,
                "finish_reason": finish,
            },
        }
        sampling = {**self._sampling, "max_new_tokens": prompt.max_new_tokens}
        request = GenerateRequest(rid=prompt.id, input_ids=prompt.input_ids, sampling_params=sampling)
        try:
            data = orjson.dumps(body)
        except TypeError as error:  # lone surrogates, integers above 64 bits
            raise RecordError("bad_row", f"the row cannot stand in a reply: {error}") from error
        reply = accept(data, request, decode=self.decode, vocab_size=self._renderer.spec.vocab_size, where=where)
        if early := set(reply.output_ids[:-1]) & set(sampling["stop_token_ids"]):
            raise RecordError("end_token_inside", f"goes on after token {min(early)}, at which it is to stop")
        return prompt, reply

    def entry(self, prompt: Prompt, reply: Reply, where: str) -> dict[str, Any]:
        """The journal's line of a reply; raises `RecordError` where the reasoning was lost on its way here."""
        reasoning = self._renderer.reasoning
        spans = reasoning.split(reply.output_ids, prompt.opens_think, len(prompt.input_ids), finish_reason=reply.finish_reason)
        if reasoning.always_reasons and spans.reasoning is None:
            raise RecordError("no_reasoning", "holds no reasoning, and the target always reasons (target.always_reasons)")
        record = Record(start_number=0, url=f"adopted:{where}", rid="", max_new_tokens=prompt.max_new_tokens, started_at=clock())
        provenance = {**record.provenance(), "seed": record_seed(self._config.generation.seed, prompt.id), "is_clamped": False}
        return done_entry(prompt, reply, spans, provenance)

    def _find_prompt(self, row: dict[str, Any], prompts: dict[str, Prompt], by_ids: dict[bytes, str]) -> Prompt:
        input_ids = _first(row, _PROMPT_IDS)
        if input_ids is None and isinstance(row.get("prompt"), str):
            input_ids = self._encode(row["prompt"])
        if not isinstance(input_ids, list) or not all(isinstance(token, int) for token in input_ids):
            raise RecordError("no_prompt_ids", "neither the prompt's ids nor its rendered text; the template cannot be checked")
        found = by_ids.get(_digest(input_ids))
        if found is None:
            own = prompts.get(str(row.get("id")))
            reason = "other_template" if own is not None else "unknown_prompt"
            raise RecordError(reason, f"the prompt of {len(input_ids)} ids is none of this dataset's")
        own = prompts.get(str(row.get("id")))
        return own if own is not None and own.input_ids == input_ids else prompts[found]

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordError("bad_row", f"the prompt is no UTF-8 text: {error.reason}") from error
        return self._renderer.encode([text])[0]


def _rows(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        for number, line in read_json_lines(path):
            yield f"{path.name}:{number}", line


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecordError("not_json", f"the line is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RecordError("not_json", f"the line holds a {type(row).__name__}, wanted an object")
    return row


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _digest(ids: list[int]) -> bytes:
    try:
        return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()
    except OverflowError:
        return b""
