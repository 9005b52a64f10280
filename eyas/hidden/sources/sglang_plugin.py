"""Runs inside SGLang's scheduler: writes aux and final states of our requests to files, no JSON, no pickle.

An entry point of the group `sglang.srt.plugins`; inert unless EYAS_STATES_FOLDER names a folder that the
extractor sees too (shared memory or a fast disk). Of every request whose id starts with `eyas-`
the first tensor-parallel rank writes `<rid>.safetensors` (bf16 `aux` [T, 3H], `final` [T, H]) under a temporary
name and renames it, before the HTTP reply that acknowledges it. Written for SGLang 0.5.23, in aux mode:
`--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --disable-radix-cache --chunked-prefill-size -1`.
Imports of this file must be those of SGLang's own environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER_VARIABLE = "EYAS_STATES_FOLDER"
RID_PREFIX = "eyas-"
HOOKED = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._append_prefill_hidden_states"
)


def register() -> None:
    """Called by SGLang in each of its processes when it loads plugins."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    Path(folder).mkdir(parents=True, exist_ok=True)
    HookRegistry.register(HOOKED, partial(capture, Path(folder)), HookType.AROUND)


def capture(folder: Path, original: Callable[..., int], owner: Any, **named: Any) -> int:
    """In place of `_append_prefill_hidden_states`: our requests' rows go to a file, everybody else's take the usual way."""
    request = named["req"]
    if not str(request.rid).startswith(RID_PREFIX) or not named["capture_hidden_mode"].is_full():
        return original(owner, **named)
    start = int(named["hidden_state_offset"])
    end = start + int(named["extend_input_len"])
    if named.get("store", True) and _is_first_rank(owner):
        output = named["logits_output"]
        write_states(folder, str(request.rid), output.hidden_states[start:end], output.last_hidden_states[start:end])
    return end


def write_states(folder: Path, rid: str, aux: torch.Tensor, final: torch.Tensor) -> None:
    """Write one request's states, whole or not at all; a chunked prefill's later parts are told apart by number."""
    part = 0
    while (path := folder / f"{rid}.{part}.safetensors").exists():
        part += 1
    temporary = path.with_suffix(".tmp")
    tensors = {"aux": aux, "final": final}
    save_file({name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}, temporary)
    os.replace(temporary, path)


def _is_first_rank(owner: Any) -> bool:
    worker = getattr(owner, "model_worker", None)
    return int(getattr(worker, "tp_rank", 0) or 0) == 0
