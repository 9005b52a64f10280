"""What training reads of a run: order, split, vocabulary map and states, and how records become batches.

An epoch is the merged order, permuted by seed and epoch after the first; batches are cut from it greedily by
a token budget, so the same seed gives the same batches anywhere (under a disk budget window by window, see
`eyas.hidden.window`). A record longer than the token budget stands alone. One thread reads ahead while the trainer computes.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.draft.data import Batch, Record, make_batch
from eyas.errors import ArtifactError
from eyas.files import digest_file
from eyas.hidden.codec import CODECS
from eyas.hidden.store.reader import HiddenStore
from eyas.hidden.window import WindowedStore
from eyas.workspace import RunFolder

logger = logging.getLogger(__name__)

READ_AHEAD = 2
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The records of a run, by id."""

    store: HiddenStore
    train: list[str]
    """Training order, without records that teach nothing."""
    unsupervised: list[str]
    """Training ids without a supervised column (https://github.com/verl-project/verl/issues/785)."""
    without_states: list[str]
    """Training ids that the extraction put aside, with its reasons in `hidden/rejects.jsonl`."""
    heldout: list[str]
    datasets: dict[str, str]
    d2t: torch.Tensor  # [D] int64 offsets
    t2d: torch.Tensor  # [V] bool

    @classmethod
    def open(cls, run: RunFolder, store: HiddenStore | None = None) -> Corpus:
        """Read order and map of `run`, states from `store` or its whole one.

        Raises `ArtifactError` where a file is missing, damaged or contradicts another."""
        datasets, teaching = _read_tokens(run.merged / "tokens.parquet")
        vocab = read_map(run.merged / "vocab_map.safetensors")
        store = HiddenStore(run.hidden) if store is None else store
        quarantined = store.quarantined()
        if quarantined:
            logger.warning("records=%d of the merged order have no states and are left out, see %s", len(quarantined), run.hidden)
        whole_order = _parquet(run.merged / "order.parquet", ["id"])["id"].to_pylist()
        order = [item for item in whole_order if item not in quarantined]
        corpus = cls(
            store=store,
            train=[record_id for record_id in order if record_id in teaching],
            without_states=sorted(set(whole_order) - set(order)),
            unsupervised=sorted({record_id for record_id in order if record_id not in teaching}),
            heldout=[
                item for item in _parquet(run.merged / "heldout.parquet", ["id"])["id"].to_pylist() if item not in quarantined
            ],
            datasets=datasets,
            d2t=vocab[0],
            t2d=vocab[1],
        )
        missing = ({*corpus.train, *corpus.heldout}) - set(store.ids())
        if missing and "disk_budget" in store.manifest.config:
            raise ArtifactError(
                f"{run.hidden} keeps only held-out states (hidden.disk_budget); to read those of training records outside of "
                "training, set hidden.disk_budget to 0 and run the extraction again"
            )
        if missing:
            raise ArtifactError(
                f"{run.hidden} lacks {len(missing)} records of the merged order, such as {min(missing)}; run the extraction again"
            )
        if not corpus.has_states and store.kind.vocabulary != digest_file(run.merged / "vocab_map.safetensors"):
            raise ArtifactError(
                f"{run.hidden} holds probabilities of another draft vocabulary than {run.merged}; run the extraction again"
            )
        if not corpus.train:
            raise ArtifactError(
                f"none of {len(order)} training records in {run.merged} has a supervised token; check merging.max_tokens"
            )
        return corpus

    @property
    def has_states(self) -> bool:
        """False where the store keeps top-k probabilities in place of final states."""
        return CODECS[self.store.kind.codec].final is not None

    def record(self, record_id: str) -> Record:
        """One record; raises `ArtifactError` naming record and layer where a state is not finite."""
        stored = self.store.record(record_id)
        return Record(
            id=record_id,
            dataset=self.datasets[record_id],
            tokens=stored.tokens,
            loss_mask=stored.loss_mask,
            aux=stored.aux,
            final=stored.final,
        )

    def epoch(self, epoch: int, seed: int, batch_tokens: int) -> list[list[str]]:
        """The batches of an epoch as lists of ids; under a disk budget none reaches over the end of a window."""
        if isinstance(self.store, WindowedStore):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            return [batch for window in self.store.windows(self.train, generator) for batch in self.pack(window, batch_tokens)]
        order = self.train
        if epoch:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = [order[index] for index in torch.randperm(len(order), generator=generator).tolist()]
        return self.pack(order, batch_tokens)

    def pack(self, ids: Sequence[str], batch_tokens: int) -> list[list[str]]:
        """Cut `ids`, in their order, into batches of at most `batch_tokens` tokens (or one record)."""
        batches: list[list[str]] = []
        room = 0
        for record_id in ids:
            size = self.store.num_tokens(record_id)
            if not batches or size > room:
                batches.append([])
                room = batch_tokens
            batches[-1].append(record_id)
            room -= size
        return batches


def read_ahead(
    corpus: Corpus, batches: Sequence[Sequence[str]], num_steps: int, device: torch.device = CPU
) -> Generator[Batch, None, None]:
    """The packed batches in order on `device`, read by one thread up to two batches ahead; a reader's error is raised here."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=READ_AHEAD)
    is_closed = threading.Event()

    def hand_over(item: Any) -> bool:
        while not is_closed.is_set():
            try:
                ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def fill() -> None:
        try:
            corpus.store.expect([record_id for ids in batches for record_id in ids])
            for ids in batches:
                batch = make_batch([corpus.record(record_id) for record_id in ids], num_steps)
                if not hand_over(batch.pinned() if device.type == "cuda" else batch):
                    return
            hand_over(None)
        except Exception as error:  # raised again by the thread that trains
            hand_over(error)

    thread = threading.Thread(target=fill, name="eyas-read-ahead", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item.to(device)
    finally:
        is_closed.set()
        thread.join()


def read_map(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t [D] int64 offsets and t2d [V] bool of a vocabulary map; raises `ArtifactError` where they contradict each other."""
    try:
        tensors = load_file(path)
        d2t, t2d = tensors["d2t"], tensors["t2d"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ArtifactError(f"{path} is no vocabulary map ({error!r}); run the merge again") from error
    check_map(d2t, t2d, str(path))
    return d2t, t2d


def check_map(d2t: torch.Tensor, t2d: torch.Tensor, where: str) -> None:
    """Refuse a map whose offsets and membership differ: i + d2t[i] must be the kept ids, ascending."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or d2t.dim() != 1 or t2d.dim() != 1:
        raise ArtifactError(
            f"{where}: d2t is {d2t.dtype} {list(d2t.shape)}, t2d {t2d.dtype} {list(t2d.shape)}; wanted int64 [D], bool [V]"
        )
    ids = torch.arange(len(d2t)) + d2t
    if not torch.equal(ids, t2d.nonzero()[:, 0]):
        raise ArtifactError(f"{where}: i + d2t[i] is not the ascending list of ids that t2d keeps; d2t must hold offsets")


def _read_tokens(path: Path) -> tuple[dict[str, str], set[str]]:
    """Dataset by id, and the ids that teach: two neighbouring generated tokens at least. Streams; tokens are not read."""
    datasets: dict[str, str] = {}
    teaching: set[str] = set()
    try:
        for batch in pq.ParquetFile(path).iter_batches(columns=["id", "dataset", "loss_mask"]):
            ids = batch.column("id").to_pylist()
            datasets.update(zip(ids, batch.column("dataset").to_pylist(), strict=True))
            masks = batch.column("loss_mask")
            flat = masks.flatten().to_numpy(zero_copy_only=False)
            starts = masks.value_lengths().to_numpy(zero_copy_only=False).cumsum()
            for record_id, mask in zip(ids, np.split(flat, starts[:-1]), strict=True):
                if bool((mask[1:] & mask[:-1]).any()):
                    teaching.add(record_id)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); run the merge again") from error
    return datasets, teaching


def _parquet(path: Path, columns: list[str]) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); run the merge again") from error
