"""Held-out replies on which variants of a draft are counted at unroll step 0, all on the same columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eyas.draft.corpus import Corpus
from eyas.draft.data import Batch, Record, make_batch
from eyas.draft.loss import TargetRows, target_argmax
from eyas.draft.model import Draft, rms_norm
from eyas.hidden.store.top import top_argmax


@dataclass(frozen=True, kw_only=True)
class HitCounts:
    """Columns where the draft's argmax is the target's, of `total`."""

    hits: int
    total: int

    @property
    def rate(self) -> float:
        """Share of hits."""
        return self.hits / self.total if self.total else 0.0

    @property
    def error(self) -> float:
        """Standard error of `rate`, columns taken as independent."""
        return float((self.rate * (1 - self.rate) / max(1, self.total)) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Records with the target's argmax after every position; columns whose labels would shift out are left out."""

    records: tuple[Record, ...]
    argmax: tuple[torch.Tensor, ...]  # [T] each: the target's choice after position t
    lm_head: torch.Tensor  # [V, H]
    has_states: bool = True
    """False where the store keeps top-k probabilities in place of final states."""

    def hits(self, draft: Draft, rows: TargetRows, *, tokens: int = 0, aux: int = 0, labels: int = 0) -> HitCounts:
        """Count with one stream shifted: column t is shown what stands `tokens` or `aux` later, and held against `labels` later."""
        guesses, wanted = self._guesses(draft, rows, tokens=tokens, aux=aux, labels=labels)
        return HitCounts(hits=int((rows.ids[guesses] == wanted).sum()), total=len(wanted))

    def by_position(self, draft: Draft, rows: TargetRows) -> tuple[HitCounts, HitCounts, int]:
        """Hits before and after the position that halves the columns."""
        batch, guesses, wanted = self._run(draft, rows)
        positions = batch.positions[batch.active][batch.supervised[0]]
        limit = int(positions.median())
        is_hit, is_late = rows.ids[guesses] == wanted, positions > limit
        early = HitCounts(hits=int(is_hit[~is_late].sum()), total=int((~is_late).sum()))
        return early, HitCounts(hits=int(is_hit[is_late].sum()), total=int(is_late.sum())), limit

    def relabelled(self, draft: Draft, rows: TargetRows) -> tuple[float, float]:
        """Hit rate on every second column by the draft's map, and by the meaning each id had most often in the others."""
        guesses, wanted = self._guesses(draft, rows)
        meaning = rows.ids.clone()
        for draft_id in set(guesses[::2].tolist()):
            values, counts = torch.unique(wanted[::2][guesses[::2] == draft_id], return_counts=True)
            if int(counts.max()) > 1:
                meaning[draft_id] = values[counts.argmax()]
        told = float((rows.ids[guesses[1::2]] == wanted[1::2]).float().mean())
        return told, float((meaning[guesses[1::2]] == wanted[1::2]).float().mean())

    def coverage(self, rows: TargetRows) -> float:
        """Share of the target's choices at supervised places that the draft's vocabulary holds."""
        wanted = torch.cat(
            [chosen[:-1][record.loss_mask[1:].bool()] for record, chosen in zip(self.records, self.argmax, strict=True)]
        )
        return float((rows.to_draft[wanted] >= 0).float().mean())

    def agreement(self, shift: int, *, norm: torch.Tensor | None = None, eps: float = 0.0) -> float:
        """Share of generated tokens that the target's argmax `shift` places later gives; after `norm` [H] where one is given."""
        hits = total = 0
        for record, chosen in zip(self.records, self.argmax, strict=True):
            if norm is not None and self.has_states:
                chosen = target_argmax(rms_norm(record.final.float(), norm, eps), self.lm_head, is_exact=True)
            places = torch.arange(1, len(record.tokens))[record.loss_mask[1:].bool()]
            sources = places - 1 + shift
            places = places[(sources >= 0) & (sources < len(chosen))]
            hits += int((chosen[places - 1 + shift] == record.tokens[places]).sum())
            total += len(places)
        return hits / max(1, total)

    def with_layers(self, order: tuple[int, ...]) -> Sample:
        """The aux states in another order."""
        return self.with_aux([torch.cat([record.aux.chunk(3, -1)[index] for index in order], -1) for record in self.records])

    def with_aux(self, aux: Sequence[torch.Tensor]) -> Sample:
        """Other aux states [T, 3H], one for each record."""
        return replace(self, records=tuple(replace(record, aux=item) for record, item in zip(self.records, aux, strict=True)))

    def _guesses(
        self, draft: Draft, rows: TargetRows, *, tokens: int = 0, aux: int = 0, labels: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, guesses, wanted = self._run(draft, rows, tokens=tokens, aux=aux, labels=labels)
        return guesses, wanted

    @torch.no_grad()
    def _run(
        self, draft: Draft, rows: TargetRows, *, tokens: int = 0, aux: int = 0, labels: int = 0
    ) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """The batch, the draft's guesses (draft ids) and the target's choices (target ids) at supervised columns."""
        shifted = [replace(record, tokens=record.tokens.roll(-tokens, 0), aux=record.aux.roll(-aux, 0)) for record in self.records]
        batch = make_batch(shifted, 1)
        state = draft.unroll(batch, 1)[0][batch.supervised[0]]
        normed = rms_norm(state, draft.norm.weight, draft.spec.rms_norm_eps)
        guesses = torch.cat([(part @ draft.lm_head.weight.T).argmax(-1) for part in torch.split(normed, 1024)])
        chosen = dict(zip((record.id for record in self.records), self.argmax, strict=True))
        wanted = []
        for record_id, segment in zip(batch.segment_ids, batch.segments, strict=True):
            columns = batch.positions[batch.active[segment.query_start : segment.query_end]]
            wanted.append(chosen[record_id].roll(-labels, 0)[columns + 1])
        return batch, guesses, torch.cat(wanted)[batch.supervised[0]]


def take_sample(corpus: Corpus, ids: Sequence[str], lm_head: torch.Tensor) -> Sample:
    """The records `ids` of `corpus` with the target's argmax, exact, after every position."""
    records = tuple(corpus.record(item) for item in ids)
    return Sample(
        records=records,
        argmax=tuple(
            target_argmax(record.final, lm_head, is_exact=True) if corpus.has_states else top_argmax(record.final)
            for record in records
        ),
        lm_head=lm_head,
        has_states=corpus.has_states,
    )
