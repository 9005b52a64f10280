"""The views of the metrics: TensorBoard's own reader finds them, a resumed run replaces what was cut, absence is said plainly."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas.draft.config import DraftConfig
from eyas.draft.metrics import METRICS, Metrics, Window
from eyas.errors import ConfigError

ROW = {
    "kind": "heldout",
    "epoch": 1,
    "seconds": 2.5,
    "accept_length": 2.25,
    "step_accuracy": [0.5, 0.25],
    "per_dataset": {"B1": {"accept_length": 3.0}},
    "is_best": True,
}


def test_tensorboard_reads_what_was_written_and_a_resumed_run_replaces_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = DraftConfig(tensorboard=True)
    first = Metrics(tmp_path, config, 0)
    for step in (1, 2, 3):
        first.write({**ROW, "step": step})
    first.close()
    second = Metrics(tmp_path, config, 2)  # the third step was not saved
    second.write({**ROW, "step": 3, "accept_length": 9.0})
    second.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    lengths = {item.step: item.value for item in found.Scalars("heldout/accept_length")}
    assert lengths == {1: 2.25, 2: 2.25, 3: 9.0}
    assert found.Scalars("heldout/step_accuracy/1")[0].value == 0.25
    assert found.Scalars("heldout/per_dataset/B1/accept_length")[0].value == 3.0
    assert (tmp_path / METRICS).read_bytes().count(b"\n") == 3


def test_weights_and_biases_gets_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[dict, int]] = []
    run = SimpleNamespace(log=lambda figures, step: seen.append((figures, step)), finish=lambda: seen.append(({}, -1)))
    started: dict = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **values: started.update(values) or run))
    (tmp_path / "mine" / "draft").mkdir(parents=True)
    metrics = Metrics(tmp_path / "mine" / "draft", DraftConfig(wandb_project="drafts"), 0)
    metrics.write({**ROW, "step": 7})
    metrics.close()
    assert (started["project"], started["name"], started["resume"]) == ("drafts", "mine", "allow")
    assert seen[0][1] == 7
    assert seen[0][0]["heldout/accept_length"] == 2.25
    assert seen[-1][1] == -1


@pytest.mark.parametrize(
    ("package", "settings"), [("torch.utils.tensorboard", {"tensorboard": True}), ("wandb", {"wandb_project": "drafts"})]
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, settings: dict
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'eyas\["):
        Metrics(tmp_path, DraftConfig(**settings), 0)


def test_figures_are_weighted_by_rows_and_not_by_steps() -> None:
    window = Window()
    for loss, kept, hits in ((4.0, 1, 1), (1.0, 3, 0)):
        window.add(
            {
                "loss": loss,
                "step_loss": torch.tensor([loss * kept]),
                "kept": torch.tensor([kept]),
                "supervised": torch.tensor([kept + 1.0]),
                "hits": torch.tensor([float(hits)]),
                "grad_norm": loss,
                "learning_rate": 1e-3,
                "positions": 10,
                "seconds": 0.5,
            }
        )
    figures = window.figures()
    assert figures["step_loss"] == [(4 + 3) / 4]
    assert figures["step_accuracy"] == [pytest.approx(1 / 6, abs=1e-5)]
    assert (figures["loss"], figures["grad_norm"], figures["dropped"], figures["positions_per_s"]) == (2.5, 2.5, 2, 20.0)
