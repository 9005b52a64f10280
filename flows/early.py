"""What later phases do while generation runs, where the rule of `eyas.operate.overlap` lets them.

Datasets that are complete are extracted at once, in the same tasks that phase 4 would start (which then finds them
cached), the first replies rehearse everything that follows, and some more of them give the figures of smaller
hidden states and the learning curve. Nothing here can fail the run: what goes wrong is told, and phase 4 does the
work again in its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prefect.artifacts import acreate_markdown_artifact

from eyas.manifest import Manifest
from eyas.operate.codec_probe import RECORDS as CODEC_RECORDS
from eyas.operate.codec_result import RESULT as CODECS
from eyas.operate.codec_result import passed
from eyas.operate.curve_result import RESULT as CURVE
from eyas.operate.curve_result import advice
from eyas.operate.learning_curve import needed_replies
from eyas.operate.messages import read_progress
from eyas.operate.overlap import may_overlap
from eyas.operate.rehearsal import RECORDS, RESULT
from flows.phases import Job, extract_dataset
from tasks.caching import run_task
from tasks.events import emit
from tasks.publish import artifact_key
from tasks.rehearse import measure_codecs, measure_learning_curve, rehearse_phases

logger = logging.getLogger(__name__)

OnDataset = Callable[[str, Manifest], None]
POLL_S = 5.0


@asynccontextmanager
async def early_work(job: Job) -> AsyncIterator[OnDataset]:
    """While the block runs, hear of complete datasets and do what can be done; at its end wait for what has begun."""
    may, why = may_overlap(job.config)
    logger.info("later phases work while replies are generated: %s (%s)", "yes" if may else "no", why)
    if not may:
        yield lambda name, manifest: None
        return
    one_at_a_time, is_over = asyncio.Lock(), asyncio.Event()
    works = [asyncio.create_task(_first_replies(job, is_over))]

    def on_dataset(name: str, manifest: Manifest) -> None:
        works.append(asyncio.create_task(_extract(job, name, manifest, one_at_a_time)))

    try:
        yield on_dataset
        is_over.set()
        await asyncio.gather(*works)
    finally:
        for work in works:
            work.cancel()


async def _extract(job: Job, name: str, manifest: Manifest, one_at_a_time: asyncio.Lock) -> None:
    async with one_at_a_time:
        try:
            await extract_dataset(job, name, manifest)
        except Exception as error:  # phase 4 tries again, and fails the run if it must
            logger.warning("early extraction failed dataset=%s error=%s", name, error)


async def _first_replies(job: Job, is_over: asyncio.Event) -> None:
    """Rehearse, try smaller hidden states and measure the learning curve, each once, as soon as there are replies enough."""
    if not (job.run.root / RESULT).is_file() and await _replies(job, RECORDS, is_over):
        await _rehearse(job)
    one_at_a_time = asyncio.Lock()
    works = []
    if job.config.hidden.codec == "bf16" and not (job.run.hidden / CODECS).is_file():
        works.append(_try_codecs(job, is_over, one_at_a_time))
    if job.config.operate.learning_curve_share and not (job.run.root / CURVE).is_file():
        works.append(_learn(job, is_over, one_at_a_time))
    await asyncio.gather(*works)


async def _replies(job: Job, count: int, is_over: asyncio.Event) -> bool:
    """Wait until `count` replies are there; False if generation is over before."""
    while sum(message.done for message in await asyncio.to_thread(read_progress, job.run.progress, "generate")) < count:
        if is_over.is_set():
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), POLL_S)
    return True


async def _try_codecs(job: Job, is_over: asyncio.Event, one_at_a_time: asyncio.Lock) -> None:
    try:
        if not await _replies(job, CODEC_RECORDS, is_over):
            return
        async with one_at_a_time:
            result = await run_task(measure_codecs, **job.shared)
    except Exception as error:  # a run does without it: states are stored exactly
        logger.warning("smaller hidden states not tried run=%s error=%s", job.run.root, error)
        return
    await asyncio.to_thread(job.keeper.refresh)
    names = ", ".join(passed(result)) or "none"
    emit("codecs tried", job.run.root, f"smaller hidden states that keep what a draft needs of this target: {names}; see the plan")


async def _learn(job: Job, is_over: asyncio.Event, one_at_a_time: asyncio.Lock) -> None:
    try:
        if not await _replies(job, await asyncio.to_thread(needed_replies, job.run, job.config), is_over):
            return
        async with one_at_a_time:
            result = await run_task(measure_learning_curve, **job.shared)
    except Exception as error:  # a run does without it
        logger.warning("no learning curve run=%s error=%s", job.run.root, error)
        return
    await asyncio.to_thread(job.keeper.refresh)
    emit("learning curve", job.run.root, advice(result))


async def _rehearse(job: Job) -> None:
    try:
        result = await run_task(rehearse_phases, **job.shared)
    except Exception as error:
        emit("rehearsal failed", job.run.root, f"the phases after generation fail on its first replies: {error}")
        return
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in result["seconds"].items())
    text = f"The phases after generation went through on the first {sum(result['records'].values())} replies: {seconds}."
    if baseline := result.get("baseline"):
        text += f" The baseline draft reaches accept length {baseline['accept_length']:.2f}."
    await acreate_markdown_artifact(text, key=artifact_key(job.run.root.name, "rehearsal"), description=text)
