"""The three states a draft reads, as real SGLang gives them, against the target in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from eyas.speculate.lossless import load_judge
from eyas.target.spec import TargetSpec
from tests.engines.conftest import sglang_server

pytestmark = pytest.mark.engines

IDS = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
    198,
    1,
    520,
    9531,
    198,
]
MODES = {
    "aux": ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"],
    "final": ["--enable-return-hidden-states"],
}


def states(url: str) -> torch.Tensor:
    sampling = {"max_new_tokens": 1, "temperature": 0}
    payload = {"input_ids": IDS, "sampling_params": sampling, "return_hidden_states": True}
    reply: dict[str, Any] = httpx.post(f"{url}/generate", json=payload, timeout=240, trust_env=False).json()
    return torch.tensor(reply["meta_info"]["hidden_states"][0])  # [T, 3H] or [T, H]


@pytest.mark.parametrize("mode", sorted(MODES))
def test_states_equal_the_targets_own_within_bf16(sglang_python: Path, logs: Path, target: TargetSpec, mode: str) -> None:
    """Aux: outputs of blocks (1, n//2 − 1, n − 4). Final: the input of lm_head, after the norm."""
    flags = [*MODES[mode], "--disable-radix-cache", "--chunked-prefill-size", "-1"]
    with sglang_server(sglang_python, logs / f"sglang-{mode}.log", target.folder, *flags) as url:
        seen = states(url)
    with torch.inference_mode():
        own = load_judge(target, "float32")(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
    wanted = torch.cat([own[block + 1][0] for block in target.aux_blocks], -1) if mode == "aux" else own[-1][0]
    assert seen.shape == wanted.shape
    for part_seen, part in zip(seen.split(target.hidden_size, -1), wanted.split(target.hidden_size, -1), strict=True):
        assert ((part_seen - part).norm() / part.norm()).item() < 0.03
