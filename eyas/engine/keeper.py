"""Starts an engine that has died again, on the port it had."""

from __future__ import annotations

import logging
import threading

from eyas.engine.process import EngineProcess
from eyas.errors import EyasError

logger = logging.getLogger(__name__)
_MAX_RESTARTS = 10
_LOOK_S = 0.5


class Keeper:
    """A thread that starts an engine again whenever it has died, `_MAX_RESTARTS` times at most; then its outage is the run's."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine, self._is_over = engine, threading.Event()
        self._thread = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return once the engine is started no more."""
        self._is_over.set()
        self._thread.join()

    def _keep(self) -> None:
        for number in range(1, _MAX_RESTARTS + 1):
            while self._engine.is_alive:
                if self._is_over.wait(_LOOK_S):
                    return
            if self._is_over.is_set():
                return
            logger.warning("engine died url=%s; starting it again, %d of %d", self._engine.url, number, _MAX_RESTARTS)
            try:
                self._engine.start()
            except (EyasError, OSError) as error:  # no memory for a process, say
                logger.warning("engine did not start again url=%s: %s", self._engine.url, error)
                self._is_over.wait(_LOOK_S)
        logger.error("engine died again url=%s after %d restarts; it is left alone", self._engine.url, _MAX_RESTARTS)
