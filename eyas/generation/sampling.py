"""The sampling parameters of every request, resolved once and always sent explicitly.

`/generate` ignores the model's generation_config.json (its defaults are temperature 1.0 and 128 tokens), so
what our config leaves open comes from the target's recommendation here. A record's seed depends on the run's
seed and its id alone: sampled again after a crash, it is sampled alike.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from eyas.errors import ConfigError, RecordError
from eyas.generation.config import GenerationConfig
from eyas.target.spec import TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def resolve_sampling(config: GenerationConfig, spec: TargetSpec) -> dict[str, Any]:
    """Sampling parameters of the run without the per-record ones (`max_new_tokens`, `sampling_seed`)."""
    wanted, advised = config.sampling, spec.generation_defaults
    is_greedy = advised.get("do_sample") is False
    temperature = wanted.temperature
    if temperature < 0:
        temperature = 0.0 if is_greedy else float(advised.get("temperature") or 1.0)
    top_p = wanted.top_p or float(advised.get("top_p") or 1.0)
    top_k = wanted.top_k or int(advised.get("top_k") or -1)
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k if top_k > 0 else -1,
        "min_p": wanted.min_p,
        "repetition_penalty": wanted.repetition_penalty,
        "stop_token_ids": sorted({*wanted.stop_token_ids, *spec.eos_token_ids}),  # at the latter a server stops unasked
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def check_stop_tokens(config: GenerationConfig, spec: TargetSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` if a configured stop token is none of the tokenizer's: no reply would ever stop at it.

    The model's vocabulary is no measure: it is often padded with rows that stand for no token.
    """
    wanted = config.sampling.stop_token_ids
    known = set(tokenizer.get_vocab().values()) if wanted else set()
    if strange := [token for token in wanted if token not in known]:
        raise ConfigError(
            f"generation.sampling.stop_token_ids holds {strange[0]}, the tokenizer of target {spec.folder} knows "
            f"{len(known)} tokens up to {max(known)} and not this one; correct it, or the target's own end "
            f"tokens stop a reply anyway: {spec.eos_token_ids}"
        )


def record_sampling(sampling: dict[str, Any], split: str, *, max_new_tokens: int, seed: int) -> dict[str, Any]:
    """What one record sends: the run's `sampling`, its cap and its seed; held-out records are greedy.

    Acceptance is predicted by a replay of the served chain, which at temperature 0 takes greedy replies only.
    """
    greedy = {"temperature": 0.0} if split == "heldout" else {}
    return {**sampling, **greedy, "max_new_tokens": max_new_tokens, "sampling_seed": seed}


def record_seed(seed: int, record_id: str) -> int:
    """The 31-bit sampling seed of one record."""
    digest = hashlib.blake2b(f"{seed}:{record_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def clamp_new_tokens(asked: int, num_prompt_tokens: int, config: GenerationConfig, spec: TargetSpec) -> int:
    """min(asked, the config's cap, what the context leaves); raises `RecordError("no_room")` below the floor.

    Two tokens of margin: SGLang cuts a reply at prompt + new = context - 2, whatever was asked for.
    """
    cap = min(asked, config.max_new_tokens) if config.max_new_tokens else asked
    room = spec.context_length - num_prompt_tokens - 2
    if room < min(cap, config.min_new_tokens_room):
        raise RecordError(
            "no_room",
            f"the prompt has {num_prompt_tokens} tokens, a context of {spec.context_length} leaves {room}, "
            f"wanted at least {config.min_new_tokens_room}",
        )
    return min(cap, room)
