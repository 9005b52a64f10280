"""What a verification and a draft step cost beside a plain step, per dtype, and how much of the possible gain is reached.

    python -m benchmarks.speculate --draft DIR [--draft-tokens 3] [--batch 1]

With accept length a, plain step d, verification v and drafting c, the machine allows a speed-up of a / ((v + c) / d).
Printed: d, v, c in milliseconds (medians, measured on the models alone), the tokens per second of both runners through
the scheduler on the same prompts, and their ratio as a share of what is allowed. A random draft has a = 1: the share
still shows the overhead per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # some µs: passive alone pays a wake-up for every small operation

import torch
from torch import Tensor

from benchmarks.engine import prompts_of
from eyas.engine.attention import Rows
from eyas.engine.config import EngineConfig
from eyas.engine.draft_model import DraftModel
from eyas.engine.launch import make_pool
from eyas.engine.model import Step, TargetModel
from eyas.engine.pages import PAGE, PagePool
from eyas.engine.request import Request
from eyas.engine.runner import TargetRunner
from eyas.engine.sampling import SamplingParams
from eyas.engine.speculation import SpeculativeRunner
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target


def median_ms(work: Callable[[], object], repeats: int = 30) -> float:
    """Median milliseconds of `work`."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def rows_of(batch: int, queries: int, start: int) -> Step:
    """A decoding step of `batch` requests at position `start`, `queries` rows each, with pages of their own."""
    width = (start + queries) // PAGE + 1
    rows = [
        Rows(start=i * queries, stop=(i + 1) * queries, first=start, pages=range(i * width, (i + 1) * width)) for i in range(batch)
    ]
    return Step.of(torch.randint(100, 1000, (batch * queries,)), rows, [])


@torch.inference_mode()
def parts_ms(target: TargetModel, draft: DraftModel, pool: PagePool, *, batch: int, drafts: int) -> tuple[float, float, float]:
    """(plain step, verification, drafting of K) in milliseconds: forward, head and argmax; no sampling, no bookkeeping."""
    one, many, chain = rows_of(batch, 1, 200), rows_of(batch, drafts + 1, 200), rows_of(batch, 1, 204)
    aux = torch.randn(batch * (drafts + 1), 3 * target.spec.hidden_size).to(target.dtype)

    def plain(step: Step) -> Tensor:
        return target.lm_head(target.forward(step, pool.layers)[0]).max(-1).indices

    def draft_all() -> None:
        states = draft.forward(many, draft.fuse(aux), pool.layers[-1])[:: drafts + 1]
        draft.propose(states)
        for _ in range(drafts - 1):
            states = draft.forward(chain, states, pool.layers[-1])
            draft.propose(states)

    return median_ms(lambda: plain(one)), median_ms(lambda: plain(many)), median_ms(draft_all)


def decode_all(runner: TargetRunner, prompts: list[list[int]], new_tokens: int) -> tuple[float, int, int]:
    """(seconds in decoding steps, tokens, verifications) of a batch that runs to `new_tokens` each, prefill left out."""
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, params=params, rid=str(i), emit=lambda _: None) for i, prompt in enumerate(prompts)]
    for request in requests:
        request.pages = runner.take_pages((len(request.prompt_ids) + new_tokens + 16) // PAGE + 1) or []
    for request, tokens in runner.step([], [(request, len(request.prompt_ids)) for request in requests]):
        request.output_ids += tokens
    running, num_steps = list(requests), 0
    started = time.perf_counter()
    while running:
        for request, tokens in runner.step(running, []):
            request.output_ids += tokens
        num_steps += len(running)
        running = [request for request in running if len(request.output_ids) < new_tokens]
    seconds = time.perf_counter() - started
    for request in requests:
        runner.give_back(request.pages)
    return seconds, sum(len(request.output_ids) - 1 for request in requests), num_steps


def main() -> None:
    """Run and print, for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=TargetConfig().model)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    spec = load_target(TargetConfig(model=args.model, context_length=2048))
    prompts = prompts_of(spec, args.batch)
    for name in args.dtypes:
        target = TargetModel(spec, getattr(torch, name))
        draft = DraftModel(args.draft, target)
        kv_heads = [*[spec.num_kv_heads] * spec.num_layers, draft.spec.num_kv_heads]
        pool = make_pool(spec, EngineConfig(max_total_tokens=max(2048, args.batch * 512)), target.dtype, kv_heads)
        end_ids = set(spec.eos_token_ids)
        plain, fast = TargetRunner(target, pool, end_ids), SpeculativeRunner(target, draft, pool, end_ids, args.draft_tokens)
        rates, allowed_all = [], []
        for _ in range(3):  # parts and runs side by side, so that they see the same machine
            d, v, c = parts_ms(target, draft, pool, batch=args.batch, drafts=args.draft_tokens)
            seconds, tokens, _ = decode_all(plain, prompts, args.new_tokens)
            fast_seconds, fast_tokens, steps = decode_all(fast, prompts, args.new_tokens)
            accept = fast_tokens / steps
            speedup = (fast_tokens / fast_seconds) / (tokens / seconds)
            allowed = accept / ((v + c) / d)
            rates.append(speedup)
            allowed_all.append(allowed)
            print(
                f"{name} batch {args.batch}: decode {d:.1f} ms, verify {args.draft_tokens + 1} tokens {v:.1f} ms ({v / d:.2f} x), "
                f"draft {c:.1f} ms; accept length {accept:.2f}; {tokens / seconds:.1f} -> {fast_tokens / fast_seconds:.1f} tok/s, "
                f"speed-up {speedup:.2f} of {allowed:.2f} allowed ({speedup / allowed:.0%}); "
                f"overhead {fast_seconds / steps * args.batch * 1e3 - v - c:.1f} ms a step",
                flush=True,
            )
        print(f"{name}: median share reached {statistics.median(r / a for r, a in zip(rates, allowed_all, strict=True)):.0%}")


if __name__ == "__main__":
    main()
