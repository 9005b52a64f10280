"""What every dataset's preparation needs, loaded once: renderer, template traits, benchmark n-grams, limits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.files import digest_json
from eyas.prompts.benchsets import benchmark_identity
from eyas.prompts.config import PromptsConfig
from eyas.prompts.contamination import Contamination, load_contamination
from eyas.target.probe import TemplateTraits, probe_template
from eyas.target.rendering import Renderer
from eyas.target.spec import TargetSpec, load_target
from eyas.target.tokenizer import load_tokenizer

CONTEXT_MARGIN = 8
"""Tokens of context that neither prompt nor response may take: engines differ by a few at the very end."""

_LOADING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that turns rows of any dataset into candidates: the target's renderer and the selection's rules."""

    renderer: Renderer
    traits: TemplateTraits
    contamination: Contamination
    config: PromptsConfig

    @property
    def max_prompt_tokens(self) -> int:
        return longest_prompt(self.renderer.spec, self.config)


def longest_prompt(spec: TargetSpec, config: PromptsConfig) -> int:
    """Tokens that a prompt may have; raises `ConfigError` where the context leaves room for none."""
    room = spec.context_length - config.min_response_room - CONTEXT_MARGIN
    if room < 1:
        raise ConfigError(
            f"the target's context of {spec.context_length} tokens leaves no room for a prompt beside prompts.min_response_room = "
            f"{config.min_response_room} and a margin of {CONTEXT_MARGIN}; lower it, or raise target.context_length"
        )
    return min(config.max_prompt_tokens or room, room)


def load_preparation(config: RunConfig) -> Preparation:
    """The target's renderer, its template's traits and the benchmark n-grams; kept for the next dataset of the same run.

    Raises `ConfigError` where the target, its template or a benchmark set is not usable.
    """
    spec = load_target(config.target)
    key = config.model_dump_json(include={"target", "prompts"})
    with _LOADING:  # datasets may be prepared in several threads
        return _load_preparation(key, spec.tokenizer_fingerprint, digest_json(benchmark_digests(config.prompts)))


def benchmark_digests(config: PromptsConfig) -> dict[str, str]:
    """Digest of each benchmark set that prompts are decontaminated against; raises `ConfigError` where one is missing."""
    return {name: digest_json(benchmark_identity(name)) for name in config.decontaminate_against}


@lru_cache(maxsize=1)
def _load_preparation(config_json: str, tokenizer_fingerprint: str, benchmarks_digest: str) -> Preparation:
    config = RunConfig.model_validate_json(config_json)
    spec = load_target(config.target)
    renderer = Renderer(spec, load_tokenizer(spec), config.target)
    longest_prompt(spec, config.prompts)
    return Preparation(
        renderer=renderer,
        traits=probe_template(renderer),
        contamination=load_contamination(config.prompts.decontaminate_against, config.prompts.contamination_ngram),
        config=config.prompts,
    )
