"""Steps that verify K drafts per request at once and draft the next K, in continuous batching.

One pass of the target takes K + 1 rows of every decoding request (and pieces of prompts beside them); the draft then
runs once over the same rows, where tokens that were not accepted leave entries that the next step writes over before
anything reads them, and K - 1 times over one row per request.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.engine.attention import Rows
from eyas.engine.draft_model import DraftModel
from eyas.engine.drawing import draw, filtered_probs, uniform
from eyas.engine.model import Step, TargetModel
from eyas.engine.pages import PagePool
from eyas.engine.request import Request
from eyas.engine.runner import TargetRunner, gather_logprobs
from eyas.engine.sampling import apply_rules
from eyas.speculate.decoding import accept_greedy, accept_sampled, draft_chain


class SpeculativeRunner(TargetRunner):
    """A `TargetRunner` that gives 1 to K + 1 tokens per request and step; the pool's last layer is the draft's."""

    def __init__(self, model: TargetModel, draft: DraftModel, pool: PagePool, end_ids: set[int], num_drafts: int) -> None:
        super().__init__(model, pool, end_ids)
        self.draft, self.num_drafts = draft, num_drafts
        self.tokens_per_step = 2 * num_drafts  # the verified rows, and the chain that follows a fully accepted one

    @torch.inference_mode()
    def step(self, decoding: list[Request], pieces: list[tuple[Request, int]]) -> list[tuple[Request, list[int]]]:
        """One verification of each of `decoding`, and `pieces` of prompts; returns the new tokens of those that got some."""
        batch = self.build_batch([[request.output_ids[-1], *request.drafts] for request in decoding], decoding, pieces)
        final, aux = self.model.forward(batch, self.pool.layers, wants_aux=True)
        assert aux is not None
        finished = self.end_pieces(pieces, batch, final)
        results = [*self._verify(decoding, final[: len(decoding) * (self.num_drafts + 1)])]
        if finished:
            rows = torch.tensor([row for _, row in finished])
            tokens = self.next_tokens(self.model.lm_head(final[rows]), [request for request, _ in finished])
            results += [(request, [token]) for (request, _), token in zip(finished, tokens, strict=True)]
        self._propose(decoding, pieces, batch, aux, results)
        return results

    def _verify(self, decoding: list[Request], final: Tensor) -> list[tuple[Request, list[int]]]:
        if not decoding:
            return []
        width = self.num_drafts + 1
        logits = self.model.lm_head(final)  # [B*(K+1), V]
        best = logits.max(-1).indices.view(-1, width).tolist()
        results = []
        for index, request in enumerate(decoding):
            params = request.params
            rows = logits[index * width : (index + 1) * width]
            if params.is_greedy and not params.has_logit_rules:
                tokens = accept_greedy(request.drafts, best[index])
            else:
                tokens = self._accept(request, rows.float())
            if request.logprob_options is not None:
                gather_logprobs(request, request.output_logprobs, rows[: len(tokens)], tokens)
            results.append((request, tokens))
        return results

    def _accept(self, request: Request, logits: Tensor) -> list[int]:
        params, drafts = request.params, request.drafts
        for row, known in zip(logits, range(len(drafts) + 1), strict=True):
            apply_rules(row, params, request.prompt_ids, [*request.output_ids, *drafts[:known]], self.end_ids)
        if params.is_greedy:
            return accept_greedy(drafts, logits.max(-1).indices.tolist())
        probs = filtered_probs(logits, [params] * logits.shape[0])
        places = range(request.num_tokens, request.num_tokens + logits.shape[0])
        numbers = [(uniform(request.seed, 2 * place), uniform(request.seed, 2 * place + 1)) for place in places]
        return accept_sampled(drafts, probs, numbers, draw)

    def _propose(
        self,
        decoding: list[Request],
        pieces: list[tuple[Request, int]],
        batch: Step,
        aux: Tensor,
        results: list[tuple[Request, list[int]]],
    ) -> None:
        """Draft over the rows of `batch`, then chain; leaves the K proposals in each request's `drafts`."""
        new_tokens = {id(request): tokens for request, tokens in results}
        width = self.num_drafts + 1
        following: list[int] = []  # the token after each row's
        last_rows = []
        for index, request in enumerate(decoding):
            tokens = new_tokens[id(request)]
            last_rows.append(index * width + len(tokens) - 1)
            following += [*tokens, *[0] * (width - len(tokens))]
        for (request, _), rows in zip(pieces, batch.prompts, strict=True):
            first = rows.first + 1
            after = request.prompt_ids[first : first + rows.stop - rows.start]
            if len(after) < rows.stop - rows.start:
                after = [*after, *new_tokens[id(request)]]
                last_rows.append(rows.stop - 1)
            following += after
        cache = self.pool.layers[-1]
        shifted = replace(batch, token_ids=torch.tensor(following))
        states = self.draft.forward(shifted, self.draft.fuse(aux), cache)
        owners = [request for request, _ in results]
        if not owners:
            return
        places = np.array([request.num_tokens + len(tokens) - 2 for request, tokens in results])  # column m - 2

        def advance(step: int, tokens: Tensor, before: Tensor) -> Tensor:
            return self.draft.forward(self._chain_step(owners, places + step, tokens), before, cache)

        chain = draft_chain(
            states[torch.tensor(last_rows)], num_drafts=self.num_drafts, propose=self.draft.propose, advance=advance
        )
        for request, drafts in zip(owners, chain.tolist(), strict=True):
            request.drafts = drafts

    def _chain_step(self, owners: list[Request], positions: np.ndarray, tokens: Tensor) -> Step:
        places = enumerate(zip(owners, positions.tolist(), strict=True))
        rows = [Rows(start=row, stop=row + 1, first=first, pages=request.pages) for row, (request, first) in places]
        return Step.of(tokens, rows, [])
