"""The processes that train together: who this one is, and the few sums and messages they exchange.

One process alone needs no process group; every exchange then gives back what it was given. Several are
started by `launch.py`, `torchrun` or the `deepspeed` launcher, all of which name rank and world in the
environment as torch's `env://` reads it. The first process decides and writes; the others follow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eyas.errors import ConfigError, EyasError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)
"""The longest one process may work alone (the solved start reads 32,768 columns) before the others give up."""


@dataclass(frozen=True, kw_only=True)
class World:
    """`rank` of `size` processes, of which `local_size` share this host; tensors live on `device`."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Every process's `value`, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def same(self, make: Callable[[], T]) -> T:
        """What `make` gives the first process, or the `EyasError` that it raises there, for all."""
        if self.size == 1:
            return make()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = make()
            except EyasError as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0, device=self.device)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of the first process, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor


def own_device(local_rank: int = 0) -> torch.device:
    """The GPU of this process where there is one, else the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def joined(environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """Join the processes that a launcher started (NCCL between GPUs, Gloo between CPUs), or stand alone.

    Raises `ConfigError` where a host has fewer GPUs than processes.
    """
    if "RANK" not in environment:
        yield World(device=own_device())
        return
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_size = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or "1")
    if torch.cuda.is_available():
        if torch.cuda.device_count() <= local_rank:
            raise ConfigError(
                f"process {local_rank} of this host has no GPU, torch sees {torch.cuda.device_count()}; lower draft.processes"
            )
        torch.cuda.set_device(local_rank)
    device = own_device(local_rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), local_size=local_size, device=device)
    finally:
        dist.destroy_process_group()
