"""Could generation keep its own hidden states and spare the extraction? Measured in real SGLang, on one server.

    python -m benchmarks.capture --engines build/engines --run RUN [--prompts 32] [--new-tokens 64]

In turns, on the same prompts: greedy generation as usual, generation that keeps every state (`capture_plugin`), and the
extraction of the same replies. Speeds in tokens/s (ratios within a round), relative error of both kinds of
states against fp32 and against each other, the share of generated tokens that lm_head of the final state gives (and of ties), and
the accept length of the run's draft replayed on both. SGLang's CPU kernels are stand-ins: its decoding is slower than
a GPU's next to a prefill, so the share of time that an extraction would cost there is lower than here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.capture_plugin import FOLDER_VARIABLE, RID_PREFIX
from benchmarks.codecs import Bench
from eyas.draft.data import Record, make_batch
from eyas.draft.replay import replay
from eyas.hidden.probe import ProbeReply, check_greedy
from eyas.hidden.sources.protocol import States, TokenIds
from eyas.hidden.sources.sglang import AUX_FLAGS, SglangSource
from eyas.hidden.sources.sglang_plugin import FOLDER_VARIABLE as SINK_VARIABLE
from eyas.hidden.sources.transformers import TransformersSource
from eyas.target.weights import load_head
from tests.engines.conftest import ROOT, sglang_server

ENTRY_POINTS = """[sglang.srt.plugins]
eyas_states = eyas.hidden.sources.sglang_plugin:register
eyas_capture = benchmarks.capture_plugin:register
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="folder in which engines/install.sh put sglang")
    parser.add_argument("--run", type=Path, required=True, help="finished run with exact states and a trained draft")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.run, arguments.prompts)
    prompts = [_prompt(bench, record_id) for record_id in bench.heldout]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metadata = folder / "site" / "eyas_capture-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eyas-capture\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
        environment = {
            "PYTHONPATH": f"{folder / 'site'}:{ROOT}",
            FOLDER_VARIABLE: str(folder / "kept"),
            SINK_VARIABLE: str(folder / "sink"),
        }
        python = arguments.engines.absolute() / "sglang" / "bin" / "python"
        flags = [*AUX_FLAGS.split(), "--disable-overlap-schedule"]
        with sglang_server(python, folder / "log", bench.target.folder, *flags, environment=environment) as url:
            source = SglangSource(
                [url],
                final_urls=[],
                sink=folder / "sink",
                spec=bench.target,
                concurrency=arguments.concurrency,
            )
            _generate(url, prompts[:4], "warm-", 8, arguments.concurrency)
            seconds: dict[str, list[float]] = {"plain": [], "kept": [], "extraction": []}
            for round_number in range(arguments.rounds):
                start = time.perf_counter()
                plain = _generate(url, prompts, f"plain{round_number}-", arguments.new_tokens, arguments.concurrency)
                middle = time.perf_counter()
                rid = f"{RID_PREFIX}{round_number}-"
                replies = _generate(url, prompts, rid, arguments.new_tokens, arguments.concurrency)
                end = time.perf_counter()
                sequences = [np.array([*prompt, *reply], np.int32) for prompt, reply in zip(prompts, replies, strict=True)]
                extracted = dict(source.extract(sequences))
                for key, value in zip(seconds, (middle - start, end - middle, time.perf_counter() - end), strict=True):
                    seconds[key].append(value)
            kept = [load_file(folder / "kept" / f"{rid}{index}.0.safetensors") for index in range(len(prompts))]
    own = dict(TransformersSource(bench.target, dtype="float32", batch_tokens=1024, threads=1).extract(sequences))
    generated = sum(map(len, replies))
    print(
        json.dumps(
            {
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)),
                "generated_tokens": generated,
                "generation_tokens_per_s": [round(generated / value, 1) for value in seconds["plain"]],
                "keeping_tokens_per_s": [round(generated / value, 1) for value in seconds["kept"]],
                "extraction_tokens_per_s": [round(sum(map(len, sequences)) / value, 1) for value in seconds["extraction"]],
                "keeping_costs": [round(b / a - 1, 3) for a, b in zip(seconds["plain"], seconds["kept"], strict=True)],
                "extraction_costs": [round(b / a, 3) for a, b in zip(seconds["plain"], seconds["extraction"], strict=True)],
                "replies_as_without": sum(a == b for a, b in zip(plain, replies, strict=True)),
                **_compared(bench, prompts, sequences, [States(**part) for part in kept], extracted, own),
            },
            indent=1,
        )
    )


def _prompt(bench: Bench, record_id: str) -> list[int]:
    record = bench.exact.record(record_id)
    return list(record.tokens[: int(record.loss_mask.nonzero()[0])].tolist())


def _generate(url: str, prompts: list[list[int]], rid: str, new_tokens: int, concurrency: int) -> list[list[int]]:
    """Greedy replies of `new_tokens` tokens, `concurrency` at a time."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    with httpx.Client(timeout=600, trust_env=False) as client, ThreadPoolExecutor(concurrency) as pool:

        def ask(index: int) -> list[int]:
            body: dict[str, Any] = {"input_ids": prompts[index], "rid": f"{rid}{index}", "sampling_params": sampling}
            if rid.startswith(RID_PREFIX):
                body["return_hidden_states"] = True
            return list(client.post(f"{url}/generate", json=body).raise_for_status().json()["output_ids"])

        return list(pool.map(ask, range(len(prompts))))


def _compared(
    bench: Bench,
    prompts: list[list[int]],
    sequences: list[TokenIds],
    kept: list[States],
    extracted: dict[int, States],
    own: dict[int, States],
) -> dict[str, object]:
    result: dict[str, object] = {
        "rows_kept_of_each_reply": sorted({len(s) - len(k.aux) for s, k in zip(sequences, kept, strict=True)})
    }
    sides = {"kept": kept, "extracted": [extracted[i] for i in range(len(kept))], "fp32": [own[i] for i in range(len(kept))]}
    for one, other in (("kept", "fp32"), ("extracted", "fp32"), ("kept", "extracted")):
        for rows in ("prompt", "generated"):
            pairs = []
            for index, prompt in enumerate(prompts):
                last = len(kept[index].aux)
                part = slice(0, len(prompt)) if rows == "prompt" else slice(len(prompt), last)
                pairs.append((sides[one][index], sides[other][index], part))
            result[f"error_{one}_{other}_{rows}"] = _errors(pairs)
    probes = [ProbeReply(id=str(index), tokens=tokens, prompt_tokens=len(prompts[index])) for index, tokens in enumerate(sequences)]
    head = load_head(bench.target, torch.float32)
    for name, states in sides.items():
        shares = check_greedy(states, probes, head, bench.target, wanted=0.0)
        result[f"greedy_agreement_{name}"] = [round(shares[key], 4) for key in ("greedy_agreement", "greedy_ties")]
    draft = bench.best_draft()
    for name, states in sides.items():
        result[f"accept_length_{name}"] = round(
            replay(
                draft, (_batch(bench, *parts) for parts in zip(prompts, sequences, states, strict=True)), bench.rows
            ).overall.accept_length,
            4,
        )
    return result


def _errors(pairs: list[tuple[States, States, slice]]) -> dict[str, float]:
    """Relative error of each state over the rows of all replies."""
    errors = {}
    for number, name in enumerate(("low", "middle", "high", "final")):
        ours, theirs = (
            torch.cat(
                [(pair[side].final if number == 3 else pair[side].aux.chunk(3, -1)[number])[pair[2]].float() for pair in pairs]
            )
            for side in (0, 1)
        )
        errors[name] = round(float((ours - theirs).norm() / theirs.norm()), 4)
    return errors


def _batch(bench: Bench, prompt: list[int], sequence: TokenIds, states: States) -> Any:
    """One reply for the replay: states of its first T − 1 tokens (no column reads the last), its own tokens as argmax."""
    mask = torch.zeros(len(sequence), dtype=torch.uint8)
    mask[len(prompt) :] = 1
    aux, final = (torch.nn.functional.pad(part[: len(sequence) - 1], (0, 0, 0, 1)) for part in (states.aux, states.final))
    record = Record(id="", dataset="", tokens=torch.from_numpy(sequence), loss_mask=mask, aux=aux, final=final)
    batch = make_batch([record], bench.num_steps)
    first = len(prompt) - 1
    return batch, torch.from_numpy(sequence).long()[first + 2 : first + 2 + len(batch.active)]


if __name__ == "__main__":
    main()
