"""The KV cache: fixed pages of 64 tokens in one pool, handed out lowest number first.

A page of a layer keeps its keys as [kv heads, 4, head dim, 16], its values as [kv heads, 64, head dim] (see `kernels`); at
most 63 positions are wasted per request. Pages that hold a full, aligned piece of a *prompt* are remembered by
the digest of all tokens up to their end; another prompt with the same head copies them (0.1 ms a page,
against 30 ms to compute it) for as long as nothing has overwritten them.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array

import numpy as np
import torch
from torch import Tensor

from eyas.engine.kernels import PAGE as PAGE
from eyas.engine.products import LANES


def as_array(x: Tensor) -> np.ndarray:
    """`x` as numpy sees it, sharing memory; bfloat16 as the uint16 of its bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class LayerCache:
    """Keys and values of one layer over all pages, as one tensor and as the arrays that `kernels` reads and writes."""

    def __init__(self, num_pages: int, num_kv: int, head_dim: int, dtype: torch.dtype) -> None:
        # Zeros of numpy are committed by the kernel on first use, page by page; those of torch are written, so committed, at once.
        bits = np.zeros((2, num_pages, num_kv, PAGE * head_dim), dtype=f"u{dtype.itemsize}")
        self._tensor = torch.from_numpy(bits).view(dtype)
        self.keys = as_array(self._tensor[0].view(num_pages, num_kv, PAGE // LANES, head_dim, LANES))
        self.values = as_array(self._tensor[1].view(num_pages, num_kv, PAGE, head_dim))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy pages `source` [n] into pages `target` [n]."""
        self._tensor[:, target] = self._tensor[:, source]


class PagePool:
    """A cache per layer (`kv_heads` of each) over `num_pages` shared pages; page tables belong to the requests."""

    def __init__(self, *, kv_heads: list[int], num_pages: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_pages = num_pages
        self.layers = [LayerCache(num_pages, num_kv, head_dim, dtype) for num_kv in kv_heads]
        self._free = list(range(num_pages))  # a heap: low numbers first keep the used part of the pool short
        self._page_of_prefix: dict[bytes, int] = {}
        self._prefix_of_page: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, whose remembered contents are forgotten; the caller has checked `num_free`."""
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._forget(page)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Return pages; what they hold can still be copied until they are taken again."""
        for page in pages:
            heapq.heappush(self._free, page)

    def copy_prefix(self, keys: list[bytes], taken: list[int], sources: list[int]) -> None:
        """Copy the contents of `sources` into the first pages of `taken` and remember them under `keys`."""
        if not sources:
            return
        source, target = torch.tensor(sources), torch.tensor(taken[: len(sources)])
        for layer in self.layers:
            layer.copy(source, target)
        self.remember(keys[: len(sources)], taken)

    def find_prefix(self, keys: list[bytes]) -> list[int]:
        """Pages that hold the longest known head of a prompt whose page keys are `keys`."""
        found = []
        for key in keys:
            page = self._page_of_prefix.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def remember(self, keys: list[bytes], pages: list[int]) -> None:
        """Note that `pages` now hold the prompt pieces `keys`, in order."""
        for key, page in zip(keys, pages, strict=False):  # pages beyond the prompt's full ones have no key
            if key not in self._page_of_prefix:
                self._page_of_prefix[key] = page
                self._prefix_of_page[page] = key

    def forget_all(self) -> None:
        """Drop every remembered prefix."""
        self._page_of_prefix.clear()
        self._prefix_of_page.clear()

    def _forget(self, page: int) -> None:
        key = self._prefix_of_page.pop(page, None)
        if key is not None:
            del self._page_of_prefix[key]


def page_keys(token_ids: list[int], *, lookahead: int = 0, namespace: str = "") -> list[bytes]:
    """One key per full page of a prompt whose last token is left out, since it is always computed again.

    A key digests `namespace` and all tokens up to the page's end, `lookahead` further ones included (a draft's
    cache at position t depends on token t + 1).
    """
    digest = hashlib.blake2b(namespace.encode(), digest_size=16)
    keys = []
    for end in range(PAGE, len(token_ids), PAGE):
        digest.update(array("q", token_ids[end - PAGE : end]).tobytes())
        tail = digest.copy()
        tail.update(array("q", token_ids[end : end + lookahead]).tobytes())
        keys.append(tail.digest())
    return keys
