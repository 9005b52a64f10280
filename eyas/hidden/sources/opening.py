"""Which source a run uses."""

from __future__ import annotations

from eyas.errors import ConfigError
from eyas.hidden.config import HiddenConfig
from eyas.hidden.kind import StoreKind
from eyas.hidden.sources.protocol import Source
from eyas.target.spec import TargetSpec


def open_source(config: HiddenConfig, spec: TargetSpec, kind: StoreKind) -> Source:
    """The source that `config` names; raises `ConfigError` if it is not to be had here."""
    if config.source == "transformers":
        from eyas.hidden.sources.transformers import shared_source

        return shared_source(spec, dtype=kind.dtype, batch_tokens=config.batch_tokens, threads=config.threads)
    raise ConfigError(f"hidden.source {config.source!r} is not available; wanted transformers")
