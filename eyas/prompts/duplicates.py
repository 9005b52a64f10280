"""Near-duplicates by MinHash over word triples, decided between conversations and never inside one.

A signature is the low 16 bits of 128 minima (rensa; b-bit minwise hashing, Li and König 2010: half the
memory, chance agreements of 1 in 65,536). Jaccard 0.8 is estimated within ± 0.07 in 95 of 100 cases.
Bands of the signature find the pairs worth comparing; a pair counts only if the whole signatures agree
as much as the threshold says. Rows are taken in order of precedence, the first of a kind stays: the
result does not depend on how the work was divided.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

NUM_PERMUTATIONS = 128
SIGNATURE_BYTES = 2 * NUM_PERMUTATIONS
SIGNATURE_VERSION = f"rensa-{RMinHash.ALGORITHM_VERSION}-words3-16bit"
_SEED = 42
_SHINGLE_WORDS = 3
_MIN_RECALL = 0.995

Signatures = npt.NDArray[np.uint16]  # [n, NUM_PERMUTATIONS]


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """Row `row` repeats row `of`, at an estimated Jaccard `similarity`."""

    row: int
    of: int
    similarity: float


def signature(words: list[str]) -> bytes:
    """MinHash signature of a text's word triples (the words themselves where there are fewer than three)."""
    minhash = RMinHash(num_perm=NUM_PERMUTATIONS, seed=_SEED)
    if len(words) < _SHINGLE_WORDS:
        minhash.update([" ".join(words)])
    else:
        minhash.update(list(map(" ".join, zip(words, words[1:], words[2:], strict=False))))
    return np.asarray(minhash.digest(), dtype=np.uint32).astype("<u2").tobytes()


def find_near_duplicates(signatures: Signatures, groups: list[bytes], threshold: float) -> list[Duplicate]:
    """Rows to drop, in order; rows stand in order of precedence, rows of one group (conversation) are never compared.

    A row is dropped if a *kept* earlier row of another group is at least `threshold` similar.
    """
    buckets = _shared_buckets(signatures, threshold)
    kept_in: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    dropped: list[Duplicate] = []
    for row in sorted(buckets):
        candidates = sorted({other for bucket in buckets[row] for other in kept_in[bucket] if groups[other] != groups[row]})
        best = _most_similar(signatures, row, candidates)
        if best is not None and best.similarity >= threshold:
            dropped.append(best)
            continue
        for bucket in buckets[row]:
            kept_in[bucket].append(row)
    return dropped


def band_rows(threshold: float) -> int:
    """Rows of a band: as many as keep the chance of finding a pair at the threshold above 99.5 %."""
    for rows in range(NUM_PERMUTATIONS, 1, -1):
        if 1 - (1 - threshold**rows) ** (NUM_PERMUTATIONS // rows) >= _MIN_RECALL:
            return rows
    return 1


def _shared_buckets(signatures: Signatures, threshold: float) -> dict[int, list[tuple[int, int]]]:
    """For every row that shares a band with another: the (band, bucket) pairs that it shares."""
    rows = band_rows(threshold)
    shared: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for band in range(NUM_PERMUTATIONS // rows):
        part = np.ascontiguousarray(signatures[:, band * rows : (band + 1) * rows])
        keys = part.view(np.dtype((np.void, part.itemsize * rows))).ravel()
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        for row in np.flatnonzero(counts[inverse] > 1).tolist():
            shared[row].append((band, int(inverse[row])))
    return shared


def _most_similar(signatures: Signatures, row: int, candidates: list[int]) -> Duplicate | None:
    if not candidates:
        return None
    similarities = (signatures[candidates] == signatures[row]).mean(axis=1)
    best = int(similarities.argmax())
    return Duplicate(row=row, of=candidates[best], similarity=float(similarities[best]))
