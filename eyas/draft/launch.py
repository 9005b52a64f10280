"""Starts the processes of a training on this host through torch's own elastic launcher, and ends with them.

Every host of a training runs the same command; they meet at `draft.rendezvous`. The processes belong to
this one's group and die with it; a signal is passed on, so that they save. Under `torchrun` or `deepspeed`,
which start the processes themselves, this is not used.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from eyas.draft.config import DraftConfig

SAVE_S = 120
"""Seconds that processes get to save once they are told to stop."""
INTERRUPTED = 130


def launch(run: Path, config: DraftConfig, entry: Callable[[str], None]) -> int:
    """Train `run` in `config.processes` processes, each of which calls `entry(run)`, a function that can be pickled.

    Returns the exit code of the first that failed, or 0.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=config.hosts,
        max_nodes=config.hosts,
        nproc_per_node=config.processes,
        run_id=f"eyas-{hashlib.sha256(run.name.encode()).hexdigest()[:12]}",
        rdzv_backend="c10d",
        rdzv_endpoint=config.rendezvous or "localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=SAVE_S,
    )
    try:
        elastic_launch(settings, entry)(str(run))
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"process {rank} of the training was killed by signal {-failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0
