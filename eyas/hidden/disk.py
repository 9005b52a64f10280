"""How many bytes a store needs, and the refusal, with numbers, of what cannot fit."""

from __future__ import annotations

import shutil
from pathlib import Path

from eyas.errors import ConfigError
from eyas.hidden.codec import CodecName, bytes_per_token

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
            "reserve (hidden.disk_reserve_bytes); free space, choose a smaller hidden.codec, take fewer prompts "
            "(prompts.subsample), lower merging.max_tokens or put the run on a larger disk"
        )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
