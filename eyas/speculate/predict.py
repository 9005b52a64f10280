"""The accept length that the replay predicts on the very replies that are served, for comparison.

The target runs over each reply once, in this process and in the served precision; its three states per
token (outputs of blocks `aux_blocks`) go to the draft, and the draft's argmax is held against the reply's
own tokens: they are the target's argmax, for the replies are greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import DynamicCache

from eyas.draft.data import Batch, Record, make_batch
from eyas.draft.export import load_export
from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft, rms_norm
from eyas.draft.replay import replay
from eyas.speculate.accept import AcceptCounts
from eyas.speculate.layers import Counts, possible_counts
from eyas.target.spec import TargetSpec


class Predictor:
    """Replays an exported draft against `model`, the target as a `transformers` causal model.

    `shift` reads every layer so many blocks higher: what an engine with another convention of layer ids would do.
    """

    def __init__(self, export: Path, spec: TargetSpec, model: Any, num_draft_tokens: int, *, shift: int = 0) -> None:
        draft_spec, tensors = load_export(export)
        lm_head = model.get_output_embeddings().weight.detach()  # [V, H]
        self._model, self._num_draft_tokens = model, num_draft_tokens
        self._blocks = [block + shift for block in spec.aux_blocks]
        self._rows = TargetRows.of(lm_head, tensors["d2t"])
        self._draft = Draft(draft_spec, model.get_input_embeddings().weight.detach(), lm_head.dtype)
        self._draft.load_state_dict({name: tensors[name] for name in draft_spec.tensor_shapes})

    def counts(self, replies: Sequence[tuple[list[int], list[int]]]) -> list[AcceptCounts]:
        """Replay counts of each (prompt ids, greedy reply ids)."""
        return [self._replay(prompt, reply) for prompt, reply in replies]

    @torch.inference_mode()
    def possible(self, prompt: list[int], reply: list[int]) -> frozenset[Counts]:
        """Every count that the chain can have on a greedy reply, ties of the draft falling either way."""
        batch, argmax = self._batch(prompt, reply, len(prompt) + len(reply))
        if not len(batch.active):  # a reply of one token came from the prefill alone
            return frozenset({(0, 0)})
        again, _ = self._batch(prompt, reply, len(prompt))
        logits = self._logits(batch)  # [K, M, D]
        epsilon = (logits - self._logits(again)).abs().amax(-1)  # [K, M]
        num_steps, num_columns = epsilon.shape
        wanted = torch.full((num_steps, num_columns), -1)  # draft ids, -1 outside the draft vocabulary
        for step in range(min(num_steps, num_columns)):
            wanted[step, : num_columns - step] = self._rows.to_draft[argmax][step:]
        top = logits.topk(2).values
        chosen = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        hits = (logits.argmax(-1) == wanted) & batch.supervised
        gap = torch.where(hits, top[..., 0] - top[..., 1], top[..., 0] - chosen)
        return possible_counts(hits, (gap <= epsilon) & (wanted >= 0), batch.supervised)

    @torch.inference_mode()
    def _replay(self, prompt: list[int], reply: list[int]) -> AcceptCounts:
        counts = replay(self._draft, [self._batch(prompt, reply, len(prompt) + len(reply))], self._rows).overall
        return AcceptCounts(verifications=counts.verifications, accepted=counts.accepted)

    def _batch(self, prompt: list[int], reply: list[int], at_once: int) -> tuple[Batch, torch.Tensor]:
        """One packed reply, the target run on `at_once` tokens and then on K + 1 at a time; the argmax of its label rows."""
        tokens = torch.tensor([*prompt, *reply])  # [T]
        cache = DynamicCache(config=self._model.config)
        parts = [tokens[:at_once], *torch.split(tokens[at_once:], self._num_draft_tokens + 1)]
        # hidden_states[0] is the embedding, so [k + 1] is the output of block k; the last one is normed, but no aux block is last.
        aux = torch.cat([self._states(part, cache) for part in parts if len(part)])  # [T, 3H]
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        mask[len(prompt) :] = True
        record = Record(id="", dataset="", tokens=tokens, loss_mask=mask, aux=aux, final=aux[:, :0])
        batch = make_batch([record], self._num_draft_tokens)
        first = len(prompt) - 1  # the first active column t, whose label row is x[t+2]
        return batch, tokens[first + 2 : first + 2 + len(batch.active)]

    def _states(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Outputs of the aux blocks [len(tokens), 3H]; `cache` holds the tokens before."""
        states = self._model(
            input_ids=tokens[None], cache=cache, use_cache=True, output_hidden_states=True, logits_to_keep=1
        ).hidden_states
        return torch.cat([states[block + 1][0] for block in self._blocks], dim=-1)

    def _logits(self, batch: Batch) -> torch.Tensor:
        """The draft's logits [K, M, D] in fp32, computed in its own precision."""
        states = self._draft.unroll(batch, len(batch.supervised))
        weight, eps = self._draft.norm.weight, self._draft.spec.rms_norm_eps
        return torch.stack([F.linear(rms_norm(state, weight, eps), self._draft.lm_head.weight).float() for state in states])
