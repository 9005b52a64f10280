"""Training speed of the draft beside a textbook implementation, on the same random states of the embedded target's shape.

    python -m benchmarks.train [--unroll 4] [--batch-tokens 2048] [--steps 6] [--peers build/peers]

Each implementation runs in a process of its own; peak memory is the process's, and beside it stands what was there before
the model was made (Python and torch). The textbook one is the
usual training-time test: a dense [T, S·T] mask, every step's keys kept in one growing cache, head and
cross-entropy at every position in fp32, fp32 parameters, under bf16 autocast where the machine multiplies bf16 in
hardware, AdamW. Everybody computes in the precision that is native to the machine. Positions are all
tokens of the records; a third of each is prompt. `--peers` adds the projects of `train_peers.py`, each in an
environment of its own in that folder, made from the package index on first use (minutes, 1 GB each).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import venv
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from eyas.draft.config import DraftConfig
from eyas.draft.data import Record, make_batch
from eyas.draft.loss import LossResult, TargetRows, kept_rows, unrolled_loss
from eyas.draft.model import Draft, rms_norm
from eyas.draft.optimizer import MasterAdamW
from eyas.draft.spec import DraftSpec
from eyas.target.precision import native_dtype

H, V, D = 576, 49_152, 8_192
DECAY = 0.8
PEER_FILE = str(Path(__file__).with_name("train_peers.py"))
PEERS = {
    "specforge": (
        "0.2.0",
        [
            "install torch==2.13.0 transformers accelerate pydantic PyYAML tqdm datasets numpy safetensors",
            "install --no-deps specforge==0.2.0",
        ],
    ),
    "speculators": ("0.9.0", ["install torch==2.13.0 speculators==0.9.0", "uninstall --yes torchvision torchaudio"]),
}
"""Version, and what pip does in the peer's own environment (torchvision may be built for another torch, and is not needed)."""


def draft_spec() -> DraftSpec:
    """The draft of SmolLM2-135M."""
    return DraftSpec(
        hidden_size=H,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        rope_scaling=None,
        context_length=8192,
        vocab_size=V,
        draft_vocab_size=D,
        aux_blocks=(1, 14, 26),
    )


def records(batch_tokens: int, length: int) -> list[Record]:
    """Records of about `length` tokens, a third of it prompt, `batch_tokens` in all."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, batch_tokens // length)
    made = []
    for index in range(count):
        size = batch_tokens // count
        made.append(
            Record(
                id=str(index),
                dataset="random",
                tokens=torch.randint(0, D, (size,), generator=generator),
                loss_mask=(torch.arange(size) >= size // 3).to(torch.uint8),
                aux=torch.randn(size, 3 * H, generator=generator).bfloat16(),
                final=torch.randn(size, H, generator=generator).bfloat16(),
            )
        )
    return made


class Eyas:
    """One optimizer step of `eyas.draft`."""

    def __init__(self, unroll: int, dtype: torch.dtype, recompute: bool) -> None:
        torch.manual_seed(0)
        self.recompute = recompute
        head = (torch.randn(V, H) * 0.02).to(dtype)
        self.unroll, self.rows = unroll, TargetRows.of(head, torch.zeros(D, dtype=torch.int64))
        self.draft = Draft(draft_spec(), head)
        self.optimizer = MasterAdamW(self.draft, DraftConfig(), dtype, {})

    def step(self, data: list[Record]) -> None:
        batch = make_batch(data, self.unroll)
        argmax = batch.tokens[batch.active]  # kept from the first epoch in a real run
        kept = kept_rows(batch.supervised, argmax, self.rows).sum(1)

        def compute() -> LossResult:
            states = self.draft.unroll(batch, self.unroll, recompute=self.recompute)
            return unrolled_loss(
                rms_norm(states, self.draft.norm.weight, 1e-5),
                self.draft.lm_head.weight,
                batch.labels,
                argmax,
                batch.supervised,
                self.rows,
                step_weights=DECAY ** torch.arange(self.unroll) / kept.clamp(min=1),
                wants_hits=False,
            )

        self.optimizer.run(compute)
        self.optimizer.step(1e-4)


class Textbook:
    """The same training as it is usually written: padded batch, dense mask, fp32 loss at every position."""

    def __init__(self, unroll: int) -> None:
        torch.manual_seed(0)
        head = torch.randn(V, H) * 0.02
        self.unroll, self.head, self.draft = unroll, head[:D].contiguous(), Draft(draft_spec(), head)
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=1e-4)

    def step(self, data: list[Record]) -> None:
        tokens, mask = torch.stack([item.tokens for item in data]), torch.stack([item.loss_mask for item in data])
        aux, final = torch.stack([item.aux for item in data]).float(), torch.stack([item.final for item in data]).float()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=native_dtype() == "bfloat16"):
            loss = self.loss(tokens, mask, aux, final)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()

    def loss(self, tokens: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        draft, layer, size = self.draft, self.draft.midlayer, tokens.shape[1]
        attention = layer.self_attn
        target = (final @ self.head.T).float().softmax(-1)  # [B, T, D]
        state, keys, values, total = draft.fc(aux), [], [], torch.zeros(())
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        for step in range(self.unroll):
            shifted = torch.roll(tokens, -1 - step, 1)
            mixed = torch.cat([layer.input_layernorm(draft.embed_tokens[shifted]), layer.hidden_norm(state)], -1)
            position = (torch.arange(size) + step).repeat(len(tokens))
            q, k, v = (attention[f"{name}_proj"](mixed).flatten(0, 1).unflatten(-1, (-1, 64)) for name in "qkv")
            q, k, v = (
                x.unflatten(0, (-1, size)).transpose(1, 2) for x in (draft.rotary(q, position), draft.rotary(k, position), v)
            )
            keys.append(k)
            values.append(v)
            dense = torch.cat([causal] + [torch.eye(size, dtype=torch.bool)] * step, 1)  # [T, S · T]
            out = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=dense, enable_gqa=True)
            state = state + attention["o_proj"](out.transpose(1, 2).flatten(2))
            normed = layer.post_attention_layernorm(state)
            state = state + layer.mlp["down_proj"](F.silu(layer.mlp["gate_proj"](normed)) * layer.mlp["up_proj"](normed))
            logits = draft.lm_head(draft.norm(state)).float()
            supervised = torch.roll(mask, -2 - step, 1).float()
            losses = -(torch.roll(target, -1 - step, 1) * logits.log_softmax(-1)).sum(-1)
            total = total + DECAY**step * (losses * supervised).sum() / supervised.sum()
        return total


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Positions per second (median step) and peak memory of one implementation, in this process."""
    imported_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    trainer: Eyas | Textbook = (
        Textbook(options.unroll) if name == "textbook" else Eyas(options.unroll, getattr(torch, name), options.recompute)
    )
    data = records(options.batch_tokens, options.length)
    seconds = []
    for _ in range(options.steps + 1):
        begun = time.perf_counter()
        trainer.step(data)
        seconds.append(time.perf_counter() - begun)
    positions = sum(len(item.tokens) for item in data)
    middle = sorted(seconds[1:])[options.steps // 2]
    return {
        "positions_per_s": positions / middle,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "imported_mb": imported_mb,
        "matrix_rate_gflops": flops(data, options.unroll) / middle / 1e9,
    }


def flops_per_position(options: argparse.Namespace) -> float:
    """The same work for everybody, in GFLOP per position."""
    data = records(options.batch_tokens, options.length)
    return flops(data, options.unroll) / sum(len(item.tokens) for item in data) / 1e9


def peer_python(folder: Path, name: str) -> str:
    """Python of the environment of a peer, which is made where it is missing."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        print(f"making an environment for {name}=={PEERS[name][0]} in {folder}", flush=True)
        venv.create(folder / name, with_pip=True)
        for arguments in PEERS[name][1]:
            subprocess.run([str(python), "-m", "pip", "--quiet", *arguments.split()], check=True, capture_output=True)
    return str(python)


def flops(data: list[Record], unroll: int) -> float:
    """Floating-point operations of the matrix products that this training needs at least, attention aside."""
    keys = sum(len(item.tokens) for item in data)
    columns = sum(int(item.loss_mask.sum()) for item in data)
    kv = 2 * 192 * 2 * H
    layer = 2 * H * (576 + 384) + 576 * H + 3 * 1536 * H
    per_column = (layer - kv) + (unroll - 1) * layer + unroll * D * H
    return 6.0 * (keys * (3 * H * H + kv) + columns * per_column) + 2.0 * columns * D * H


def matrix_rate(dtype: torch.dtype) -> float:
    """The machine's rate on a large product, in GFLOP/s."""
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    best = float("inf")
    for _ in range(6):
        begun = time.perf_counter()
        F.linear(a, b)
        best = min(best, time.perf_counter() - begun)
    return 2 * 2048**3 / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unroll", type=int, default=4, help="unroll steps")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="positions of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a record")
    parser.add_argument("--steps", type=int, default=6, help="timed optimizer steps")
    parser.add_argument("--recompute", action="store_true", help="compute unroll steps again in the backward pass")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments; measures them too")
    parser.add_argument("--only", choices=["textbook", "bfloat16", "float32"], help="measure one implementation in this process")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    native = native_dtype()
    rate = matrix_rate(getattr(torch, native))
    print(f"unroll {options.unroll}, {options.batch_tokens} positions a batch, records of {options.length}")
    print(f"this machine multiplies {native} matrices at {rate:.0f} GFLOP/s")
    results = {}
    shape = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in ("unroll", "batch_tokens", "length", "steps")]
    ours = [sys.executable, "-m", "benchmarks.train", *shape, *(["--recompute"] if options.recompute else [])]
    commands = {name: [*ours, "--only", name] for name in dict.fromkeys(("textbook", native, "float32"))}
    if options.peers is not None:
        commands |= {name: [peer_python(options.peers, name), PEER_FILE, name, *shape, f"--dtype={native}"] for name in PEERS}
    for name, command in commands.items():
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"} if name in PEERS else None
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{name}: did not run: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
            continue
        found = results[name] = json.loads(done.stdout.splitlines()[-1])
        found.setdefault("matrix_rate_gflops", found["positions_per_s"] * flops_per_position(options))
        print(
            f"{name:9s} {found['positions_per_s']:7.0f} positions/s  {found['peak_rss_mb']:6.0f} MB "
            f"({found['peak_rss_mb'] / results['textbook']['peak_rss_mb']:.2f}x)  "
            f"{found['matrix_rate_gflops'] / rate:5.1%} of the matrix rate  "
            f"{found['positions_per_s'] / results['textbook']['positions_per_s']:.2f}x the textbook",
            flush=True,
        )


if __name__ == "__main__":
    main()
