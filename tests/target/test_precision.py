from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from eyas.target.precision import native_dtype


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True, "avx512_f": True}, "bfloat16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        ({"avx512_bf16": False, "avx512_f": True, "avx2": True}, "float32"),
        ({"avx2": True}, "float32"),
        ({"neon": True, "bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": False}, "float32"),
    ],
)
def test_the_processor_decides_and_no_clock(capabilities: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice by measurement once made a restarted server another target: fp32 where the run had begun in bf16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(capabilities))
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("a clock was read"))
    assert native_dtype() == dtype


def test_a_gpu_always_takes_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType({}))
    assert native_dtype() == "bfloat16"
