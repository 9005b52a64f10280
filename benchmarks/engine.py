"""Throughput of the embedded engine beside `transformers.generate`, paired in one run.

    python -m benchmarks.engine [--batch 32] [--new-tokens 64] [--rounds 3] [--prompts FILE]

Each round runs, in turn, the engine and `generate` in fp32 and bf16 on the same prompts (greedy, every reply of the
same length), so that what else the machine does hits all of them. Printed: tokens per second of each round, where the
engine's time went (steps with prompts, steps that only decode, outside of steps), the best of each, the ratio of the engine to
the better `generate`, the engine alone at batch 1, 8, 64 and 128, and what a decoding step of each size consists of.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # some µs: passive alone pays a wake-up for every small operation

import torch
from transformers import AutoModelForCausalLM

from eyas.engine.attention import Rows
from eyas.engine.config import EngineConfig
from eyas.engine.launch import make_pool, set_threads
from eyas.engine.model import Step, TargetModel
from eyas.engine.pages import PAGE
from eyas.engine.request import Request
from eyas.engine.runner import TargetRunner
from eyas.engine.sampling import SamplingParams
from eyas.engine.scheduler import Scheduler
from eyas.target.config import TargetConfig
from eyas.target.precision import native_dtype
from eyas.target.spec import TargetSpec, load_target
from eyas.target.tokenizer import load_tokenizer

QUESTIONS = (
    "Explain how a bird of prey hunts.",
    "Write a Python function that merges two sorted lists.",
    "What is the capital of France, and why is it known?",
    "Give me three ideas for a short story about the sea.",
    "Solve 12 * 17 step by step.",
    "Summarise the plot of a famous play in two sentences.",
    "What should I pack for a week in the mountains?",
    "Translate 'good morning' into five languages.",
)


def prompts_of(spec: TargetSpec, count: int) -> list[list[int]]:
    """`count` chat prompts of 30 to 60 tokens."""
    tokenizer = load_tokenizer(spec)
    asked = [f"{QUESTIONS[i % len(QUESTIONS)]} (variant {i})" for i in range(count)]
    messages = [[{"role": "user", "content": text}] for text in asked]
    return [list(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)) for m in messages]


class Engine:
    """The engine in this process, without HTTP."""

    def __init__(self, spec: TargetSpec, dtype: torch.dtype, max_running: int) -> None:
        config = EngineConfig(max_running_requests=max_running, max_total_tokens=max_running * 512)
        pool = make_pool(spec, config, dtype, [spec.num_kv_heads] * spec.num_layers)
        self.runner = TargetRunner(TargetModel(spec, dtype), pool, set(spec.eos_token_ids))
        self.scheduler = Scheduler(
            self.runner,
            end_ids=set(spec.eos_token_ids),
            decode=str,
            max_running=max_running,
            max_queued=0,
            chunk_tokens=config.prefill_chunk_tokens,
            on_death=lambda error: os._exit(1),
            prepare=lambda: set_threads(0),
        )
        self.step_seconds: dict[str, list[float]] = {"prompts": [], "decoding": []}
        self._time_steps()
        self.scheduler.start()

    def _time_steps(self) -> None:
        step = self.runner.step

        def timed(decoding: list[Request], pieces: list[tuple[Request, int]]) -> list[tuple[Request, list[int]]]:
            started = time.perf_counter()
            result = step(decoding, pieces)
            self.step_seconds["prompts" if pieces else "decoding"].append(time.perf_counter() - started)
            return result

        self.runner.step = timed  # type: ignore[method-assign]

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds for `new_tokens` of every prompt, all at once."""
        left = threading.Semaphore(0)
        self.step_seconds = {"prompts": [], "decoding": []}
        params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self.scheduler.submit(Request(prompt_ids=prompt, params=params, rid=str(index), emit=lambda _: left.release()))
        for _ in prompts:
            left.acquire()
        return time.perf_counter() - started


def parts(engine: Engine, size: int, context: int = 90, repeats: int = 15) -> dict[str, float]:
    """Median ms of a decoding step of `size` requests with `context` tokens each, in this thread, and of its parts alone."""
    runner = engine.runner
    model, pool, dtype = runner.model, runner.pool, runner.model.dtype
    held = [pool.take(context // PAGE + 1) for _ in range(size)]
    rows = [Rows(start=i, stop=i + 1, first=context, pages=pages) for i, pages in enumerate(held)]
    ids = torch.arange(size) + 100
    plan = Step.of(ids, rows, []).plan
    x = torch.randn(size, model.spec.hidden_size).to(dtype)
    qkv = model.layers[0][1].qkv(x)
    heads_out = torch.randn(size, qkv.shape[1] - 2 * model.spec.num_kv_heads * model.spec.head_dim).to(dtype)

    def step() -> None:
        final, _ = model.forward(Step.of(ids, rows, []), pool.layers)
        model.lm_head(final).max(-1).indices.tolist()

    def products() -> None:
        for _, attention, _, mlp in model.layers:
            attention.qkv(x)
            attention.out.plus(heads_out, x)
            mlp(x, x)
        model.lm_head(x)

    def attention() -> None:
        for (_, attention, _, _), cache in zip(model.layers, pool.layers, strict=True):
            attention.heads.attend(qkv, cache, plan)

    def norms() -> None:
        for before, _, after, _ in model.layers:
            before(x)
            after(x)

    measured = {}
    with torch.inference_mode():
        for work in (step, products, attention, norms):
            work()
            seconds = []
            for _ in range(repeats):
                started = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - started)
            measured[work.__name__] = statistics.median(seconds) * 1e3
    for pages in held:
        pool.give_back(pages)
    return measured


def where_time_went(engine: Engine, seconds: float) -> str:
    """The last run's `seconds` by kind of step, and what lay outside of them."""
    kinds = engine.step_seconds.items()
    steps = ", ".join(f"{len(times)} steps {kind} {sum(times) * 1e3:.0f} ms" for kind, times in kinds)
    return f"{steps}, outside of steps {(seconds - sum(sum(times) for _, times in kinds)) * 1e3:.0f} ms"


def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of `transformers.generate` over one left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=2
        )
    return time.perf_counter() - started


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=TargetConfig().model)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 64, 128])
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    spec = load_target(TargetConfig(model=args.model, context_length=2048))
    prompts = prompts_of(spec, max([args.batch, *args.sizes]))
    dtype = getattr(torch, native_dtype())
    engine = Engine(spec, dtype, max([args.batch, *args.sizes]))
    models = {
        name: AutoModelForCausalLM.from_pretrained(spec.folder, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")
    }
    total = args.batch * args.new_tokens
    engine.run(prompts[: args.batch], 4)
    best: dict[str, float] = {}
    for number in range(args.rounds):
        seconds = engine.run(prompts[: args.batch], args.new_tokens)
        rates = {"engine": total / seconds}
        for name, model in models.items():
            rates[f"generate {name}"] = total / generate(model, prompts[: args.batch], args.new_tokens)
        best = {name: max(rate, best.get(name, 0.0)) for name, rate in rates.items()}
        print(f"round {number}: " + ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in rates.items()), flush=True)
        print(f"  the engine's {seconds * 1e3:.0f} ms: {where_time_went(engine, seconds)}", flush=True)
    better = max(rate for name, rate in best.items() if name != "engine")
    print(f"batch {args.batch}: engine ({dtype}) {best['engine']:.0f} tok/s = {best['engine'] / better:.2f} x the better generate")
    for size in args.sizes:
        seconds = min(engine.run(prompts[:size], args.new_tokens) for _ in range(2))
        print(f"engine alone, batch {size}: {size * args.new_tokens / seconds:.0f} tok/s", flush=True)
    for size in sorted({args.batch, *args.sizes}):
        took = ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts(engine, size).items())
        print(f"decoding step at batch {size}: {took}", flush=True)


if __name__ == "__main__":
    main()
