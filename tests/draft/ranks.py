"""Trainings in several processes on Gloo, forked from one server that has imported torch and DeepSpeed already."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import traceback
from multiprocessing.queues import Queue
from pathlib import Path

from eyas.config import RunConfig
from eyas.draft.metrics import METRICS
from eyas.draft.train import train
from eyas.draft.world import joined
from eyas.errors import EyasError
from eyas.workspace import RunFolder

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "deepspeed", "tests.draft.ranks"])
TIMEOUT_S = 1200.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def train_in_ranks(
    run: RunFolder, config: RunConfig, size: int, *, stop_after: int | None = None, spoil_rank: int = -1
) -> list[str]:
    """Train `run` in `size` processes; per rank "" or what it raised. `spoil_rank` makes its loss nan at step 3."""
    answers: Queue[tuple[int, str]] = _CONTEXT.Queue()
    same = (size, free_port(), str(run.root), config.model_dump(mode="json"), stop_after, spoil_rank, answers)
    processes = [_CONTEXT.Process(target=_rank, args=(rank, *same), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=TIMEOUT_S) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [found[rank] for rank in range(size)]


def _rank(rank: int, size: int, port: int, root: str, raw: dict, stop_after: int | None, spoil_rank: int, answers: Queue) -> None:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()} | {"MASTER_ADDR": "127.0.0.1"})
    asked = iter(range(10**9))
    if rank == spoil_rank:
        _spoil()
    try:
        with joined() as world:
            train(
                RunFolder(Path(root)),
                RunConfig.model_validate(raw),
                should_stop=lambda: stop_after is not None and rank == size - 1 and next(asked) >= stop_after,
                world=world,
            )
    except EyasError as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    else:
        answers.put((rank, ""))


def _spoil() -> None:
    from eyas.draft.trainer import Trainer

    original = Trainer._loss

    def spoilt(self: Trainer, *args: object) -> object:
        result = original(self, *args)
        if self.state.step == 3:
            result.loss.data.fill_(float("nan"))
        return result

    Trainer._loss = spoilt  # type: ignore[method-assign]


def curve(run: RunFolder) -> list[list[float]]:
    """Per line of the metrics what must not depend on the number of processes."""
    rows = [json.loads(line) for line in (run.draft / METRICS).read_bytes().splitlines()]
    return [
        [row["step"], row["loss"], *row["step_loss"], row["grad_norm"], row["supervised"], row["dropped"]]
        if row["kind"] == "train"
        else [row["step"], row["accept_length"], row["verifications"], row["accepted"]]
        for row in rows
    ]
