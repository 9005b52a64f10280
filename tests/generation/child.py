"""A process that generates; tests kill it. `python -m tests.generation.child RUN CONFIG_JSON URL…`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from eyas.config import RunConfig
from eyas.generation.session import generate
from eyas.workspace import RunFolder

if __name__ == "__main__":
    config = RunConfig.model_validate_json(Path(sys.argv[2]).read_text())
    asyncio.run(generate(RunFolder(Path(sys.argv[1])), config, urls=sys.argv[3:]))
