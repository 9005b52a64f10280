"""One SGLang server over HTTP: requests out, checked replies in, everything else a typed error.

All four httpx timeouts and the pool limits are set here; redirects are not followed and nothing is retried
here. A request that passes its deadline is aborted on the
server by its `rid`. Neither texts nor the key are ever logged.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import time
from datetime import UTC
from types import TracebackType
from typing import Any

import httpx

from eyas.errors import ConfigError, EyasError, ServerError
from eyas.settings import server_url
from eyas.sglang.config import ServerConfig
from eyas.sglang.replies import Decode, GenerateRequest, Reply, accept

log = logging.getLogger(__name__)

ADMIN_TIMEOUT_S = 30.0
MAX_REPLY_BYTES = 256 * 1024 * 1024


class ServerUnreachable(ServerError):
    """No connection: the request was never sent."""


class ServerFailed(ServerError):
    """The server broke off, or answered with a status that may heal (5xx, 404 of a proxy)."""


class ClosedBeforeReply(ServerFailed):
    """The server closed the connection before any byte of a reply: a kept-alive socket that it had dropped, or a crash."""


class ServerBusy(ServerError):
    """429 or 503: queue full, starting or draining. `retry_after_s` is the server's own wish, or None."""

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerChanged(ServerError):
    """A reply by other weights than the server had when it was proven to be the target."""


class DeadlineExceeded(ServerError):
    """The request's deadline passed; it was aborted on the server."""


class RequestRefused(EyasError):
    """The server refuses this one request (400, 413, 422); repeating it is useless."""

    reason = "refused_by_server"


class SGLangClient:
    """Client of one server; an async context manager. `url` has no trailing slash."""

    def __init__(self, url: str, config: ServerConfig, *, api_key: str = "", max_connections: int = 4096) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            server_url(self.url)
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(
                    connect=config.connect_timeout_s, read=ADMIN_TIMEOUT_S, write=ADMIN_TIMEOUT_S, pool=ADMIN_TIMEOUT_S
                ),
                limits=httpx.Limits(
                    max_connections=max_connections, max_keepalive_connections=None, keepalive_expiry=config.keepalive_s
                ),
                follow_redirects=False,
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"server URL {url!r} is not usable: {error}; correct server.urls, or the option that names it"
            ) from error

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def generate(self, request: GenerateRequest, *, deadline_s: float, decode: Decode, vocab_size: int) -> Reply:
        """Send one request and return its accepted reply.

        Raises `ReplyError` (a 200 that is no data), `RequestRefused`, `ServerError` or `ConfigError` (key refused, redirect).
        """
        body = await self.generate_raw(request.body(), rid=request.rid, deadline_s=deadline_s)
        return accept(body, request, decode=decode, vocab_size=vocab_size, where=f"{self.url}/generate")

    async def generate_raw(self, payload: dict[str, Any], *, rid: str, deadline_s: float) -> bytes:
        """The bytes of a 200 reply to `payload`; aborts `rid` on the server if the deadline passes or the task is cancelled."""
        if not payload.get("input_ids"):
            raise ConfigError(f"rid={rid}: an empty prompt ends an SGLang server, so it is never sent")
        timeout = httpx.Timeout(connect=self._http.timeout.connect, read=deadline_s, write=ADMIN_TIMEOUT_S, pool=deadline_s)
        content = json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()
        try:
            async with asyncio.timeout(deadline_s):
                return await self._send("POST", "/generate", content=content, limits_s=timeout)
        except (TimeoutError, _ReadTimedOut) as error:
            await self.abort(rid)
            raise DeadlineExceeded(f"{self.url}/generate rid={rid}: no reply within {deadline_s:.0f} s; aborted there") from error
        except asyncio.CancelledError:
            await asyncio.shield(self.abort(rid))
            raise

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        """The prompt ids that the server itself renders, through `/v1/chat/completions` with one new token."""
        payload: dict[str, Any] = {
            "model": "default",
            "messages": messages,
            "max_tokens": 1,
            "temperature": 0,
            "return_prompt_token_ids": True,
        }
        if tools:
            payload["tools"] = tools
        if template_kwargs:
            payload["chat_template_kwargs"] = template_kwargs
        reply = await self._json("POST", "/v1/chat/completions", payload, timeout_s=10 * ADMIN_TIMEOUT_S)
        ids = (reply.get("choices") or [{}])[0].get("prompt_token_ids")
        if not isinstance(ids, list):
            raise ServerFailed(f"{self.url}/v1/chat/completions gives no prompt_token_ids; wanted SGLang 0.5.23 or later")
        return ids

    async def models(self) -> dict[str, Any]:
        """`/v1/models`: the served model; its `max_model_len` is the context length in tokens."""
        reply = await self._json("GET", "/v1/models")
        data = reply.get("data")
        if not isinstance(data, list) or not data or not isinstance(data[0], dict):
            raise ServerFailed(f"{self.url}/v1/models lists no model; is this an SGLang server?")
        return dict(data[0])

    async def model_info(self) -> dict[str, Any]:
        return await self._json("GET", "/model_info")

    async def server_info(self) -> dict[str, Any]:
        return await self._json("GET", "/server_info")

    async def loads(self) -> dict[str, Any]:
        """`/v1/loads`, data-parallel ranks added up: running, waiting, token_usage (largest), gen_throughput, retracted."""
        ranks = [rank for rank in (await self._json("GET", "/v1/loads")).get("loads", []) if isinstance(rank, dict)]
        if not ranks:
            raise ServerFailed(f"{self.url}/v1/loads lists no rank")
        return {
            "running": sum(int(rank.get("num_running_reqs") or 0) for rank in ranks),
            "waiting": sum(int(rank.get("num_waiting_reqs") or 0) for rank in ranks),
            "token_usage": max(float(rank.get("token_usage") or 0.0) for rank in ranks),
            "tokens_per_s": sum(float(rank.get("gen_throughput") or 0.0) for rank in ranks),
            "retracted": sum(int((rank.get("queues") or {}).get("retracted") or 0) for rank in ranks),
            "max_running": sum(int(rank.get("max_running_requests") or 0) for rank in ranks),
            "max_tokens": sum(int(rank.get("max_total_num_tokens") or 0) for rank in ranks),
        }

    async def tokenize(self, text: str) -> list[int] | None:
        """Ids of `text` by the server's tokenizer without special tokens; None where the server has no `/tokenize`."""
        try:
            reply = await self._json("POST", "/tokenize", {"model": "default", "prompt": text, "add_special_tokens": False})
        except (ServerFailed, RequestRefused):
            return None
        tokens = reply.get("tokens")
        return tokens if isinstance(tokens, list) else None

    async def metrics(self) -> str:
        """The text of `/metrics`, empty where the server runs without `--enable-metrics`."""
        try:
            return (await self._send("GET", "/metrics")).decode("utf-8", "replace")
        except ServerFailed:
            return ""

    async def is_ready(self) -> bool:
        """True if `/ready` answers 200: the process is alive and takes requests. Says nothing about progress."""
        try:
            await self._send("GET", "/ready", limits_s=httpx.Timeout(5.0))
        except EyasError:
            return False
        return True

    async def abort(self, rid: str) -> None:
        """Abort `rid` on the server; unknown ids are no error, an unreachable server is logged."""
        try:
            await self._send("POST", "/abort_request", content=json.dumps({"rid": rid}).encode(), limits_s=httpx.Timeout(5.0))
        except EyasError as error:
            log.info("abort failed url=%s rid=%s error=%s", self.url, rid, type(error).__name__)

    async def flush_cache(self) -> bool:
        """Empty the radix cache; False if the server refuses because requests run."""
        try:
            await self._send("POST", "/flush_cache")
        except RequestRefused:
            return False
        return True

    async def _json(
        self, method: str, path: str, payload: dict[str, Any] | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> dict[str, Any]:
        content = None if payload is None else json.dumps(payload, ensure_ascii=True, allow_nan=False).encode()
        try:
            body = await self._send(method, path, content=content, limits_s=httpx.Timeout(timeout_s))
        except _ReadTimedOut as error:
            raise ServerFailed(f"{self.url}{path}: {error}") from error
        try:
            value = json.loads(body)
        except ValueError as error:
            raise ServerFailed(
                f"{self.url}{path} answers {len(body)} bytes that are not JSON; is this an SGLang server?"
            ) from error
        if not isinstance(value, dict):
            raise ServerFailed(f"{self.url}{path} answers a {type(value).__name__}, wanted an object")
        return value

    async def _send(self, method: str, path: str, *, content: bytes | None = None, limits_s: httpx.Timeout | None = None) -> bytes:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        where = f"{self.url}{path}"
        request = self._http.build_request(method, path, content=content, headers=headers, timeout=limits_s or self._http.timeout)
        try:
            response = await self._http.send(request, stream=True)
            try:
                body = await _read(response, where)
            finally:
                await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnreachable(f"{where}: no connection ({error or type(error).__name__}); is the server running?") from error
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
            raise _ReadTimedOut(f"no reply in time ({type(error).__name__})") from error
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            if "without sending a response" in str(error):
                raise ClosedBeforeReply("closed before a reply") from error
            raise ServerFailed(f"{where}: the connection broke ({type(error).__name__}: {error})") from error
        except httpx.HTTPError as error:
            raise ServerFailed(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _status_error(response, body, where)
        return body


class _ReadTimedOut(ServerError):
    """httpx gave up before the deadline did."""


async def _read(response: httpx.Response, where: str) -> bytes:
    chunks, size = [], 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            raise ServerFailed(f"{where}: the reply passes {MAX_REPLY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _status_error(response: httpx.Response, body: bytes, where: str) -> EyasError:
    status, message = response.status_code, error_message(body)
    if status in (401, 403):
        return ConfigError(f"{where} answers {status}: the API key is missing or wrong; set server.api_key_file or the block's key")
    if 300 <= status < 400:
        target = response.headers.get("location", "nowhere")
        return ConfigError(
            f"{where} redirects ({status}) to {target}; redirects are not followed, set server.urls to the final URL"
        )
    if status in (429, 503):
        return ServerBusy(f"{where} answers {status}: {message}", retry_after_s=_retry_after(response.headers.get("retry-after")))
    if status in (400, 413, 422):
        return RequestRefused(f"{where} answers {status}: {message}")
    return ServerFailed(f"{where} answers {status}: {message}")


def error_message(body: bytes) -> str:
    """The message of an error body: SGLang 0.5.23 has three shapes of it; at most 300 characters."""
    try:
        value = json.loads(body)
    except ValueError:
        return f"{len(body)} bytes that are not JSON"
    if isinstance(value, dict):
        inner = value.get("error", value)
        value = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(value).split())[:300]


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - time.time())
