"""A benchmark of a run folder in a process of its own, to be killed: `python -m tests.speculate.benchmark_child RUN`."""

from __future__ import annotations

import sys
from pathlib import Path

from eyas.config import parse_config
from eyas.files import read_json
from eyas.speculate.benchmark import benchmark
from eyas.workspace import RunFolder

if __name__ == "__main__":
    run = RunFolder(Path(sys.argv[1]))
    benchmark(run, parse_config(read_json(run.run_json)["config"], where="run.json"))
