"""Runs inside SGLang's scheduler for `benchmarks.capture`: keeps the states that generation itself computes.

Of requests whose id starts with `capture-` it collects the prefill's rows and one row a decoding step, aux from
`hidden_states` and the input of lm_head from `last_hidden_states`, and writes them when the request ends: T − 1 rows,
since the last token never goes through the target. SGLang's own way, a list of JSON numbers, is left out for them.
Written for SGLang 0.5.23 with the overlap scheduler off: it copies `hidden_states` to the host, `last_hidden_states` not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eyas.hidden.sources.sglang_plugin import write_states

FOLDER_VARIABLE = "EYAS_CAPTURE_FOLDER"
RID_PREFIX = "capture-"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
_rows: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}


def register() -> None:
    """Called by SGLang in each of its processes when it loads plugins."""
    if not os.environ.get(FOLDER_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    Path(os.environ[FOLDER_VARIABLE]).mkdir(parents=True, exist_ok=True)
    for name, hook in (
        ("_append_prefill_hidden_states", _prefill),
        ("_append_decode_hidden_states", _no_json),
        ("process_batch_result_decode", _decode),
    ):
        HookRegistry.register(_PROCESSOR + name, hook, HookType.AROUND)


def _is_ours(request: Any) -> bool:
    return str(request.rid).startswith(RID_PREFIX)


def _prefill(original: Callable[..., int], owner: Any, **named: Any) -> int:
    if not _is_ours(named["req"]):
        return original(owner, **named)
    start, output = int(named["hidden_state_offset"]), named["logits_output"]
    end = start + int(named["extend_input_len"])
    _rows[named["req"].rid] = [(output.hidden_states[start:end].clone(), output.last_hidden_states[start:end].clone())]
    return end


def _no_json(original: Callable[..., None], **named: Any) -> None:
    if not _is_ours(named["req"]):
        original(**named)


def _decode(original: Callable[..., None], owner: Any, batch: Any, result: Any) -> None:
    output = result.logits_output
    ours = [(row, request) for row, request in enumerate(batch.reqs) if _is_ours(request) and request.rid in _rows]
    for row, request in ours:
        part = slice(row, row + 1)
        _rows[request.rid].append((output.hidden_states[part].clone(), output.last_hidden_states[part].clone()))
    original(owner, batch, result)
    for _, request in ours:
        if request.finished():
            aux, final = (torch.cat(parts) for parts in zip(*_rows.pop(request.rid), strict=True))
            write_states(Path(os.environ[FOLDER_VARIABLE]), str(request.rid), aux, final)
