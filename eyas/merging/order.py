"""The training order: a permutation decided by seed and record ids alone, mixture weights included.

Every copy of a record gets a 64-bit key, a mix of (id, seed, copy); the order is by key. A weight of 2.3 means
two copies, and a third for three records in ten, chosen by a key as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eyas.merging.spill import Heads, Spill

ORDER_HEAD = np.dtype([("key", "<u8"), ("high", "<u8"), ("low", "<u8")])
Keys = npt.NDArray[np.uint64]
_FRACTION = 1 << 32  # a copy number that no copy has


def add_copies(spill: Spill, heads: Heads, weights: npt.NDArray[np.float64], seed: int) -> None:
    """Add to `spill` the wanted copies of records `heads` [R] with `weights` [R]."""
    whole = np.floor(weights)
    chance = order_keys(heads["high"], heads["low"], seed, _FRACTION).astype(np.float64) / 2.0**64
    copies = whole.astype(np.int64) + (chance < weights - whole)
    for copy in range(int(copies.max(initial=0))):
        chosen = heads[copies > copy]
        entries = np.zeros(len(chosen), dtype=ORDER_HEAD)
        entries["key"] = order_keys(chosen["high"], chosen["low"], seed, copy)
        entries["high"], entries["low"] = chosen["high"], chosen["low"]
        spill.add(entries["key"], entries)


def in_order(spill: Spill) -> Iterator[Heads]:
    """Yield the entries of `spill` in training order, one bucket at a time."""
    for entries, _ in spill.read():
        yield entries[np.lexsort((entries["low"], entries["high"], entries["key"]))]


def order_keys(high: Keys, low: Keys, seed: int, copy: int) -> Keys:
    """A key per record [R], uniform over 64 bits."""
    salt = _mix(np.array([seed], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(copy))
    return _mix(high ^ _mix(low ^ salt))


def _mix(value: Keys) -> Keys:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits that scatters them."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
