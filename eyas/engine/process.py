"""The engine as a child process that never outlives its parent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx

from eyas.engine.config import EngineConfig
from eyas.engine.listen import listen_on
from eyas.errors import ConfigError, ServerError

logger = logging.getLogger(__name__)
_STARTUP_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0


class EngineProcess:
    """Starts `python -m eyas.engine` on loopback, in its own process group; a context manager with `url` and `pid`.

    The socket is bound here and inherited, so `url` is known before the server answers and a port in use is a
    `ConfigError` at once. `model_dir` is a model folder or `package:…`; `draft_dir` turns speculation on.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        config: EngineConfig | None = None,
        draft_dir: Path | None = None,
        num_draft_tokens: int = 3,
        api_key: str = "",
        log: Path | None = None,
        context_length: int = 0,
        served_model: str = "",
        is_scripted: bool = False,
    ) -> None:
        self._config = config or EngineConfig()
        self._api_key, self._log = api_key, log
        self._arguments = [
            *("--model", str(model_dir), "--context-length", str(context_length), "--served-model-name", served_model),
            *("--dtype", self._config.dtype, "--threads", str(self._config.threads)),
            *("--max-running-requests", str(self._config.max_running_requests)),
            *("--max-queued-requests", str(self._config.max_queued_requests)),
            *("--max-total-tokens", str(self._config.max_total_tokens)),
            *("--chunked-prefill-size", str(self._config.prefill_chunk_tokens)),
            *(("--draft-dir", str(draft_dir), "--num-draft-tokens", str(num_draft_tokens)) if draft_dir else ()),
            *(("--scripted-reasoning",) if is_scripted else ()),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._port = self._config.port
        self.url = ""

    @property
    def pid(self) -> int:
        """Process id of the running server; raises `ServerError` before the start."""
        if self._process is None:
            raise ServerError("the embedded engine is not started; enter its context first")
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until the server is ready; again on the same port after a death.

        Raises `ConfigError` (its exit code 2) or `ServerError`.
        """
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        bound = listen_on("127.0.0.1", self._port)
        host, self._port = bound.getsockname()[:2]
        self.url = f"http://{host}:{self._port}"
        with (
            bound,
            tempfile.TemporaryDirectory(prefix="eyas-engine-") as folder,
            open(self._log or Path(folder, "log"), "ab+") as output,
        ):
            log_start = output.seek(0, os.SEEK_END)
            extra: list[str] = []
            if self._api_key:
                key_file = Path(folder, "key")
                key_file.touch(mode=0o600)
                key_file.write_text(self._api_key, encoding="utf-8")
                extra = ["--api-key-file", str(key_file)]
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "eyas.engine",
                    *self._arguments,
                    *extra,
                    "--fd",
                    str(bound.fileno()),
                    "--parent-pid",
                    str(os.getpid()),
                ],
                pass_fds=[bound.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            bound.close()  # a dead server must refuse connections, not leave them hanging here
            try:
                code = self._wait_until_ready()
            except BaseException:
                self.stop()
                raise
            if code is not None:
                output.seek(log_start)
                raise self._startup_error(code, output.read().decode("utf-8", "replace"))

    def stop(self) -> None:
        """End the server: SIGTERM to its group, SIGKILL after ten seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        for number, timeout_s in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, None)):
            if process.poll() is not None:
                break
            os.killpg(process.pid, number)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("engine pid=%d ignored SIGTERM for %.0f s", process.pid, _STOP_TIMEOUT_S)
        logger.info("engine ended pid=%d code=%s", process.pid, process.returncode)

    def _wait_until_ready(self) -> int | None:
        """None once the server is ready, or its exit code."""
        assert self._process is not None
        deadline = time.monotonic() + _STARTUP_TIMEOUT_S
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                return code
            try:
                if httpx.get(f"{self.url}/ready", timeout=2.0, trust_env=False).status_code == 200:
                    return None
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise ServerError(
            f"the embedded engine at {self.url} was not ready after {_STARTUP_TIMEOUT_S:.0f} s; see {self._log or 'its log'}"
        )

    def _startup_error(self, code: int, text: str) -> Exception:
        lines = [line for line in text.splitlines() if line.strip()]
        reason = lines[-1] if lines else "no output"
        if code == 2:
            return ConfigError(reason.removeprefix("eyas engine: "))
        return ServerError(f"the embedded engine ended with code {code} while starting: {reason}; see {self._log or 'its log'}")
