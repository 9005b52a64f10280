"""A tiny Llama (H 32, 8 blocks, V 261) and runs with replies that it really decoded greedily."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, LlamaForCausalLM

from eyas.config import RunConfig
from eyas.workspace import RunFolder
from tests.merging.responses import VOCAB_SIZE, Responses, make_row

HIDDEN_SIZE = 32


def build_weights(folder: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.3  # sharp enough that greedy choices are no near-ties
    model = LlamaForCausalLM(config).float()
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 3.0)  # otherwise leaving the norm out changes no argmax
    model.save_pretrained(folder)
    return folder


@lru_cache(maxsize=1)
def load_plain(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, load_plain(folder)(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


@torch.inference_mode()
def plain_states(folder: Path, ids: list[int], blocks: tuple[int, int, int] = (1, 3, 4)) -> tuple[torch.Tensor, torch.Tensor]:
    """(aux [T, 3H], final [T, H]) by transformers' own `output_hidden_states`, one sequence, no batch, no hook.

    Outputs of blocks 1, n//2 - 1, n - 4 of n = 8, unless other ones are wanted.
    """
    output = load_plain(folder).model(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([output.hidden_states[block + 1][0] for block in blocks], -1), output.last_hidden_state[0]


class TinyRun(Responses):
    """Responses of the tiny target: greedy ones, or random ids where nobody asks who chose them."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root, self.target, self.run = root, target, RunFolder(root / "run")

    def write_greedy(self, dataset: str, count: int, generated: int = 12) -> list[dict[str, Any]]:
        rows = []
        for number in range(count):
            prompt = np.random.default_rng(number).integers(5, VOCAB_SIZE, 4 + number % 3).tolist()
            rows.append(
                make_row(number, dataset, prompt=len(prompt), generated=generated, input_ids=greedy(self.target, prompt, generated))
            )
        self.write(dataset, rows)
        return rows

    def write_random(self, dataset: str, count: int, longest: int = 60) -> list[dict[str, Any]]:
        rows = [make_row(number, dataset, generated=3 + 7 * number % longest) for number in range(count)]
        self.write(dataset, rows)
        return rows

    def hidden_config(self, *datasets: str, **hidden: Any) -> RunConfig:
        settings = {"dtype": "float32", "probe_records": 0, "batch_tokens": 128, "disk_reserve_bytes": 0, "threads": 1, **hidden}
        return self.config(*datasets, hidden=settings, generation={"sampling": {"temperature": 0.0}})
