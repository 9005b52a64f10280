"""Is this server the target? Model, context and tokenizer before the first prompt, and a fingerprint of what it computes.

The fingerprint is the greedy continuation, with log-probabilities, of 16 fixed prompts. It is taken twice, all
together and in two halves, because batching alone moves log-probabilities: the largest difference between the
two is the measured noise. Two fingerprints agree if ids are equal, or first differ where the two candidates are
as close as the noise allows. It costs 512 tokens. Generation keeps the first one; every server that joins it, and the one that
is to serve the draft, must agree with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.errors import ArtifactError, ConfigError, ServerError
from eyas.files import digest_json, read_json, write_json
from eyas.sglang.client import RequestRefused, SGLangClient
from eyas.sglang.config import ServerConfig
from eyas.target.rendering import Renderer
from eyas.target.spec import TargetSpec

log = logging.getLogger(__name__)

FINGERPRINT_NAME = "target-fingerprint.json"
FINGERPRINT_TOKENS = 16
LEAST_TOLERANCE = 0.05
TOKENIZER_PROBE = "Ünïcode 漢字 🙂\n\tdef f(x):  return x**2  # 12345"
FIXED_PROMPTS = (
    "Name the capital of France.",
    "Count from one to ten.",
    "Write a haiku about rain.",
    "What is 17 times 23?",
    "Translate 'good morning' into Spanish.",
    "Explain what a hash table is.",
    "Write a Python function that reverses a list.",
    "List three uses of copper.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet.",
    "What does HTTP status 404 mean?",
    "Sort these numbers: 5, 3, 9, 1.",
    "Who wrote 'Pride and Prejudice'?",
    "Write an SQL query that counts users by country.",
    "Describe a sunset in one sentence.",
)


class FingerprintEntry(BaseModel):
    """Greedy continuation of one fixed prompt: ids, their log-probabilities, and those of the runner-up at each step."""

    model_config = ConfigDict(extra="forbid")

    output_ids: list[int]
    logprobs: list[float]
    second_logprobs: list[float]


class TargetFingerprint(BaseModel):
    """What a server computes, comparable with what another computes; `noise` is in nats."""

    model_config = ConfigDict(extra="forbid")

    prompts_digest: str
    entries: list[FingerprintEntry]
    noise: float
    weight_version: str

    @property
    def tolerance(self) -> float:
        """Largest |Δ log-probability| that counts as the same target, in nats."""
        return max(LEAST_TOLERANCE, 3 * self.noise)

    def differences(self, other: TargetFingerprint, *, noise: float = 0.0) -> list[str]:
        """What differs beyond the noise of both, and beyond `noise` (nats) between them, in words; empty for the same target."""
        if self.prompts_digest != other.prompts_digest:
            return ["the fixed prompts render to other ids: tokenizer or chat template differ"]
        tolerance = max(self.tolerance, other.tolerance, noise)
        pairs = zip(self.entries, other.entries, strict=True)
        return [line for index, (mine, theirs) in enumerate(pairs) if (line := _difference(index, mine, theirs, tolerance))]


def _difference(index: int, mine: FingerprintEntry, theirs: FingerprintEntry, tolerance: float) -> str:
    for step, (a, b) in enumerate(zip(mine.output_ids, theirs.output_ids, strict=False)):
        if a != b:
            gap = mine.logprobs[step] - mine.second_logprobs[step] if step < len(mine.second_logprobs) else 0.0
            if gap <= tolerance:
                return ""  # a near-tie: what follows cannot be compared
            return f"prompt {index} token {step}: {a} here, {b} there, {gap:.3f} nats apart (tolerance {tolerance:.3f})"
        if step < min(len(mine.logprobs), len(theirs.logprobs)):
            delta = abs(mine.logprobs[step] - theirs.logprobs[step])
            if delta > tolerance:
                return f"prompt {index} token {step}: log-probabilities {delta:.3f} nats apart (tolerance {tolerance:.3f})"
    return ""


async def check_served_model(client: SGLangClient, config: ServerConfig, spec: TargetSpec, renderer: Renderer) -> dict[str, Any]:
    """Compare a server with the target before the first prompt; returns its `/model_info`.

    Raises `ConfigError` naming what differs: model, context length, tokenizer, or that it is no SGLang server.
    """
    try:
        model, info = await client.models(), await client.model_info()
        server_ids = await client.tokenize(TOKENIZER_PROBE)
    except RequestRefused as error:
        raise ConfigError(f"{client.url} is no SGLang server that Eyas knows: {error}") from error
    _check_name(client.url, model, info, config, spec)
    context = model.get("max_model_len")
    if isinstance(context, int) and context < spec.context_length:
        raise ConfigError(
            f"{client.url} serves a context of {context} tokens, the target's config says {spec.context_length}; "
            f"set target.context_length to {context} or start the server with --context-length {spec.context_length}"
        )
    own_ids = renderer.encode([TOKENIZER_PROBE])[0]
    if server_ids is None:
        log.warning("no /tokenize url=%s; the tokenizer is checked by the render proof alone", client.url)
    elif server_ids != own_ids:
        raise ConfigError(
            f"{client.url} tokenizes a probe into {len(server_ids)} ids that are not the target's {len(own_ids)}; "
            f"serve the tokenizer of {spec.folder} or set target.model to the served folder"
        )
    return info


def _check_name(url: str, model: dict[str, Any], info: dict[str, Any], config: ServerConfig, spec: TargetSpec) -> None:
    wanted = {config.model.rstrip("/").lower()} if config.model else {str(spec.folder).lower(), spec.folder.name.lower()}
    seen = [str(value).rstrip("/") for value in (info.get("model_path"), info.get("served_model_name"), model.get("id")) if value]
    names = {value.lower() for value in seen} | {value.lower().rsplit("/", 1)[-1] for value in seen}
    if not wanted & names:
        raise ConfigError(
            f"{url} serves {' / '.join(dict.fromkeys(seen)) or 'no named model'}, wanted {config.model or spec.folder}; "
            "start it with that model, or set server.model to the name it serves if that is the same target"
        )


async def take_fingerprint(client: SGLangClient, renderer: Renderer) -> TargetFingerprint:
    """Measure the target behind `client`; raises `ServerError` where it does not answer as the contract says."""
    prompts = [renderer.render([{"role": "user", "content": text}]).input_ids for text in FIXED_PROMPTS]
    half = len(prompts) // 2
    together = await asyncio.gather(*(_greedy(client, ids) for ids in prompts))
    apart = await asyncio.gather(*(_greedy(client, ids) for ids in prompts[:half]))
    apart += await asyncio.gather(*(_greedy(client, ids) for ids in prompts[half:]))
    noise = max(_noise(a, b) for (a, _), (b, _) in zip(together, apart, strict=True))
    return TargetFingerprint(
        prompts_digest=digest_json(prompts),
        entries=[entry for entry, _ in together],
        noise=noise,
        weight_version=together[0][1],
    )


def _noise(a: FingerprintEntry, b: FingerprintEntry) -> float:
    largest = 0.0
    for step, (left, right) in enumerate(zip(a.output_ids, b.output_ids, strict=False)):
        if left != right:  # the noise reaches at least half of the gap that it closed
            return max(largest, (a.logprobs[step] - a.second_logprobs[step]) / 2 if step < len(a.second_logprobs) else 0.0)
        if step < min(len(a.logprobs), len(b.logprobs)):
            largest = max(largest, abs(a.logprobs[step] - b.logprobs[step]))
    return largest


async def _greedy(client: SGLangClient, input_ids: list[int]) -> tuple[FingerprintEntry, str]:
    rid = f"eyas-fingerprint-{uuid.uuid4().hex[:12]}"
    payload = {
        "rid": rid,
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": FINGERPRINT_TOKENS, "temperature": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    body = await client.generate_raw(payload, rid=rid, deadline_s=300.0)
    try:
        value = json.loads(body)
        meta = value["meta_info"]
        if meta["finish_reason"]["type"] not in ("stop", "length"):
            raise ServerError(f"{client.url}/generate rid={rid}: the fingerprint's request ended as {meta['finish_reason']}")
        logprobs = [float(item[0]) for item in meta.get("output_token_logprobs") or []]
        seconds = [min(float(entry[0]) for entry in step) for step in meta.get("output_top_logprobs") or [] if step]
        entry = FingerprintEntry(output_ids=value["output_ids"], logprobs=logprobs, second_logprobs=seconds)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ServerError(f"{client.url}/generate rid={rid}: no reply of the contract ({type(error).__name__}: {error})") from error
    return entry, str(meta.get("weight_version") or "")


async def prove_same_target(client: SGLangClient, renderer: Renderer, path: Path) -> TargetFingerprint:
    """Take the fingerprint behind `client` and compare it with the one at `path`, which the first call writes.

    Raises `ConfigError` listing the differences if the server computes something else than the run's target did.
    """
    taken = await take_fingerprint(client, renderer)
    stored = await asyncio.to_thread(_load_or_store, path, taken)
    differences = stored.differences(taken)
    if differences:
        raise ConfigError(
            f"{client.url} is not the target that this run began with ({path}): {'; '.join(differences[:3])}"
            f"{f' and {len(differences) - 3} more' if len(differences) > 3 else ''}; serve the same weights, precision and "
            "quantisation again, or start a new run"
        )
    return stored


def kept_fingerprint(path: Path) -> TargetFingerprint:
    """The fingerprint that generation left at `path`; raises `ArtifactError` if it is missing or damaged."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing: nothing tells what the target computed at generation; restore it from a copy")
    try:
        return TargetFingerprint.model_validate(read_json(path))
    except ValidationError as error:
        raise ArtifactError(f"{path} is no fingerprint ({error.errors()[0]['msg']}); restore it from a copy") from error


def _load_or_store(path: Path, taken: TargetFingerprint) -> TargetFingerprint:
    if path.is_file():
        return kept_fingerprint(path)
    write_json(path, taken.model_dump())
    return taken
