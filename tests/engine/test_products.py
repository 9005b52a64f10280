"""The product in vectors of 16 against numpy's in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from eyas.engine.pages import as_array
from eyas.engine.products import add_half_product, add_product


@njit
def call(weights: Any, matrix: Any, row: int, column: int, depth: int, sums: Any, into: int) -> None:
    add_product(weights, matrix, row, column, depth, sums, into)


@njit
def call_half(weights: Any, matrix: Any, row: int, column: int, depth: int, sums: Any, into: int) -> None:
    add_half_product(weights, matrix, row, column, depth, sums, into)


@pytest.mark.parametrize(("add", "width"), [(call, 16), (call_half, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_a_product_is_added_in_its_place_and_nowhere_else(rows: int, dtype: torch.dtype, add: Any, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weights, matrix = torch.randn(rows, 24, generator=generator), torch.randn(40, 48, generator=generator).to(dtype)
    before = torch.randn(rows, 64, generator=generator)
    sums = before.clone()
    add(weights.numpy(), as_array(matrix), 5, 16, 21, sums.numpy(), 32)
    wanted = before.double()
    wanted[:, 32 : 32 + width] += weights[:, :21].double() @ matrix[5:26, 16 : 16 + width].double()
    np.testing.assert_allclose(sums.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-5)
    assert torch.equal(sums[:, :32], before[:, :32])
    assert torch.equal(sums[:, 32 + width :], before[:, 32 + width :])
