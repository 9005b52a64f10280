"""The session: every dataset's prompts through one pool of servers, on one event loop.

`async with GenerationSession(...)` checks the servers, then each `await session.generate_dataset(name)` joins
and returns when its dataset is finished. One dispatcher hands out prompts as servers have room; each request
is a task that ends in exactly one journal line. What may heal is tried again within bounds; when no server
is left, or the disk is full, the run pauses and no record fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from eyas.config import RunConfig
from eyas.errors import ArtifactError, ConfigError, EyasError, GateError, RecordError, ServerError, StorageError
from eyas.generation.asking import Asker, Record
from eyas.generation.control import read_control
from eyas.generation.dataset import STAGE, DatasetRun, check_rejects, require_dataset
from eyas.generation.gates import ADVICE, Marks, marks_of
from eyas.generation.inflight import InFlightLog
from eyas.generation.proof import prove_rendering
from eyas.generation.records import Prompt, done_entry, reject_entry
from eyas.generation.sampling import check_stop_tokens, resolve_sampling
from eyas.generation.scheduler import choose
from eyas.generation.telemetry import Telemetry
from eyas.manifest import Manifest
from eyas.progress import Progress, Report, silent
from eyas.sglang.client import RequestRefused, SGLangClient
from eyas.sglang.health import PoolMonitor
from eyas.sglang.identity import FINGERPRINT_NAME, check_served_model, prove_same_target
from eyas.sglang.pool import Server, ServerPool
from eyas.sglang.replies import Reply, ReplyError
from eyas.target.rendering import Renderer
from eyas.target.spec import load_target
from eyas.target.tokenizer import load_tokenizer
from eyas.workspace import RunFolder, exclusive

log = logging.getLogger(__name__)

TICK_S = 1.0
LOOK_S = 5.0
FORECAST_S = 15.0


class GenerationSession:
    """Phase 2 for all datasets of a run. Create it inside the event loop that awaits its datasets."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        *,
        urls: list[str],
        api_key: str = "",
        report: Report = silent,
        say: Callable[[str], None] = log.info,
    ) -> None:
        if not urls:
            raise ConfigError("no server to generate with; set server.urls or start the embedded engine")
        self.run = run
        self.config = config
        self._urls = urls
        self._api_key = api_key
        self._report = report
        self._say = say
        self._said: set[str] = set()
        self._stack = AsyncExitStack()
        self._datasets: dict[str, DatasetRun] = {}
        self._records: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._pauses: dict[str, str] = {}
        self._fatal: BaseException | None = None

    async def __aenter__(self) -> GenerationSession:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes a line per request
        try:
            self._stack.enter_context(exclusive(self.run.root / "responses" / "session.lock", f"generation of {self.run.root}"))
            self.spec = await asyncio.to_thread(load_target, self.config.target)
            tokenizer = await asyncio.to_thread(load_tokenizer, self.spec)
            self.renderer = Renderer(self.spec, tokenizer, self.config.target)
            check_stop_tokens(self.config.generation, self.spec, tokenizer)
            self.sampling = resolve_sampling(self.config.generation, self.spec)
            self._say_once(f"proofs: does every server ({len(self._urls)}) serve the target, token for token?")
            await self._open_pool()
            await self._abort_left_over()
            self._telemetry = Telemetry(self.pool, self.run.progress)
            self._asker = Asker(
                pool=self.pool,
                config=self.config,
                spec=self.spec,
                sampling=self.sampling,
                decode=self.decode,
                telemetry=self._telemetry,
                in_flight=self._in_flight,
                may_send=self._may_send,
            )
            self._background(self._dispatch(), "dispatcher")
            self._background(self._monitor.run(), "monitor")
            self._background(self._tick(), "tick")
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.aclose()

    async def generate_dataset(self, name: str) -> Manifest:
        """Generate one dataset's responses and return its manifest, at once if an earlier session finished it.

        Raises `GateError` (quality), `TooManyRejects`, `ServerError` (outage past its limit), `StorageError`,
        `ConfigError` (server or rendering is not the target's), `ArtifactError` (prompts). All but `ConfigError` can be resumed.
        """
        require_dataset(self.config, self.run, name)
        dataset = DatasetRun(self.run, self.config, self.spec, self.sampling, name, self.decode)
        reject_limit = self.config.generation.reject_limit
        if finished := await asyncio.to_thread(dataset.finished_manifest):
            self._report_dataset(dataset, finished)
            return check_rejects(finished, reject_limit, dataset.folder)
        try:
            await self._prove(dataset)
        except ConfigError as error:  # what is wrong for one dataset must not be found out after days of the others
            self._fatal = error
            self._fail_all(error)
            raise
        await dataset.open(
            lambda error: self._set_pause("disk", str(error) if error else ""),
            retry_s=5 * TICK_S,
            give_up_s=self.config.server.outage_limit_s,
        )
        try:
            if self._fatal is not None:
                raise self._fatal
            self._datasets[name] = dataset
            if not dataset.is_canary_judged:
                num_replies = self.config.generation.canary
                self._say_once(f"canary: are the first {num_replies} replies of each dataset what they must be?")
            self._work.set()
            try:
                await dataset.finished
            except GateError:
                await dataset.drained.wait()  # what is in flight is paid for
                self._report_dataset(dataset, await asyncio.to_thread(dataset.write_results))
                raise
            manifest = await asyncio.to_thread(dataset.write_results)
        finally:
            self._datasets.pop(name, None)
            await dataset.close()
        counts = manifest.counts
        log.info(
            "dataset=%s in=%d done=%d rejected=%d pending=%d", name, counts.num_in, counts.done, counts.rejected, counts.pending
        )
        self._report_dataset(dataset, manifest)
        return check_rejects(manifest, reject_limit, dataset.folder)

    def decode(self, ids: list[int]) -> str:
        """Text of ids with special tokens kept, as the server is asked to give it."""
        return str(self.renderer.tokenizer.decode(ids, skip_special_tokens=False))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    # --- start and end -------------------------------------------------------------------------------------------

    async def _open_pool(self) -> None:
        servers = [await self._new_server(url) for url in dict.fromkeys(url.rstrip("/") for url in self._urls)]
        self.pool = ServerPool(servers)
        probe_ids = self.renderer.render([{"role": "user", "content": "Hi"}]).input_ids
        self._monitor = PoolMonitor(
            self.pool,
            probe_ids,
            interval_s=self.config.server.poll_interval_s,
            fixed_limit=self.config.server.max_concurrency,
        )
        self._monitor.admit = self._admit
        log.info(
            "timeouts connect_s=%g keepalive_s=%g deadline_floor_s=%g min_tokens_per_s=%g outage_limit_s=%g sampling=%s",
            self.config.server.connect_timeout_s,
            self.config.server.keepalive_s,
            self.config.server.deadline_floor_s,
            self.config.server.min_tokens_per_s,
            self.config.server.outage_limit_s,
            self.sampling,
        )
        unreachable = []
        for server in servers:
            try:
                await self._admit(server)
            except ServerError as error:
                unreachable.append(str(error))
        if len(unreachable) == len(servers):
            raise ServerError(f"no server answers: {'; '.join(unreachable)}")
        await self._monitor.poll()

    async def _new_server(self, url: str) -> Server:
        client = SGLangClient(url, self.config.server, api_key=self._api_key)
        return Server(client=await self._stack.enter_async_context(client))

    async def _admit(self, server: Server) -> None:
        """Checks that a server must pass whenever it joins or returns."""
        info = await check_served_model(server.client, self.config.server, self.spec, self.renderer)
        await prove_same_target(server.client, self.renderer, self.run.root / FINGERPRINT_NAME)
        server.weight_version, server.model_path = (str(info.get(key) or "") for key in ("weight_version", "model_path"))

    async def _abort_left_over(self) -> None:
        self._in_flight = InFlightLog(self.run.root / "responses" / "in-flight.log")
        left_over = self._in_flight.left_over()
        clients = {server.url: server.client for server in self.pool.servers}
        aborts = [clients[url].abort(rid) for rid, url in left_over.items() if url in clients]
        if aborts:
            log.warning("aborting requests of an earlier process count=%d", len(aborts))
            await asyncio.gather(*aborts)
        self._in_flight.open()
        self._stack.callback(self._in_flight.close)
        self._stack.push_async_callback(self._cancel_records)

    async def _prove(self, dataset: DatasetRun) -> None:
        if num_prompts := self.config.generation.proof_prompts:
            self._say_once(f"proofs: does the server render {num_prompts} prompts of each dataset to our ids?")
            server = next((server for server in self.pool.servers if server.state == "ready"), self.pool.servers[0])
            await prove_rendering(server.client, self.renderer, dataset.name, dataset.prompts_path, num_prompts)

    def _background(self, work: Any, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        task.add_done_callback(self._watch_task)
        self._stack.push_async_callback(_cancel, task)

    def _watch_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = error
            self._fail_all(error)

    async def _cancel_records(self) -> None:
        for task in self._records:
            task.cancel()
        await asyncio.gather(*self._records, return_exceptions=True)

    def _fail_all(self, error: BaseException) -> None:
        for dataset in self._datasets.values():
            dataset.fail(error)

    # --- the loop ------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self._work.wait()
            await self._may_send.wait()
            await self.pool.wait_for_room()
            open_datasets = [dataset for dataset in self._datasets.values() if dataset.may_start]
            share = choose([dataset.share for dataset in open_datasets], self.pool.capacity, self.config.generation.dataset_floor)
            if share is None:
                self._work.clear()
                continue
            dataset = self._datasets[share.name]
            prompt = dataset.next_prompt()
            if prompt is not None:
                server = await self.pool.lease(prompt.input_ids)
                record = Record(start_number=dataset.share.num_started - 1)
                task = asyncio.create_task(self._run_record(dataset, prompt, record, server))
                self._records.add(task)
                task.add_done_callback(self._records.discard)
                task.add_done_callback(self._watch_task)

    async def _run_record(self, dataset: DatasetRun, prompt: Prompt, record: Record, server: Server) -> None:
        """Bring one prompt, for which a place on `server` is leased, to its one line in the journal."""
        try:
            try:
                reply = await self._asker.ask(dataset, prompt, record, server)
            except (RecordError, ReplyError, RequestRefused) as error:
                await self._reject(dataset, prompt, record, error)
            else:
                await self._accept(dataset, prompt, record, reply)
        except (GateError, StorageError) as error:
            dataset.fail(error)
        finally:
            dataset.leave(prompt)
            self._work.set()

    async def _accept(self, dataset: DatasetRun, prompt: Prompt, record: Record, reply: Reply) -> None:
        reasoning = self.renderer.reasoning
        spans = reasoning.split(reply.output_ids, prompt.opens_think, len(prompt.input_ids), finish_reason=reply.finish_reason)
        provenance = {
            **record.provenance(),
            "seed": record.seed,
            "is_clamped": record.max_new_tokens < prompt.max_new_tokens,
        }
        entry = done_entry(prompt, reply, spans, provenance)
        await dataset.write(prompt, entry)
        marks = marks_of(reply.output_ids, spans, reply.finish_reason, reasoning)
        self._judge(dataset, marks, prompt.input_ids, reply.output_ids)

    async def _reject(self, dataset: DatasetRun, prompt: Prompt, record: Record, error: EyasError) -> None:
        reason = getattr(error, "reason", "rejected")
        log.info("rejected dataset=%s id=%s reason=%s", dataset.name, prompt.id, reason)
        await dataset.write(prompt, reject_entry(prompt, reason, str(error), record.provenance()))
        self._judge(dataset, Marks(rejected=True), prompt.input_ids, [])

    def _judge(self, dataset: DatasetRun, marks: Marks, input_ids: list[int], output_ids: list[int]) -> None:
        """Gates and canary; raises `GateError` at a stop level."""
        if not dataset.is_canary_judged:
            dataset.canary.add(marks, input_ids, output_ids)
            if not dataset.canary.is_complete:
                return
            dataset.is_canary_judged = True
            dataset.canary.judge(self.config.generation.gates)
            log.info("canary passed dataset=%s replies=%d", dataset.name, dataset.canary.wanted)
        for name in dataset.gates.add(marks, example=f"journal {dataset.journal_path}"):
            warn = getattr(self.config.generation.gates, name).warn
            log.warning("%s (warns above %.0f%%); %s", dataset.gates.describe(name), 100 * warn, ADVICE[name])

    # --- watching ------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Once a second: the operator's wishes, an outage past its limit, messages; now and then a look and a forecast."""
        look_at = forecast_at = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            datasets = list(self._datasets.values())
            await self._obey_control()
            self._check_outage()
            moment = time.monotonic()
            if moment >= look_at:
                self._telemetry.look(datasets, self._pauses)
                look_at = moment + LOOK_S
            if moment >= forecast_at:
                await self._telemetry.refresh_forecast(datasets)
                forecast_at = moment + FORECAST_S
            for dataset in datasets:
                self._report_dataset(dataset)

    async def _obey_control(self) -> None:
        try:
            control = await asyncio.to_thread(read_control, self.run.root)
            known = {server.url: server for server in self.pool.servers}
            for url in {url.rstrip("/") for url in control.add_urls} - known.keys():
                await self.pool.add(await self._new_server(url))
        except (ArtifactError, ConfigError) as error:
            log.warning("control ignored: %s", error)
            return
        self._set_pause("operator", "paused by control.json" if control.paused else "")
        drained = {url.rstrip("/") for url in control.drain_urls}
        for url, server in known.items():
            if url in drained and server.state != "draining":
                await self.pool.drain(url)
            elif url not in drained and server.state == "draining":
                await self.pool.undrain(url)

    def _check_outage(self) -> None:
        """Fail the session, resumable, once no server has been there for longer than the limit."""
        since = self.pool.outage_since
        limit_s = self.config.server.outage_limit_s
        if since is not None and time.monotonic() - since > limit_s:
            states = ", ".join(f"{server.url} {server.state}: {server.reason}" for server in self.pool.servers)
            self._fail_all(ServerError(f"no server for {limit_s:.0f} s ({states}); start one and run the same command again"))

    def _set_pause(self, cause: str, detail: str) -> None:
        """Pause sending for `cause` while `detail` is not empty."""
        if detail:
            if cause not in self._pauses:
                log.warning("paused cause=%s detail=%s", cause, detail)
            self._pauses[cause] = detail
        elif self._pauses.pop(cause, None) is not None:
            log.warning("resumed cause=%s", cause)
        if self._pauses:
            self._may_send.clear()
        else:
            self._may_send.set()

    def _report_dataset(self, dataset: DatasetRun, manifest: Manifest | None = None) -> None:
        counts = manifest.counts if manifest else dataset.counts()
        figures: dict[str, float | int | str] = {"done": counts.done, "rejected": counts.rejected, "pending": counts.pending}
        if manifest is not None:
            figures |= {key: value for key, value in manifest.figures.items() if isinstance(value, (int, float))}
        else:
            figures |= dataset.lengths.figures()
            figures |= {"in_flight": dataset.share.in_flight, "retries": dataset.num_retries}
            figures |= {f"gate_{name}": round(share, 4) for name, share in dataset.gates.shares().items()}
            figures["gates"] = ", ".join(dataset.gates.breached()) or "ok"
            figures |= self._telemetry.figures()
        if self._pauses:
            figures["paused"] = "; ".join(self._pauses.values())
        self._report(
            Progress(
                stage=STAGE,
                name=dataset.name,
                done=counts.done + counts.rejected,
                total=counts.num_in,
                unit="records",
                figures=figures,
                is_final=manifest is not None,
            )
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def generate(
    run: RunFolder,
    config: RunConfig,
    *,
    urls: list[str],
    api_key: str = "",
    report: Report = silent,
    say: Callable[[str], None] = log.info,
) -> dict[str, Manifest]:
    """Generate every configured dataset; {name: manifest}. All run to their end before the first error is raised."""
    async with GenerationSession(run, config, urls=urls, api_key=api_key, report=report, say=say) as session:
        names = [dataset.name for dataset in config.prompts.datasets]
        results = await asyncio.gather(*(session.generate_dataset(name) for name in names), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return dict(zip(names, (result for result in results if isinstance(result, Manifest)), strict=True))
