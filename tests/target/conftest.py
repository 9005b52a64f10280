from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.target.config import TargetConfig
from eyas.target.rendering import Renderer
from eyas.target.spec import load_target
from eyas.target.tokenizer import load_tokenizer
from tests.target.tiny_target import CHATML, write_target


@pytest.fixture
def make_renderer(tmp_path: Path) -> Callable[..., Renderer]:
    """Builds a renderer over a tiny target with the given template."""

    def make(template: str = CHATML, *, special: list[str] | None = None, **config: Any) -> Renderer:
        folder = write_target(tmp_path / "target", template, special=special)
        settings = TargetConfig(model=str(folder), **config)
        spec = load_target(settings)
        return Renderer(spec, load_tokenizer(spec), settings)

    return make
