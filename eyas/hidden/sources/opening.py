"""Which source a run uses."""

from __future__ import annotations

import os
from pathlib import Path

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.hidden.kind import StoreKind
from eyas.hidden.sources.protocol import Source
from eyas.target.spec import TargetSpec


def open_source(config: RunConfig, spec: TargetSpec, kind: StoreKind) -> Source:
    """The source that `hidden.source` names; raises `ConfigError` or `ServerError` if it is not to be had."""
    hidden = config.hidden
    if hidden.source == "transformers":
        from eyas.hidden.sources.transformers import shared_source

        return shared_source(spec, dtype=kind.dtype, batch_tokens=hidden.batch_tokens, threads=hidden.threads)
    sink = Path(hidden.sink) if hidden.sink else None
    api_key = _api_key(config.server.api_key_file)
    if hidden.source == "vllm":
        from eyas.hidden.sources.vllm import VllmSource

        return VllmSource(hidden.urls, sink=sink, spec=spec, concurrency=hidden.concurrency, api_key=api_key)
    from eyas.hidden.sources.sglang import SglangSource

    return SglangSource(
        hidden.urls or config.server.urls,
        final_urls=hidden.final_urls,
        sink=sink,
        spec=spec,
        concurrency=hidden.concurrency,
        api_key=api_key,
    )


def _api_key(path: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text().strip() if path else ""
    except OSError as error:
        raise ConfigError(f"server.api_key_file {path} cannot be read ({error.strerror}); correct the path") from error
