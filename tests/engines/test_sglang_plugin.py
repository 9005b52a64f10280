"""Our plugin inside real SGLang: one request gives both states, equal to its HTTP path and to the target's own.

Equal within what bf16 alone changes of the target's states, measured beside; on random ids that is up to 0.1 of a state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.hidden.sources.protocol import States
from eyas.hidden.sources.sglang import AUX_FLAGS, SglangSource
from eyas.hidden.sources.sglang_plugin import FOLDER_VARIABLE
from eyas.hidden.sources.transformers import TransformersSource
from eyas.target.spec import TargetSpec
from tests.engines.conftest import ROOT, sglang_server

pytestmark = pytest.mark.engines


def install_entry_point(folder: Path) -> None:
    """What installing Eyas beside SGLang gives: the entry point, found through a folder on the path."""
    metadata = folder / "eyas_states-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eyas-states\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\neyas_states = eyas.hidden.sources.sglang_plugin:register\n")


def relative_error(ours: torch.Tensor, other: torch.Tensor) -> float:
    return float((ours.float() - other.float()).norm() / other.float().norm())


def parts(states: States) -> list[torch.Tensor]:
    return [states.final, *states.aux.chunk(3, -1)]


def test_the_plugin_gives_both_states_of_every_token(sglang_python: Path, logs: Path, target: TargetSpec, tmp_path: Path) -> None:
    sink = tmp_path / "sink"
    install_entry_point(tmp_path / "site")
    environment = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", FOLDER_VARIABLE: str(sink)}
    sequences = [np.random.default_rng(n).integers(5, 40_000, size).astype(np.int32) for n, size in enumerate((40, 150, 60))]
    with sglang_server(
        sglang_python, logs / "sglang-plugin.log", target.folder, *AUX_FLAGS.split(), environment=environment
    ) as url:
        source = SglangSource([url], final_urls=[], sink=sink, spec=target, concurrency=3)
        seen = dict(source.extract(sequences))
        alone = source._rows(source._post(url, "over-http", sequences[0]), url, 3 * target.hidden_size)
    own, rounded = (
        dict(TransformersSource(target, dtype=dtype, batch_tokens=2048, threads=1).extract(sequences))
        for dtype in ("float32", "bfloat16")
    )
    torch.testing.assert_close(seen[0].aux, alone, rtol=0.02, atol=0.02)
    for index, sequence in enumerate(sequences):
        assert len(seen[index].aux) == len(seen[index].final) == len(sequence)
        for ours, wanted, in_bf16 in zip(parts(seen[index]), parts(own[index]), parts(rounded[index]), strict=True):
            assert relative_error(ours, wanted) < 2 * relative_error(in_bf16, wanted) + 0.01
    assert list(sink.iterdir()) == []
