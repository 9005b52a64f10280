"""What a step computes: the batch of rows, the forward pass, and the next token of every request.

Greedy rows without rules take the argmax of the head's own output (by `max`, which takes the first of equals too and is
5 times faster than `argmax` in bf16); all others are drawn from fp32 probabilities
with the uniform number of (seed, position). Log-probabilities are fp32, of the target's own distribution before
temperature and rules, as SGLang gives them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.engine.attention import Rows
from eyas.engine.drawing import sample, uniform
from eyas.engine.model import Step, TargetModel
from eyas.engine.pages import PAGE, PagePool, page_keys
from eyas.engine.request import Logprobs, Request
from eyas.engine.sampling import apply_rules


class TargetRunner:
    """Runs a `TargetModel` over a `PagePool`, one token per request and step."""

    tokens_per_step = 1
    num_drafts = 0

    def __init__(self, model: TargetModel, pool: PagePool, end_ids: set[int]) -> None:
        self.model, self.pool, self.end_ids = model, pool, end_ids
        self.num_pages = pool.num_pages

    def page_keys(self, request: Request) -> list[bytes]:
        """Keys of the prompt's full pages; a request that wants the prompt's log-probabilities shares none."""
        if request.logprob_options is not None and request.logprob_options.start >= 0:
            return []
        return page_keys(request.prompt_ids, lookahead=min(1, self.num_drafts), namespace=request.namespace)

    def first_unknown(self, keys: list[bytes]) -> bytes | None:
        """The first of `keys` whose page is nowhere in the cache, or None."""
        num_known = len(self.pool.find_prefix(keys))
        return keys[num_known] if num_known < len(keys) else None

    def reuse_prefix(self, request: Request, count: int) -> None:
        """Take `count` pages and copy the longest known head of the prompt into them."""
        sources = self.pool.find_prefix(request.page_keys)
        request.pages = self.pool.take(count)
        self.pool.copy_prefix(request.page_keys, request.pages, sources)
        request.num_cached = request.num_computed = len(sources) * PAGE

    def take_pages(self, count: int) -> list[int] | None:
        """`count` free pages, or None if there are fewer."""
        return self.pool.take(count) if count <= self.pool.num_free else None

    def give_back(self, pages: list[int]) -> None:
        """Return pages to the pool."""
        self.pool.give_back(pages)

    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self.pool.num_free

    def forget_prefixes(self) -> None:
        """Share no page of a past prompt any more."""
        self.pool.forget_all()

    @torch.inference_mode()
    def step(self, decoding: list[Request], pieces: list[tuple[Request, int]]) -> list[tuple[Request, list[int]]]:
        """One token of each of `decoding`, and `pieces` of prompts; returns the new tokens of those that got one."""
        batch = self.build_batch([[request.output_ids[-1]] for request in decoding], decoding, pieces)
        final, _ = self.model.forward(batch, self.pool.layers)
        finished = self.end_pieces(pieces, batch, final)
        rows = torch.cat([torch.arange(len(decoding)), torch.tensor([row for _, row in finished], dtype=torch.long)])
        owners = [*decoding, *(request for request, _ in finished)]
        if not owners:
            return []
        tokens = self.next_tokens(self.model.lm_head(final[rows]), owners)
        return [(request, [token]) for request, token in zip(owners, tokens, strict=True)]

    def build_batch(self, inputs: list[list[int]], decoding: list[Request], pieces: list[tuple[Request, int]]) -> Step:
        """The rows of a step: `inputs` (Q tokens of each decoding request, from its last one on), then the pieces."""
        tokens: list[int] = []
        rows: list[Rows] = []
        prompts: list[Rows] = []

        def add(into: list[Rows], request: Request, first: int, new: list[int]) -> None:
            into.append(Rows(start=len(tokens), stop=len(tokens) + len(new), first=first, pages=request.pages))
            tokens.extend(new)

        for request, new in zip(decoding, inputs, strict=True):
            add(rows, request, request.num_tokens - 1, new)
        for request, count in pieces:
            first = request.num_computed
            add(prompts, request, first, request.prompt_ids[first : first + count])
        return Step.of(torch.tensor(tokens), rows, prompts)

    def end_pieces(self, pieces: list[tuple[Request, int]], batch: Step, final: Tensor) -> list[tuple[Request, int]]:
        """Book the computed pieces; returns (request, row of its last prompt token) of the prompts that are now complete."""
        finished = []
        for (request, count), rows in zip(pieces, batch.prompts, strict=True):
            self._input_logprobs(request, final[rows.start : rows.stop])
            request.num_computed += count
            self.pool.remember(request.page_keys[: request.num_computed // PAGE], request.pages)
            if request.is_prefilled:
                finished.append((request, rows.stop - 1))
        return finished

    def next_tokens(self, logits: Tensor, owners: list[Request]) -> list[int]:
        """The next token of every request in `owners` from its row of `logits` [N, V]."""
        plain = [i for i, request in enumerate(owners) if not request.params.has_logit_rules]
        chosen = dict(zip(plain, self._choose(logits, plain, owners), strict=True))
        for i, request in enumerate(owners):
            if i not in chosen:
                changed = logits[i].float()
                apply_rules(changed, request.params, request.prompt_ids, request.output_ids, self.end_ids)
                chosen[i] = self._choose(changed[None], [0], [request])[0]
        tokens = [chosen[i] for i in range(len(owners))]
        for i, request in enumerate(owners):
            if request.logprob_options is not None:
                gather_logprobs(request, request.output_logprobs, logits[i : i + 1], [tokens[i]])
        return tokens

    def _choose(self, logits: Tensor, rows: list[int], owners: list[Request]) -> list[int]:
        """A token from each of `rows` of `logits` for the request in the same place of `owners`."""
        greedy = [row for row in rows if owners[row].params.is_greedy]
        best = logits if len(greedy) == len(logits) else logits[greedy]
        chosen = dict(zip(greedy, best.max(-1).indices.tolist(), strict=True)) if greedy else {}
        drawn = [row for row in rows if row not in chosen]
        if drawn:
            numbers = [uniform(owners[row].seed, owners[row].num_tokens) for row in drawn]
            chosen |= dict(zip(drawn, sample(logits, drawn, [owners[row].params for row in drawn], numbers), strict=True))
        return [chosen[row] for row in rows]

    def _input_logprobs(self, request: Request, final: Tensor) -> None:
        options = request.logprob_options
        if options is None or options.start < 0:
            return
        first, last = request.num_computed, request.num_computed + final.shape[0]
        if first <= options.start < last and not request.input_logprobs.tokens:
            # the token at the start has no probability where nothing stands before it or its row was not asked for
            request.input_logprobs.tokens.append((None, request.prompt_ids[options.start]))
            request.input_logprobs.top.append(None)
            request.input_logprobs.asked.append(None)
        begin = max(first, options.start)
        following = request.prompt_ids[begin + 1 : last + 1]
        if begin < last and following:
            rows = final[begin - first : begin - first + len(following)]
            gather_logprobs(request, request.input_logprobs, self.model.lm_head(rows), following)


def gather_logprobs(request: Request, into: Logprobs, logits: Tensor, tokens: list[int]) -> None:
    """Append the log-probabilities of `tokens` [N] under `logits` [N, V] and whatever else the request asked for."""
    options = request.logprob_options
    assert options is not None
    logprobs = torch.log_softmax(logits.float(), -1)
    own = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    into.tokens.extend(zip(own, tokens, strict=True))
    if options.num_top:
        values, ids = logprobs.topk(min(options.num_top, logprobs.shape[-1]))
        into.top.extend(list(zip(v, i, strict=True)) for v, i in zip(values.tolist(), ids.tolist(), strict=True))
    if options.token_ids:
        asked = logprobs[:, options.token_ids].tolist()
        into.asked.extend(list(zip(row, options.token_ids, strict=True)) for row in asked)
