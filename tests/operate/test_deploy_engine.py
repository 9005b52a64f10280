"""Benchmark and deployment on Eyas' own engine, whole: a right draft serves, a broken one is rolled back to the target alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from eyas.operate.deploy import deploy
from eyas.operate.hosts import Draft, EmbeddedHost
from eyas.speculate.benchmark import benchmark
from tests.speculate.conftest import model
from tests.speculate.fitted_run import fitted_run, keep_fingerprint

__all__ = ["model"]  # a fixture


class Stale(EmbeddedHost):
    """A host whose server has loaded other weights than now lie in the draft's folder."""

    def enter(self, mode: Any, *, draft: Draft | None = None, alone: bool = False) -> list[str]:
        if draft is None:
            return super().enter(mode, draft=draft, alone=alone)
        path = draft.folder / "model.safetensors"
        right = path.read_bytes()
        tensors = load_file(path)
        save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(7, 0)}, path)
        try:
            return super().enter(mode, draft=draft, alone=alone)
        finally:
            path.write_bytes(right)


@pytest.mark.soak
def test_a_right_draft_serves_and_a_broken_one_is_rolled_back(model: Any, tmp_path: Path) -> None:
    run, config = fitted_run(model, tmp_path)
    with EmbeddedHost(run, config).serving("generate") as urls:
        keep_fingerprint(run, config, urls[0])
    benchmark(run, config)
    for host, serves in ((EmbeddedHost(run, config), True), (Stale(run, config), False)):
        try:
            decision = deploy(run, config, host, say=lambda _: None)
            assert host._engine is not None
            info = httpx.get(f"{host._engine.url}/server_info").json()
        finally:
            host.enter("none")
        assert decision.serves_draft == serves
        assert info["speculative_algorithm"] == ("EAGLE3" if serves else None), "the host is left serving as decided"
    record = json.loads((run.benchmark / "deployment.json").read_text())
    assert record["outcome"] == "rolled back: serving the target without draft"
    assert "accept length: 1." in record["reason"]
    assert "prediction: served 1." in record["reason"]
