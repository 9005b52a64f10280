"""How many bytes a store needs, and the refusal, with numbers, of what cannot fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import ConfigError
from eyas.hidden.codec import CodecName, bytes_per_token

if TYPE_CHECKING:
    from eyas.hidden.plan import ShardPlan

_RECORD_BYTES = 160  # offsets, sidecar and index


def store_bytes(num_records: int, num_tokens: int, hidden_size: int, codec: CodecName) -> int:
    """Bytes of a store of so many records and tokens."""
    return num_tokens * bytes_per_token(hidden_size, codec) + num_records * _RECORD_BYTES


def check_disk(folder: Path, need_bytes: int, reserve_bytes: int) -> None:
    """Refuse with numbers if `need_bytes` more do not fit beside the reserve; raises `ConfigError`."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if need_bytes + reserve_bytes > free_bytes:
        raise ConfigError(
            f"hidden states need {_gb(need_bytes)} more in {folder}, {_gb(free_bytes)} are free and {_gb(reserve_bytes)} stay in "
            "reserve (hidden.disk_reserve_bytes); free space, choose a smaller hidden.codec, keep only a window of states "
            "(hidden.disk_budget), take fewer prompts (prompts.subsample), lower merging.max_tokens or put the run on a larger disk"
        )


@dataclass(frozen=True, kw_only=True)
class Window:
    """What training extracts as it goes: bytes of each shard by name, records, tokens, and the bytes that they share."""

    shards: dict[str, int]
    num_records: int
    num_tokens: int
    room_bytes: int

    def figures(self) -> dict[str, Any]:
        """For the manifest; nothing without a budget."""
        if not self.shards:
            return {}
        return {
            "windowed_records": self.num_records,
            "windowed_tokens": self.num_tokens,
            "windowed_shards": len(self.shards),
            "windowed_bytes": sum(self.shards.values()),
            "window_bytes": self.room_bytes,
        }


def window_of(plans: Sequence[ShardPlan], budget_bytes: int, hidden_size: int, codec: CodecName) -> Window:
    """Held-out shards stay for good; the rest of the budget is the window, and must hold two of the other shards.

    Raises `ConfigError` with the numbers where it does not.
    """
    sizes = {plan: store_bytes(plan.num_records, plan.num_tokens, hidden_size, codec) for plan in plans}
    stored_bytes = sum(size for plan, size in sizes.items() if not plan.is_windowed)
    shards = {plan.name: size for plan, size in sizes.items() if plan.is_windowed}
    least_bytes = stored_bytes + 2 * max(shards.values(), default=0)
    if least_bytes > budget_bytes:
        raise ConfigError(
            f"hidden.disk_budget is {_gb(budget_bytes)}, wanted at least {_gb(least_bytes)}: held-out states, which every replay "
            f"reads, take {_gb(stored_bytes)}, and two shards {_gb(least_bytes - stored_bytes)} (one is read while the next is "
            "extracted); raise it, choose a smaller hidden.codec, or lower prompts.heldout_share or merging.max_tokens"
        )
    windowed = [plan for plan in plans if plan.is_windowed]
    return Window(
        shards=shards,
        num_records=sum(plan.num_records for plan in windowed),
        num_tokens=sum(plan.num_tokens for plan in windowed),
        room_bytes=budget_bytes - stored_bytes,
    )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
