"""Our source for vLLM against real vLLM: every state equals the target's own, within what bf16 alone changes of it.

On random ids that is up to 0.07 of a state (a lone first token); another block's output is off by 0.3 and more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.hidden.sources.protocol import States
from eyas.hidden.sources.transformers import TransformersSource
from eyas.hidden.sources.vllm import VllmSource, server_flags
from eyas.target.spec import TargetSpec
from tests.engines.conftest import ROOT, engine_python, vllm_server

pytestmark = pytest.mark.engines


def relative_error(ours: torch.Tensor, other: torch.Tensor) -> float:
    return float((ours.float() - other.float()).norm() / other.float().norm())


def parts(states: States) -> list[torch.Tensor]:
    return [states.final, *states.aux.chunk(3, -1)]


def test_vllms_connector_gives_the_states_of_every_token(
    request: pytest.FixtureRequest, logs: Path, target: TargetSpec, tmp_path: Path
) -> None:
    sink = tmp_path / "sink"
    sink.mkdir()
    on_cpu = '"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "hidden_states"'
    flags = [flag.replace('"kv_connector": "ExampleHiddenStatesConnector"', on_cpu) for flag in server_flags(target, sink)]
    sequences = [np.random.default_rng(n).integers(5, 40_000, size).astype(np.int32) for n, size in enumerate((40, 150, 60, 1))]
    python, environment = engine_python(request, "vllm"), {"PYTHONPATH": str(ROOT / "engines/vllm")}
    with vllm_server(python, logs / "vllm-states.log", target.folder, *flags, environment=environment) as url:
        seen = dict(VllmSource([url], sink=sink, spec=target, concurrency=3).extract(sequences))
    assert list(sink.iterdir()) == []
    own, rounded = (
        dict(TransformersSource(target, dtype=dtype, batch_tokens=512).extract(sequences)) for dtype in ("float32", "bfloat16")
    )
    for index in own:
        for ours, wanted, in_bf16 in zip(parts(seen[index]), parts(own[index]), parts(rounded[index]), strict=True):
            assert ours.shape == wanted.shape
            assert relative_error(ours, wanted) < 2 * relative_error(in_bf16, wanted) + 0.01
