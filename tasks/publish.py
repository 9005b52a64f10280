"""What a run shows in Prefect while it works: a progress bar per piece of work, the living plan, and the run in tables.

The run folder is the source: whatever process does the work records its progress there, and this reads
it every few seconds. Nothing here can fail a run; what Prefect refuses is logged and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.artifacts import Artifact, MarkdownArtifact, ProgressArtifact, TableArtifact
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import ArtifactUpdate

from eyas.operate.messages import ProgressMessage, read_progress
from eyas.operate.status import read_status
from eyas.operate.tables import Source, changed_tables
from eyas.operate.wording import number
from eyas.progress import Report
from eyas.workspace import RunFolder

logger = logging.getLogger(__name__)

PUBLISH_S = 15.0
TABLES_S = 60.0
MAX_FIGURES = 6
_IN_THE_COUNTS = {"done", "pending", "replies"}


def artifact_key(*parts: str) -> str:
    """An artifact key (lowercase letters, digits, dashes) from names."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(part for part in parts if part).lower()).strip("-")


def describe(message: ProgressMessage) -> str:
    """One line that says the value: the list of artifacts shows nothing else."""
    share = f" ({message.done / message.total:.0%})" if message.total else ""
    what = f"{message.stage} {message.name}".strip()
    shown = [(name, value) for name, value in message.figures.items() if name not in _IN_THE_COUNTS]
    figures = [f"{name.replace('_', ' ')} {number(value)}" for name, value in shown[:MAX_FIGURES]]
    return " · ".join([f"{what}: {message.done:,} of {message.total:,} {message.unit}{share}", *figures])


@asynccontextmanager
async def published(run: RunFolder, plan: Callable[[], str], listen: Report, *, every_s: float = PUBLISH_S) -> AsyncIterator[None]:
    """Keep progress bars and the plan (`plan()` gives its Markdown) current while the block runs, and once at its end.

    `listen` hears every message that is new, whichever process recorded it.
    """
    async with get_client() as client:
        publisher = Publisher(run, plan, listen, client, since=datetime.now(UTC))
        loop = asyncio.create_task(publisher.loop(every_s))
        try:
            yield
        finally:
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop
            await publisher.publish(is_last=True)


@dataclass
class Publisher:
    """What is on show for one flow run; `publish` brings it up to date, and sends only what has changed."""

    run: RunFolder
    plan: Callable[[], str]
    listen: Report
    client: PrefectClient
    since: datetime  # messages of an earlier attempt stay unshown
    heard: dict[str, str] = field(default_factory=dict)  # artifact key to the time of the last message
    ids: dict[str, UUID] = field(default_factory=dict)
    shown: dict[str, tuple[Any, str | None]] = field(default_factory=dict)
    made_from: dict[Source, Any] = field(default_factory=dict)
    tables_at: float = 0.0

    async def loop(self, every_s: float) -> None:
        while True:
            await self.publish()
            await asyncio.sleep(every_s)

    async def publish(self, *, is_last: bool = False) -> None:
        """Show what is new; the tables of long series every `TABLES_S` seconds, and at the end."""
        try:
            artifacts = [self._bar(message) for message in await self._news()]
            artifacts += await asyncio.to_thread(self._pages, is_last)
            results = await asyncio.gather(*map(self._show, artifacts), return_exceptions=True)
            if failures := [result for result in results if isinstance(result, BaseException)]:
                raise failures[0]
        except Exception as error:  # the edge to another system
            logger.warning("not published run=%s error=%r", self.run.root, error)

    async def _news(self) -> list[ProgressMessage]:
        """The last message of every piece of work; the new ones are told to the listener."""
        messages = await asyncio.to_thread(read_progress, self.run.progress)
        messages = [message for message in messages if datetime.fromisoformat(message.at) >= self.since]
        for message in messages:
            key = self._key(message.stage, message.name)
            if self.heard.get(key) != message.at:
                await asyncio.to_thread(self.listen, message.progress())
                self.heard[key] = message.at
        return messages

    def _bar(self, message: ProgressMessage) -> Artifact:
        """The bar of a piece of work."""
        percent = 100.0 * message.done / message.total if message.total else 100.0 * message.is_final
        key = self._key(message.stage, message.name)
        return ProgressArtifact(key=key, progress=min(percent, 100.0), description=describe(message))

    def _pages(self, is_last: bool) -> list[Artifact]:
        """The plan and the tables."""
        pages: list[Artifact] = []
        if plan := self.plan():
            headline = next((line.strip("# ") for line in plan.split("\n") if line.strip()), "plan")
            pages.append(MarkdownArtifact(key=self._key("plan"), markdown=plan, description=headline))
        rows = dataset_rows(self.run)
        done = sum(row["responses"] for row in rows)
        said = f"{len(rows)} datasets, {done:,} responses"
        pages.append(TableArtifact(key=self._key("datasets"), table=rows, description=said))
        if is_last or time.monotonic() - self.tables_at >= TABLES_S:
            self.tables_at = time.monotonic()
            for table in changed_tables(self.run, self.made_from):
                pages.append(TableArtifact(key=self._key(table.name), table=table.rows, description=table.headline))
        return pages

    async def _show(self, artifact: Artifact) -> None:
        """Show an artifact, in place of what this flow run showed before: a run of days keeps one row, not thousands.

        An update goes to the API itself: Prefect's own call would keep an event with the whole content beside it, each time.
        """
        key, data = str(artifact.key), await artifact.aformat()
        if self.shown.get(key) == (data, artifact.description):
            return
        if key in self.ids:
            update = ArtifactUpdate(data=data, description=artifact.description).model_dump(mode="json", exclude_unset=True)
            await self.client.request("PATCH", "/artifacts/{id}", path_params={"id": self.ids[key]}, json=update)
        else:
            self.ids[key] = (await artifact.acreate(self.client)).id
        self.shown[key] = (data, artifact.description)

    def _key(self, *parts: str) -> str:
        return artifact_key(self.run.root.name, *parts)


_TELLS_MOST = ("tokens_median", "tokens_mean", "tokens_p90", "share_cut_by_length", "share_with_reasoning", "tokens")


def dataset_rows(run: RunFolder) -> list[dict[str, Any]]:
    """One row per dataset: prompts, responses, rejects, and the quality figures of its generation."""
    rows = []
    for status in read_status(run.root).datasets:
        names = [*(name for name in _TELLS_MOST if name in status.figures), *sorted(status.figures.keys() - {*_TELLS_MOST})]
        values = {name.replace("_", " "): status.figures[name] for name in names}
        figures = {name: round(value, 3) for name, value in values.items() if isinstance(value, (int, float))}
        counts = {"prompts": status.prompts.get("done", 0), "responses": status.responses.get("done", 0)}
        rejected = {"rejected": status.responses.get("rejected", 0), "pending": status.responses.get("pending", 0)}
        rows.append({"dataset": status.dataset, **counts, **rejected, **{k: v for k, v in figures.items() if k not in rejected}})
    return rows
