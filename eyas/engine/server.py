"""The HTTP side: SGLang 0.5.23's paths, statuses and bodies over one `Service`.

Key auth exempts paths that begin with /health, /ready or /metrics. `/health` and `/health_generate` generate one
token, so they fail when the engine hangs and wait when it is busy; `/ready` is cheap.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.engine import info
from eyas.engine.chat import complete_chat
from eyas.engine.protocol import (
    GenerateBody,
    Item,
    MalformedBody,
    malformed_error,
    manager_error,
    object_error,
    parse_generate,
    plain_error,
    read_body,
    stream_error,
)
from eyas.engine.sampling import BadRequest, SamplingParams, UnknownField
from eyas.engine.service import Service

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")
_HEALTH_TIMEOUT_S = 20.0
Handler = Callable[[HttpRequest], Awaitable[Response]]


def create_app(service: Service) -> Starlette:
    """The ASGI application."""

    async def generate(request: HttpRequest) -> Response:
        raw = await read_body(request)
        is_stream = raw.get("stream") is True
        try:
            body, items, is_list = parse_generate(raw)
            if is_stream:
                return StreamingResponse(_events(service, items, body, is_list), media_type="text/event-stream")
            replies = await _unless_gone(request, service.reply(items, body))
        except BadRequest as error:
            if is_stream:
                return StreamingResponse(_error_events(str(error)), media_type="text/event-stream")
            return manager_error(str(error))
        full = next((r for r in replies if r["meta_info"]["finish_reason"].get("status_code") == 503), None)
        if full is not None:
            return object_error(full["meta_info"]["finish_reason"]["message"], "503", 503)
        return JSONResponse(replies if is_list else replies[0])

    async def chat(request: HttpRequest) -> Response:
        raw = await read_body(request)
        try:
            return JSONResponse(await _unless_gone(request, complete_chat(service, raw)))
        except BadRequest as error:
            return object_error(str(error), "BadRequestError", 400)

    async def abort(request: HttpRequest) -> Response:
        raw = await read_body(request)
        if raw.get("abort_all"):
            service.scheduler.abort(None)
        elif raw.get("rid"):
            for rid in [raw["rid"]] if isinstance(raw["rid"], str) else raw["rid"]:
                service.scheduler.abort(rid)
        return Response(status_code=200)

    async def health(request: HttpRequest) -> Response:
        item = Item(prompt=[0], params=SamplingParams(max_new_tokens=1, temperature=0.0), rid=None, logprobs=None, namespace="")
        try:
            await asyncio.wait_for(service.reply([item], GenerateBody()), _HEALTH_TIMEOUT_S)
        except TimeoutError:
            return Response(status_code=503)
        return Response(status_code=200)

    async def flush(request: HttpRequest) -> Response:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()
        service.scheduler.flush(lambda is_done: _tell(loop, done, is_done))
        if not await done:
            return PlainTextResponse("Flush cache failed.\n", 400)
        return PlainTextResponse(
            "Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )

    async def tokenize(request: HttpRequest) -> Response:
        raw = await read_body(request)
        tokens = service.encode(str(raw.get("prompt", "")))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.spec.context_length})

    async def ready(request: HttpRequest) -> Response:
        return Response(status_code=200)

    async def metrics(request: HttpRequest) -> Response:
        return PlainTextResponse(info.metrics(service), media_type="text/plain; version=0.0.4")

    def shows(make: Callable[[Service], dict[str, Any]]) -> Handler:
        async def show(request: HttpRequest) -> Response:
            return JSONResponse(make(service))

        return show

    routes = [
        Route("/generate", generate, methods=["POST", "PUT"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/abort_request", abort, methods=["POST"]),
        Route("/health", health),
        Route("/health_generate", health),
        Route("/ready", ready),
        Route("/model_info", shows(info.model_info)),
        Route("/get_model_info", shows(info.model_info)),
        Route("/server_info", shows(info.server_info)),
        Route("/get_server_info", shows(info.server_info)),
        Route("/v1/models", shows(info.models)),
        Route("/v1/loads", shows(info.loads)),
        Route("/flush_cache", flush, methods=["GET", "POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes, exception_handlers={MalformedBody: _malformed, UnknownField: _unknown, ClientGone: _gone})
    if service.api_key:
        app.add_middleware(KeyCheck, api_key=service.api_key)
    return app


async def _malformed(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, MalformedBody)
    return malformed_error(error)


async def _unknown(request: HttpRequest, error: Exception) -> Response:
    return plain_error(str(error), 400)


class KeyCheck:
    """Answers 401 to what comes without the key, but for the open prefixes."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._wanted = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(_OPEN_PREFIXES):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                return await plain_error("Unauthorized", 401)(scope, receive, send)
        return await self._app(scope, receive, send)


class ClientGone(Exception):
    """The client closed the connection before its answer; its requests were aborted."""


async def _gone(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)


async def _unless_gone(request: HttpRequest, work: Awaitable[Any]) -> Any:
    """Await `work`, cancelling it (which aborts its requests) if the client closes the connection first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[bool], value: bool) -> None:
    loop.call_soon_threadsafe(future.set_result, value)


async def _events(service: Service, items: list[Item], body: GenerateBody, is_list: bool) -> AsyncIterator[str]:
    try:
        async for index, reply in service.stream(items, body):
            yield _event({"index": index, **reply} if is_list else reply)
    except BadRequest as error:
        yield _event(stream_error(str(error)))
    yield "data: [DONE]\n\n"


async def _error_events(message: str) -> AsyncIterator[str]:
    yield _event(stream_error(message))
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
