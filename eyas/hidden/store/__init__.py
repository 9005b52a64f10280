"""The hidden-state store: shards of safetensors, an index, one reader."""

from eyas.hidden.store.reader import HiddenStore, Record

__all__ = ["HiddenStore", "Record"]
