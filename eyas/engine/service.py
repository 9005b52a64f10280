"""Between HTTP and the engine's thread: prompts in, replies and chunks out, on the server's event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.engine.config import EngineConfig
from eyas.engine.protocol import GenerateBody, Item, check_lengths
from eyas.engine.request import Request, logprob_info
from eyas.engine.sampling import BadRequest, SamplingParams
from eyas.engine.scheduler import Scheduler, find_stop
from eyas.target.spec import TargetSpec


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A request's state at one event, copied in the engine's thread."""

    output_ids: list[int]
    meta_info: dict[str, Any]
    is_last: bool


@dataclass(kw_only=True)
class Service:
    """The engine as the handlers see it."""

    spec: TargetSpec
    tokenizer: PreTrainedTokenizerBase
    scheduler: Scheduler
    config: EngineConfig
    served_model: str
    server_args: dict[str, Any]
    api_key: str

    def __post_init__(self) -> None:
        self._in_flight: set[str] = set()

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens the tokenizer adds by itself."""
        return list(self.tokenizer.encode(text))

    def decode(self, ids: list[int], params: SamplingParams) -> str:
        """Text of a reply's ids as `params` want special tokens."""
        text = self.tokenizer.decode(
            ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def request_of(self, item: Item, *, is_stream: bool, emit: Callable[[Request], None]) -> Request:
        """The engine's request for one prompt; raises `BadRequest` for what cannot be served."""
        prompt_ids = self.encode(item.prompt) if isinstance(item.prompt, str) else item.prompt
        if not prompt_ids:
            raise BadRequest("The prompt is empty; the embedded engine refuses it (a real server may die of it).")
        worst = max(prompt_ids, key=lambda token: token if token >= 0 else self.spec.vocab_size - token)
        if not 0 <= worst < self.spec.vocab_size:
            raise BadRequest(f"The input holds token id {worst}, the vocabulary has {self.spec.vocab_size}.")
        check_lengths(len(prompt_ids), item.params.max_new_tokens, self.spec.context_length)
        if item.rid is not None and item.rid in self._in_flight:
            raise BadRequest(f"Duplicate request ID detected: {item.rid}")
        return Request(
            prompt_ids=prompt_ids,
            params=item.params,
            emit=emit,
            is_stream=is_stream,
            logprob_options=item.logprobs,
            namespace=item.namespace,
            rid=item.rid or uuid.uuid4().hex,
        )

    async def reply(self, items: list[Item], body: GenerateBody) -> list[dict[str, Any]]:
        """The replies of all `items`, in order; if the client goes away their requests are aborted."""
        loop = asyncio.get_running_loop()
        done: list[asyncio.Future[Chunk]] = [loop.create_future() for _ in items]

        def emitter(future: asyncio.Future[Chunk]) -> Callable[[Request], None]:
            return lambda request: _post(loop, lambda chunk: None if future.done() else future.set_result(chunk), request)

        requests = [self.request_of(item, is_stream=False, emit=emitter(future)) for item, future in zip(items, done, strict=True)]
        self._start(requests)
        try:
            chunks = await asyncio.gather(*done)
        finally:
            self._end(requests)
        return [self.answer(request, chunk, body) for request, chunk in zip(requests, chunks, strict=True)]

    async def stream(self, items: list[Item], body: GenerateBody) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(index of the item, cumulative reply) at every chunk of every item."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()

        def emitter(index: int) -> Callable[[Request], None]:
            return lambda request: _post(loop, lambda chunk: queue.put_nowait((index, chunk)), request)

        requests = [self.request_of(item, is_stream=True, emit=emitter(index)) for index, item in enumerate(items)]
        self._start(requests)
        num_open = len(requests)
        try:
            while num_open:
                index, chunk = await queue.get()
                num_open -= chunk.is_last
                yield index, self.answer(requests[index], chunk, body)
        finally:
            self._end(requests)

    def answer(self, request: Request, chunk: Chunk, body: GenerateBody) -> dict[str, Any]:
        """The JSON object of a reply or chunk."""
        reply: dict[str, Any] = {
            "text": self.text_of(chunk.output_ids, chunk.meta_info["finish_reason"], request.params),
            "output_ids": chunk.output_ids,
        }
        if body.return_prompt_token_ids:
            reply["prompt_token_ids"] = request.prompt_ids
        return reply | {"meta_info": chunk.meta_info | logprob_info(request, lambda token: str(self.tokenizer.decode([token])))}

    def text_of(self, output_ids: list[int], reason: dict[str, Any] | None, params: SamplingParams) -> str:
        """A reply's text: without its stop token or from its stop string on, unless `no_stop_trim`."""
        matched = reason.get("matched") if reason else None
        is_trimmed = not params.no_stop_trim
        if isinstance(matched, int) and is_trimmed:
            output_ids = output_ids[:-1]
        text = self.decode(output_ids, params)
        if isinstance(matched, str):
            found = find_stop(text, params.stop, params.stop_regex)
            if found is not None and is_trimmed:
                text = text[: found[0]]
        return text

    def _start(self, requests: list[Request]) -> None:
        self._in_flight.update(request.rid for request in requests)
        for request in requests:
            self.scheduler.submit(request)

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            self._in_flight.discard(request.rid)
            if request.finish_reason is None:
                self.scheduler.abort(request.rid)


def _post(loop: asyncio.AbstractEventLoop, deliver: Callable[[Chunk], None], request: Request) -> None:
    """Copy the request's state in the engine's thread and hand it to the event loop."""
    chunk = Chunk(output_ids=list(request.output_ids), meta_info=request.meta_info(), is_last=request.finish_reason is not None)
    loop.call_soon_threadsafe(deliver, chunk)
