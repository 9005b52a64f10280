"""Where the servers' API key comes from; it is never written, logged or shown."""

from __future__ import annotations

import os
from pathlib import Path

from eyas.config import RunConfig
from eyas.errors import ConfigError


def server_api_key(config: RunConfig, from_environment: str) -> str:
    """The servers' key: what the environment's EYAS_API_KEY held, otherwise the content of server.api_key_file, otherwise none.

    The caller reads the environment; only entry points do. Raises `ConfigError` if the file cannot be read.
    """
    if from_environment or not config.server.api_key_file:
        return from_environment
    path = Path(os.path.expanduser(config.server.api_key_file))
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"server.api_key_file: {path} cannot be read ({error.strerror}); correct the path") from error
