"""States from a causal language model run here by transformers: hooks on three blocks, no generation head.

Sequences go in batches of near-equal lengths, padded on the right: under causal attention no real position
sees padding, so no mask is needed and the fastest attention kernel is taken. Costs the bare forward pass
plus about one per cent for copying the states out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from eyas.errors import ConfigError
from eyas.hidden.batching import length_buckets
from eyas.hidden.sources.protocol import States, TokenIds
from eyas.target.spec import TargetSpec, check_remote_code

_LOADED: dict[tuple[str, str, int, int], TransformersSource] = {}
_LOADING = threading.Lock()


class TransformersSource:
    """A target held in memory; one batch at a time, whichever thread asks."""

    def __init__(self, spec: TargetSpec, *, dtype: str, batch_tokens: int, threads: int = 0) -> None:
        self.spec = spec
        self._batch_tokens = batch_tokens
        self._lock = threading.Lock()
        if not torch.cuda.is_available():
            torch.set_num_threads(threads or os.cpu_count() or 1)
        self.model = load_model(spec, dtype)
        self.decoder: torch.nn.Module = self.model.get_decoder()  # type: ignore[no-untyped-call]
        self._blocks = [_blocks_of(self.decoder, spec)[block] for block in spec.aux_blocks]

    def extract(self, sequences: Sequence[TokenIds]) -> Iterator[tuple[int, States]]:
        """See `Source`."""
        for batch in length_buckets([len(sequence) for sequence in sequences], self._batch_tokens):
            yield from zip(batch, self._states([sequences[index] for index in batch]), strict=True)

    def plain_forward(self, tokens: TokenIds) -> list[torch.Tensor]:
        """What the probe compares with: the n + 1 hidden states [T, H] of transformers' own plain forward, no hook, no batch."""
        with self._lock, torch.inference_mode():
            ids = torch.from_numpy(tokens).long()[None].to(self.model.device)
            output = self.decoder(input_ids=ids, use_cache=False, output_hidden_states=True, return_dict=True)
            return [states[0].cpu() for states in output.hidden_states]

    def _states(self, sequences: list[TokenIds]) -> list[States]:
        with self._lock, torch.inference_mode():
            aux, final = self._forward(_padded(sequences).to(self.model.device))
            return [
                States(
                    aux=torch.cat([states[row, : len(sequence)].to("cpu", torch.bfloat16) for states in aux], dim=-1),
                    final=final[row, : len(sequence)].to("cpu", torch.bfloat16, copy=True),
                )
                for row, sequence in enumerate(sequences)
            ]

    def _forward(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(outputs of the three blocks, state after the final norm), each [B, T, H], of ids [B, T]."""
        captured: dict[int, torch.Tensor] = {}
        handles = [block.register_forward_hook(partial(_capture, captured, slot)) for slot, block in enumerate(self._blocks)]
        try:
            final = self.decoder(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        return [captured[slot] for slot in range(len(self._blocks))], final


def shared_source(spec: TargetSpec, *, dtype: str, batch_tokens: int, threads: int) -> TransformersSource:
    """The source of this process, kept between shards so that the weights are loaded once; another target replaces it."""
    key = (spec.fingerprint, dtype, batch_tokens, threads)
    with _LOADING:
        if key not in _LOADED:
            _LOADED.clear()
            _LOADED[key] = TransformersSource(spec, dtype=dtype, batch_tokens=batch_tokens, threads=threads)
        return _LOADED[key]


def load_model(spec: TargetSpec, dtype: str) -> PreTrainedModel:
    """Load a target for inference, over every GPU if there are any; raises `ConfigError` if transformers cannot."""
    check_remote_code(spec.folder, spec.remote_code_sha256)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            spec.folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=bool(spec.remote_code_sha256),
            **options,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"target {spec.folder} cannot be loaded by transformers ({' '.join(str(error).split())[:200]}); "
            "set hidden.source to sglang, or choose another target"
        ) from error
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _blocks_of(decoder: torch.nn.Module, spec: TargetSpec) -> torch.nn.ModuleList:
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == spec.num_layers]
    if not lists:
        raise ConfigError(
            f"target {spec.folder} ({spec.architecture}) shows no list of {spec.num_layers} blocks to hook; "
            "set hidden.source to sglang, or choose another target"
        )
    return lists[0]


def _capture(captured: dict[int, torch.Tensor], slot: int, module: torch.nn.Module, inputs: Any, output: Any) -> None:
    captured[slot] = output[0] if isinstance(output, tuple) else output


def _padded(sequences: list[TokenIds]) -> torch.Tensor:
    """[B, longest] int64; what fills up the right end is never seen by a real position."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(sequence).long() for sequence in sequences], batch_first=True)
