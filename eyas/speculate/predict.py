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

from eyas.draft.data import Record, make_batch
from eyas.draft.export import load_export
from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft
from eyas.draft.replay import replay
from eyas.speculate.accept import AcceptCounts
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
    def _replay(self, prompt: list[int], reply: list[int]) -> AcceptCounts:
        tokens = torch.tensor([*prompt, *reply])  # [T]
        states = self._model(input_ids=tokens[None], output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        # hidden_states[0] is the embedding, so [k + 1] is the output of block k; the last one is normed, but no aux block is last.
        aux = torch.cat([states[block + 1][0] for block in self._blocks], dim=-1)  # [T, 3H]
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        mask[len(prompt) :] = True
        record = Record(id="", dataset="", tokens=tokens, loss_mask=mask, aux=aux, final=aux[:, :0])
        batch = make_batch([record], self._num_draft_tokens)
        first = len(prompt) - 1  # the first active column t, whose label row is x[t+2]
        argmax = tokens[first + 2 : first + 2 + len(batch.active)]
        counts = replay(self._draft, [(batch, argmax)], self._rows).overall
        return AcceptCounts(verifications=counts.verifications, accepted=counts.accepted)
