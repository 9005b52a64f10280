"""Throughput of the embedded engine beside `transformers.generate`, paired in one run.

    python -m benchmarks.engine [--batch 32] [--new-tokens 64] [--rounds 3] [--prompts FILE]

Each round runs, in turn, the engine and `generate` in fp32 and bf16 on the same prompts (greedy, every reply of the
same length), so that what else the machine does hits all of them. Printed: tokens per second of each round, the best
of each, the ratio of the engine to the better `generate`, and the engine alone at batch 1, 8, 64 and 128.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # some µs: passive alone pays a wake-up for every small operation

import torch
from transformers import AutoModelForCausalLM

from eyas.engine.config import EngineConfig
from eyas.engine.launch import make_pool, set_threads
from eyas.engine.model import TargetModel
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
        self.scheduler = Scheduler(
            TargetRunner(TargetModel(spec, dtype), pool, set(spec.eos_token_ids)),
            end_ids=set(spec.eos_token_ids),
            decode=str,
            max_running=max_running,
            max_queued=0,
            chunk_tokens=config.prefill_chunk_tokens,
            on_death=lambda error: os._exit(1),
            prepare=lambda: set_threads(0),
        )
        self.scheduler.start()

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds for `new_tokens` of every prompt, all at once."""
        left = threading.Semaphore(0)
        params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self.scheduler.submit(Request(prompt_ids=prompt, params=params, rid=str(index), emit=lambda _: left.release()))
        for _ in prompts:
            left.acquire()
        return time.perf_counter() - started


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
        rates = {"engine": total / engine.run(prompts[: args.batch], args.new_tokens)}
        for name, model in models.items():
            rates[f"generate {name}"] = total / generate(model, prompts[: args.batch], args.new_tokens)
        best = {name: max(rate, best.get(name, 0.0)) for name, rate in rates.items()}
        print(f"round {number}: " + ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in rates.items()), flush=True)
    better = max(rate for name, rate in best.items() if name != "engine")
    print(f"batch {args.batch}: engine ({dtype}) {best['engine']:.0f} tok/s = {best['engine'] / better:.2f} x the better generate")
    for size in args.sizes:
        seconds = min(engine.run(prompts[:size], args.new_tokens) for _ in range(2))
        print(f"engine alone, batch {size}: {size * args.new_tokens / seconds:.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
