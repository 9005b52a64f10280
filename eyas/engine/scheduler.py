"""Continuous batching: one thread that owns the model and runs everything that is under way, step by step.

A step takes one token (or one verification of K drafts) of every running request and up to a chunk of waiting
prompt beside it, so a long prompt never stalls decoding for longer than its chunk. Pages are taken as a reply grows;
when they run out the youngest request starts again later, and makes the same reply (`num_retractions` says so).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from eyas.engine.pages import PAGE
from eyas.engine.request import Request
from eyas.engine.stats import EngineStats

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes: `TargetRunner` (the model) or `ScriptedRunner` (canned reasoning)."""

    num_pages: int
    tokens_per_step: int
    """Positions from a request's last token on that a step may write: 1, or 2 K when speculating."""
    num_drafts: int
    """K, or 0 without speculation."""

    def page_keys(self, request: Request) -> list[bytes]:
        """Keys under which the request's prompt pages may be shared."""

    def first_unknown(self, keys: list[bytes]) -> bytes | None:
        """The first of `keys` whose page is nowhere in the cache, or None."""

    def reuse_prefix(self, request: Request, count: int) -> None:
        """Take `count` pages for the request and copy what is known of its prompt into them."""

    def take_pages(self, count: int) -> list[int] | None:
        """`count` free pages, or None if there are fewer."""

    def give_back(self, pages: list[int]) -> None:
        """Return a request's pages."""

    def num_free_pages(self) -> int:
        """Pages that no request holds."""

    def forget_prefixes(self) -> None:
        """Share no page of a past prompt any more."""

    def step(self, decoding: list[Request], pieces: list[tuple[Request, int]]) -> list[tuple[Request, list[int]]]:
        """Run one step: a token or a verification of each of `decoding`, and each piece (request, number of prompt tokens).

        Returns the new tokens of every request that got some.
        """


class Scheduler(threading.Thread):
    """Admits, runs and finishes requests; `submit`, `abort` and `flush` may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        end_ids: set[int],
        decode: Callable[[list[int]], str],
        max_running: int,
        max_queued: int,
        chunk_tokens: int,
        on_death: Callable[[BaseException], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="eyas-engine", daemon=True)
        self._runner, self._end_ids, self._decode = runner, end_ids, decode
        self.max_running, self._max_queued, self._chunk_tokens = max_running, max_queued, chunk_tokens
        self._on_death, self._prepare = on_death, prepare
        self._wake = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._aborts: list[str | None] = []
        self._flushes: list[Callable[[bool], None]] = []
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._is_stopping = False
        self.stats = EngineStats(capacity_tokens=runner.num_pages * PAGE, max_running=max_running)

    def submit(self, request: Request) -> None:
        """Queue a request; its `emit` is called from the engine's thread."""
        with self._wake:
            self._inbox.append(request)
            self._wake.notify()

    def abort(self, rid: str | None) -> None:
        """End the request `rid`, or every one if None, with what it has so far; an unknown one is ignored."""
        with self._wake:
            self._aborts.append(rid)
            self._wake.notify()

    def flush(self, done: Callable[[bool], None]) -> None:
        """Forget all shared prefixes if nothing runs or waits; `done` gets whether it was."""
        with self._wake:
            self._flushes.append(done)
            self._wake.notify()

    def stop(self) -> None:
        """Finish the current step and end the thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def run(self) -> None:
        """The loop; an exception in it is the end of the server, as with a real one."""
        try:
            self._prepare()
            while self._take_orders():
                self._step()
        except BaseException as error:
            logger.exception("engine loop died running=%d waiting=%d", len(self._running), len(self._waiting))
            self._on_death(error)

    def _take_orders(self) -> bool:
        with self._wake:
            while not (self._inbox or self._aborts or self._flushes or self._running or self._waiting or self._is_stopping):
                self.stats.set_load(self._running, self._waiting)
                self._wake.wait()
            arrived, self._inbox = list(self._inbox), deque()
            aborts, self._aborts = self._aborts, []
            flushes, self._flushes = self._flushes, []
            is_stopping = self._is_stopping
        for request in arrived:
            self._enqueue(request)
        for rid in aborts:
            self._abort(rid)
        for done in flushes:
            is_idle = not (self._running or self._waiting)
            if is_idle:
                self._runner.forget_prefixes()
            done(is_idle)
        return not is_stopping

    def _enqueue(self, request: Request) -> None:
        num_slots = self.max_running - len(self._running)
        if self._max_queued and len(self._waiting) >= self._max_queued + max(0, num_slots):
            reason = {
                "type": "abort",
                "message": "The request queue is full.",
                "status_code": 503,
                "err_type": "SERVICE_UNAVAILABLE",
            }
            self._finish(request, reason)
        else:
            self._waiting.append(request)

    def _abort(self, rid: str | None) -> None:
        reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        for request in [r for r in (*self._running, *self._waiting) if rid is None or r.rid == rid]:
            if request in self._running:
                self._release(request)
            else:
                self._waiting.remove(request)
            self._finish(request, dict(reason))

    def _step(self) -> None:
        self._admit()
        self.stats.set_load(self._running, self._waiting)
        if not self._running:
            return
        decoding = self._grow([request for request in self._running if request.is_prefilled])
        pieces = self._pieces(num_decoding=len(decoding))
        started = time.perf_counter()
        results = self._runner.step(decoding, pieces)
        num_new = 0
        now = time.time()
        for request, tokens in results:
            if not request.prefilled_at:
                request.prefilled_at = now
                self.stats.count_first_token(request)
            num_new += self._append(request, tokens)
        self.stats.count_step(num_new, sum(count for _, count in pieces), time.perf_counter() - started)

    def _admit(self) -> None:
        """Start waiting requests in order; one whose head is just being computed for another waits, to copy it then."""
        computing = {key for request in self._running if not request.is_prefilled for key in request.page_keys}
        for request in list(self._waiting):
            if len(self._running) == self.max_running:
                return
            request.page_keys = request.page_keys or self._runner.page_keys(request)
            if self._runner.first_unknown(request.page_keys) in computing:
                continue
            count = (len(request.prompt_ids) + self._runner.tokens_per_step) // PAGE + 1
            reserve = len(self._running)  # each running request may need a page before long
            if self._running and self._runner.num_free_pages() < count + reserve:
                return
            self._waiting.remove(request)
            request.started_at = request.started_at or time.time()
            self._runner.reuse_prefix(request, count)
            self._running.append(request)
            computing.update(request.page_keys)

    def _grow(self, decoding: list[Request]) -> list[Request]:
        """Give every decoding request the pages of its next step; without enough, the youngest start again later."""
        for request in decoding:
            while request in self._running:
                missing = (request.num_tokens - 1 + self._runner.tokens_per_step - 1) // PAGE + 1 - len(request.pages)
                pages = self._runner.take_pages(missing) if missing > 0 else []
                if pages is not None:
                    request.pages.extend(pages)
                    break
                self._retract(self._running[-1])
        return [request for request in decoding if request in self._running]

    def _retract(self, request: Request) -> None:
        logger.warning("pages ran out, retracting rid=%s after %d tokens", request.rid, len(request.output_ids))
        self._release(request)
        request.restart()
        self._waiting.appendleft(request)
        self.stats.counters["retracted"] += 1

    def _pieces(self, num_decoding: int) -> list[tuple[Request, int]]:
        budget = self._chunk_tokens if num_decoding else 4 * self._chunk_tokens
        pieces = []
        for request in self._running:
            left = len(request.prompt_ids) - request.num_computed
            if left == 0:
                continue
            count = left if left <= budget else budget // PAGE * PAGE  # only a last piece may end inside a page
            if count == 0:
                break
            pieces.append((request, count))
            budget -= count
        return pieces

    def _append(self, request: Request, tokens: list[int]) -> int:
        """Add new tokens to a reply until it ends; returns how many were added."""
        params = request.params
        num_before = len(request.output_ids)
        reason: dict[str, Any] | None = {"type": "length", "length": 0} if params.max_new_tokens == 0 else None
        for token in tokens if reason is None else []:
            request.output_ids.append(token)
            reason = self._end_of(request, token)
            if reason is not None:
                break
        num_new = len(request.output_ids) - num_before
        self.stats.counters["generation_tokens"] += num_new  # before the reply goes out: who has it finds it counted
        request.output_logprobs.cut(len(request.output_ids))
        if num_before and self._runner.num_drafts:  # the first token comes from the prompt, not from a verification
            request.count_verification(self._runner.num_drafts, accepted=min(num_new, len(tokens) - 1))
        if reason is not None:
            self._release(request)
            self._finish(request, reason)
        elif request.is_stream and len(request.output_ids) // params.stream_interval != num_before // params.stream_interval:
            request.emit(request)
        return num_new

    def _end_of(self, request: Request, token: int) -> dict[str, Any] | None:
        params = request.params
        num_new = len(request.output_ids)
        if token in params.stop_token_ids or (token in self._end_ids and not params.ignore_eos):
            return {"type": "stop", "matched": token}
        if params.stop or params.stop_regex:
            matched = find_stop(self._decode(request.output_ids), params.stop, params.stop_regex)
            if matched is not None:
                return {"type": "stop", "matched": matched[1]}
        if num_new >= params.max_new_tokens:
            return {"type": "length", "length": num_new}
        return None

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._runner.give_back(request.pages)
        request.pages = []

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish_reason = reason
        request.finished_at = time.time()
        self.stats.count_finished(request)
        request.emit(request)


def find_stop(text: str, strings: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[int, str] | None:
    """(position, matched string or pattern) of the first stop string or regular expression in `text`."""
    import re

    for string in strings:
        if string in text:
            return text.index(string), string
    for pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return match.start(), pattern
    return None
