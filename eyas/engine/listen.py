"""The server's socket, bound before anything heavy is imported, so that a port in use is refused at once."""

from __future__ import annotations

import socket

from eyas.errors import ConfigError


def listen_on(host: str, port: int) -> socket.socket:
    """A bound socket; raises `ConfigError` if the port is in use or not permitted."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); stop what uses it or choose another --port"
        ) from error
    return bound
