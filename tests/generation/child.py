"""A process that generates; tests kill it. `python -m tests.generation.child RUN CONFIG_JSON URL…`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from eyas.config import RunConfig
from eyas.generation.session import generate
from eyas.target.lightly import leave_torch_out
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

if __name__ == "__main__":
    config = RunConfig.model_validate_json(Path(sys.argv[2]).read_text())
    leave_torch_out(load_target(config.target))  # as `eyas generate` does; it also starts in a fifth of the time
    asyncio.run(generate(RunFolder(Path(sys.argv[1])), config, urls=sys.argv[3:]))
