"""A process that only renders loads no torch; one that may need it keeps it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eyas.files import digest_file
from eyas.target.config import TargetConfig
from tests.target.tiny_target import write_target

RENDERS = """
import sys
from pathlib import Path
from eyas.target.config import TargetConfig
from eyas.target.lightly import leave_torch_out
from eyas.target.rendering import Renderer
from eyas.target.spec import load_target
from eyas.target.tokenizer import load_tokenizer
import eyas.generation.session, eyas.prompts.prepare
config = TargetConfig.model_validate_json(sys.argv[1])
spec = load_target(config)
if sys.argv[2] == "light":
    assert leave_torch_out(spec)
ids = Renderer(spec, load_tokenizer(spec), config).render([{"role": "user", "content": "naïve 😀 <|im_end|>"}]).input_ids
print(bool(sys.modules.get("torch")), ids)
"""


def _render(config: TargetConfig, how: str) -> tuple[str, str]:
    command = [sys.executable, "-c", RENDERS, config.model_dump_json(), how]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "PyTorch was not found" not in result.stderr
    has_torch, _, ids = result.stdout.strip().partition(" ")
    return has_torch, ids


def test_rendering_without_torch_gives_the_same_ids(tmp_path: Path) -> None:
    config = TargetConfig(model=str(write_target(tmp_path / "target")))
    light, full = _render(config, "light"), _render(config, "full")
    assert (light[0], full[0]) == ("False", "True")
    assert light[1] == full[1]


@pytest.mark.parametrize(("code", "is_light"), [("import json\n", "True"), ("import torch\n", "False")])
def test_torch_stays_where_the_targets_own_code_asks_for_it(code: str, is_light: str, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    (folder / "own.py").write_text(code)
    config = TargetConfig(model=str(folder), remote_code_sha256={"own.py": digest_file(folder / "own.py")})
    program = (
        "import sys; from eyas.target.config import TargetConfig; from eyas.target.lightly import leave_torch_out; "
        "from eyas.target.spec import load_target; config = TargetConfig.model_validate_json(sys.argv[1]); "
        "print(leave_torch_out(load_target(config)))"
    )
    command = [sys.executable, "-c", program, config.model_dump_json()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == is_light
