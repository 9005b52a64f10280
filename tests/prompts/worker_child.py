"""A process that prepares prompts with a number of workers: `python -m tests.prompts.worker_child CONFIG RUN WORKERS`.

Prints the largest memory it had, in bytes.
"""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eyas.config import RunConfig
from eyas.prompts.prepare import prepare_candidates, select_prompts
from eyas.target.lightly import leave_torch_out
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

if __name__ == "__main__":
    config, run = RunConfig.model_validate_json(Path(sys.argv[1]).read_text()), RunFolder(Path(sys.argv[2]))
    leave_torch_out(load_target(config.target))  # as `eyas prepare` does
    with ThreadPoolExecutor(max_workers=int(sys.argv[3])) as pool:
        list(pool.map(lambda dataset: prepare_candidates(run, config, dataset.name), config.prompts.datasets))
    select_prompts(run, config)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
