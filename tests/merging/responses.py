"""A run with responses of a tiny target (vocabulary 261), written as generation writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from eyas.config import RunConfig
from eyas.manifest import Counts, Manifest, file_entries
from eyas.workspace import RunFolder
from tests.sglang.tiny import build_target

VOCAB_SIZE = 261


def make_row(number: int, dataset: str = "a", *, prompt: int = 6, generated: int = 20, **changes: Any) -> dict[str, Any]:
    """One row whose ids follow from its number alone."""
    rng = np.random.default_rng(number)
    ids = rng.integers(5, VOCAB_SIZE, prompt + generated).tolist()
    return {
        "id": hashlib.blake2b(f"{dataset}{number}".encode(), digest_size=16).hexdigest(),
        "dataset": dataset,
        "split": "heldout" if number % 10 == 0 else "train",
        "input_ids": ids,
        "loss_mask": [0] * prompt + [1] * generated,
        "prompt_tokens": prompt,
        "finish_reason": "stop",
        "spans": {"reasoning": None, "answer": [prompt, prompt + generated], "tool_calls": None},
        **changes,
    }


class Responses:
    """Builds `responses/<dataset>` under one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = RunFolder(root / "run")
        self.target = build_target(root / "target")

    def write(self, dataset: str, rows: list[dict[str, Any]] | list[bytes], *, pending: int = 0) -> None:
        lines = [
            row if isinstance(row, bytes) else json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode() for row in rows
        ]
        self.write_bytes(dataset, b"".join(line + b"\n" for line in lines), len(lines), pending=pending)

    def write_bytes(self, dataset: str, content: bytes, done: int, *, pending: int = 0) -> None:
        folder = self.run.responses(dataset)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenized_data.jsonl").write_bytes(content)
        Manifest(
            stage="generate",
            stage_version=1,
            name=dataset,
            fingerprint=hashlib.sha256(content).hexdigest(),
            counts=Counts.of(done=done, pending=pending),
            files=file_entries(folder, ["tokenized_data.jsonl"]),
        ).write(folder)

    def config(self, *datasets: str, **sections: dict[str, Any]) -> RunConfig:
        raw = {
            "target": {"model": str(self.target)},
            "prompts": {"datasets": [{"name": name, "source": "file:x"} for name in datasets or ("a",)]},
            **sections,
        }
        raw["merging"] = {"draft_vocab_size": 64, "reject_limit": 1.0, **sections.get("merging", {})}
        return RunConfig.model_validate(raw)
