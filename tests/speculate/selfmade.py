"""A run whose target says exactly what a given draft says: every hit is certain until something is spoilt.

Token t + 2 of a reply is the draft's own argmax at column t (on random aux states), and the target's final state at
t + 1 is a large multiple of that token's head row after the final norm. No training; a spoilt hand-over shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.draft.data import Record, make_batch
from eyas.draft.export import MODEL
from eyas.draft.model import Draft, rms_norm
from eyas.draft.spec import DraftSpec
from eyas.files import write_json
from eyas.target.spec import load_target
from eyas.workspace import RunFolder
from tests.draft.runs import D, H, V, run_config, write_run, write_target

KEPT = sorted({*range(0, 60, 2), *range(61, 96, 2)})[:D]
PROMPT, LENGTH = 4, 44


@dataclass(frozen=True, kw_only=True)
class Selfmade:
    """The parts of a run, to be spoilt before it is written."""

    config: RunConfig
    folder: Path
    spec: DraftSpec
    tensors: dict[str, torch.Tensor]
    train: list[Record]
    heldout: list[Record]

    def write(
        self,
        root: Path,
        *,
        records: Callable[[Record], Record] = lambda record: record,
        train_only: Callable[[Record], Record] = lambda record: record,
        tensors: dict[str, torch.Tensor] | None = None,
        **config: object,
    ) -> RunFolder:
        """Write the run with its export; `records` changes every record, `config` keys of the draft's config.json."""
        train = [train_only(records(record)) for record in self.train]
        run = write_run(root, self.folder, train, [records(record) for record in self.heldout], kept_ids=KEPT)
        run.export.mkdir(parents=True)
        written = {**self.tensors, **(tensors or {})}
        save_file({name: value.contiguous() for name, value in written.items()}, run.export / MODEL)
        write_json(run.export / "config.json", {**self.spec.engine_config("float32"), **config})
        return run


def make_selfmade(root: Path) -> Selfmade:
    """The draft, its target and replies that agree with it everywhere."""
    folder = write_target(root / "target", tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(11)
    path = folder / "model.safetensors"
    target = load_file(path)
    target["model.norm.weight"] = torch.randn(H, generator=generator).mul(1.5).exp().bfloat16()
    target["model.embed_tokens.weight"] = torch.randn(V, H, generator=generator).bfloat16()
    target["lm_head.weight"] = torch.randn(V, H, generator=generator).bfloat16()
    save_file(target, path)
    config = run_config(folder)
    spec = DraftSpec.from_target(load_target(config.target), config.draft, D)
    tensors = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0) + (len(shape) == 1)
        for name, shape in spec.tensor_shapes.items()
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"midlayer.self_attn.{name}.weight"] *= 3
    tensors["midlayer.self_attn.o_proj.weight"] *= 3
    tensors["norm.weight"] = target["model.norm.weight"].float()
    tensors["fc.weight"] *= torch.tensor([3.0, 2.0, 1.0]).repeat_interleave(H)
    ids = torch.tensor(KEPT)
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    tensors |= {"d2t": ids - torch.arange(D), "t2d": t2d}
    draft = Draft(spec, target["model.embed_tokens.weight"].float())
    draft.load_state_dict({name: tensors[name] for name in spec.tensor_shapes})
    records = [_reply(draft, ids, target["lm_head.weight"].float(), seed) for seed in range(14)]
    return Selfmade(config=config, folder=folder, spec=spec, tensors=tensors, train=records[:6], heldout=records[6:])


def saying(record: Record, tokens: torch.Tensor, lm_head: torch.Tensor) -> Record:
    """The same record whose target says `tokens` [T + 1] one after another."""
    rows = lm_head[tokens[1:].long()]
    final = 40 * rows / rows.square().sum(-1, keepdim=True).sqrt()
    return Record(
        id=record.id,
        dataset=record.dataset,
        tokens=tokens[:-1].int(),
        loss_mask=record.loss_mask,
        aux=record.aux,
        final=final.bfloat16(),
    )


@torch.no_grad()
def _reply(draft: Draft, ids: torch.Tensor, lm_head: torch.Tensor, seed: int) -> Record:
    generator = torch.Generator().manual_seed(100 + seed)
    aux = torch.randn(LENGTH, 3 * H, generator=generator).bfloat16()
    tokens = ids[torch.randint(0, D, (LENGTH + 1,), generator=generator)]
    mask = torch.tensor([0] * PROMPT + [1] * (LENGTH - PROMPT), dtype=torch.uint8)
    record = Record(id=f"{seed:032x}", dataset="a", tokens=tokens[:-1].int(), loss_mask=mask, aux=aux, final=aux[:, :H])
    for column in range(PROMPT - 1, LENGTH - 1):  # token column + 2 follows from what the draft sees up to column
        seen = Record(
            id="",
            dataset="",
            tokens=tokens[: column + 3],
            loss_mask=torch.ones(column + 3),
            aux=aux[: column + 3],
            final=aux[: column + 3, :H],
        )
        state = draft.unroll(make_batch([seen], 1), 1)[0, column]
        tokens[column + 2] = ids[(rms_norm(state, draft.norm.weight, draft.spec.rms_norm_eps) @ draft.lm_head.weight.T).argmax()]
    return saying(record, tokens, lm_head)
