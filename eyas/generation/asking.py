"""One prompt's way to a reply: attempts on the pool's servers until one is accepted or the record is refused for good.

A deadline is at least three times what a reply of this length takes at present, and one that passes doubles that
of every later attempt: a server that is slower than expected must not lose the work of each of its replies for
ever, and one that hangs is found out all the same.

What counts as an attempt of the record is what a server took up and spoiled. Never being sent (no connection),
being turned away (429, 503), a reply by other weights than were proven and a kept-alive socket that the server
had dropped cost nothing but time, so that an outage, however long, rejects no record.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from eyas.config import RunConfig
from eyas.errors import EyasError, RecordError, ServerError
from eyas.generation.dataset import DatasetRun
from eyas.generation.inflight import InFlightLog
from eyas.generation.records import Prompt
from eyas.generation.sampling import clamp_new_tokens, record_sampling, record_seed
from eyas.generation.telemetry import Telemetry
from eyas.sglang.client import ClosedBeforeReply, DeadlineExceeded, ServerBusy, ServerChanged, ServerUnreachable
from eyas.sglang.pool import Server, ServerPool
from eyas.sglang.replies import Decode, GenerateRequest, Reply, ReplyError
from eyas.target.spec import TargetSpec

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.5
RETRY_LAST_S = 30.0
MOST_PATIENCE = 16.0
DEADLINE_SHARE = 3.0
BUSY_RETRY_S = 1.0


def clock() -> str:
    """The time in UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(kw_only=True)
class Record:
    """The fate of one prompt in this session. `num_failed` counts attempts that a server took up, `num_tries` all."""

    start_number: int
    started_at: str = field(default_factory=clock)
    num_failed: int = 0
    num_tries: int = 1
    rid: str = ""
    url: str = ""
    seed: int = 0
    max_new_tokens: int = 0
    was_dropped: bool = False
    last_error: str = ""
    last_brief: str = ""
    last_reason: str = ""

    def note(self, error: EyasError, *, counts: bool) -> None:
        """Remember a failure that may heal."""
        self.num_tries += 1
        self.num_failed += counts
        self.last_error = f"{type(error).__name__}: {error}"
        self.last_brief = brief(error)
        self.last_reason = getattr(error, "reason", "server_failed")

    @property
    def backoff_s(self) -> float:
        """Jittered wait before the next try, in seconds."""
        return min(RETRY_LAST_S, RETRY_FIRST_S * 2.0 ** min(self.num_tries - 2, 10)) * random.uniform(0.5, 1.0)

    def provenance(self) -> dict[str, Any]:
        """Where and how the outcome came about, for the journal."""
        return {
            "server": self.url,
            "rid": self.rid,
            "attempt": self.num_failed + 1,
            "max_new_tokens": self.max_new_tokens,
            "started_at": self.started_at,
            "finished_at": clock(),
        }


def brief(error: Exception) -> str:
    """An error's kind and place for a log, without the server's words: some servers quote the request in them."""
    return f"{type(error).__name__}: {str(error).partition(': ')[0]}"


class Asker:
    """Sends prompts for one session; stateless but for the token that makes its `rid`s unique."""

    def __init__(
        self,
        *,
        pool: ServerPool,
        config: RunConfig,
        spec: TargetSpec,
        sampling: dict[str, Any],
        decode: Decode,
        telemetry: Telemetry,
        in_flight: InFlightLog,
        may_send: asyncio.Event,
    ) -> None:
        self._pool = pool
        self._config = config
        self._spec = spec
        self._sampling = sampling
        self._decode = decode
        self._telemetry = telemetry
        self._in_flight = in_flight
        self._may_send = may_send
        self._token = uuid.uuid4().hex[:8]
        self._patience = 1.0  # what deadlines are multiplied with

    async def ask(self, dataset: DatasetRun, prompt: Prompt, record: Record, server: Server) -> Reply:
        """The accepted reply to `prompt`; gives back the place on `server` and every later one.

        Raises `RecordError`, `ReplyError` or `RequestRefused` where the record is refused for good, `ConfigError`
        where the server must not be used.
        """
        while True:
            waits = True
            sent = time.monotonic()
            dataset.flying[prompt.id] = (sent, record.start_number)
            try:
                reply = await self._attempt(prompt, record, server)
                self._telemetry.count_reply(reply, time.monotonic() - sent)
                return reply
            except ReplyError as error:
                if not error.can_heal:
                    raise
                record.note(error, counts=True)
            except (ServerBusy, ServerUnreachable, ServerChanged) as error:
                record.note(error, counts=False)
            except ClosedBeforeReply as error:  # the first time it is a dropped socket rather than this record
                record.note(error, counts=record.was_dropped)
                waits, record.was_dropped = record.was_dropped, True
            except ServerError as error:
                record.note(error, counts=True)
            finally:
                await self._pool.release(server)
            dataset.num_retries += 1
            del dataset.flying[prompt.id]
            log.info("retry dataset=%s id=%s url=%s error=%s", dataset.name, prompt.id, server.url, record.last_brief)
            if record.num_failed >= self._config.generation.max_attempts:
                raise RecordError(record.last_reason, f"{record.num_failed} attempts failed; the last: {record.last_error}")
            if waits:
                await asyncio.sleep(record.backoff_s)
            await self._may_send.wait()
            server = await self._pool.lease(prompt.input_ids)

    async def _attempt(self, prompt: Prompt, record: Record, server: Server) -> Reply:
        """One request. The pool learns how its server did."""
        generation, limits = self._config.generation, self._config.server
        cap = clamp_new_tokens(prompt.max_new_tokens, len(prompt.input_ids), generation, self._spec)
        record.max_new_tokens, record.url = cap, server.url
        record.seed = record_seed(generation.seed, prompt.id)
        record.rid = f"eyas-{prompt.id}-{record.num_tries}-{self._token}"
        sampling = record_sampling(self._sampling, prompt.split, max_new_tokens=cap, seed=record.seed)
        request = GenerateRequest(rid=record.rid, input_ids=prompt.input_ids, sampling_params=sampling)
        patience = self._patience
        usual_s = DEADLINE_SHARE * self._telemetry.expected_s(cap)
        deadline_s = max(limits.deadline_floor_s, cap / limits.min_tokens_per_s, usual_s) * patience
        self._in_flight.add(record.rid, server.url)
        try:
            reply = await server.client.generate(
                request, deadline_s=deadline_s, decode=self._decode, vocab_size=self._spec.vocab_size
            )
        except ServerBusy as error:
            await self._pool.report_busy(server, error.retry_after_s or BUSY_RETRY_S)
            raise
        except ServerError as error:
            if isinstance(error, DeadlineExceeded):
                self._patience = min(max(self._patience, 2 * patience), MOST_PATIENCE)
            if record.was_dropped or not isinstance(error, ClosedBeforeReply):
                await self._pool.report_failure(server, brief(error))
            raise
        finally:
            self._in_flight.remove(record.rid)
        if difference := server.difference(reply.weight_version):
            await self._pool.report_changed(server, difference)
            raise ServerChanged(f"{server.url} rid={record.rid}: the reply has {difference}")
        await self._pool.report_success(server)
        return reply
