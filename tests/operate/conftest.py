"""A target's folder without weights, a config on it, and run folders as phases leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eyas.config import RunConfig, load_config
from eyas.files import json_line, write_json
from eyas.manifest import Counts, Manifest, file_entries
from eyas.operate.pipeline import open_run
from eyas.workspace import RunFolder

DATASETS = ("B1_calls", "B2_code")
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """A chat model of 8 layers, H 32, V 64, as its folder describes it."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    write_json(folder / "config.json", config)
    words = {"<s>": 0, "</s>": 1, "[UNK]": 2} | {f"w{number}": number for number in range(3, 64)}
    Tokenizer(WordLevel(words, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE},
    )
    return folder


@pytest.fixture
def raw_config(tmp_path: Path, target_folder: Path) -> dict[str, Any]:
    """A config as a YAML file would hold it: two datasets from files that exist."""
    datasets = []
    for name in DATASETS:
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"prompt": f"w3 w4 w{number}"}) + "\n" for number in range(5, 15)))
        datasets.append({"name": name, "source": f"file:{source}", "quota": 100, "max_new_tokens": 50})
    return {
        "target": {"model": str(target_folder)},
        "prompts": {"datasets": datasets, "decontaminate_against": []},
        "hidden": {"disk_reserve_bytes": 0},
        "benchmark": {"sets": ["heldout"]},
    }


@pytest.fixture
def config_file(tmp_path: Path, raw_config: dict[str, Any]) -> Callable[..., Path]:
    """Write `raw_config` with changes (dotted keys) as a YAML file."""

    def write(**changes: Any) -> Path:
        for key, value in changes.items():
            *parents, last = key.split("__")
            node = raw_config
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw_config))
        return path

    return write


@pytest.fixture
def config(config_file: Callable[..., Path]) -> RunConfig:
    return load_config(config_file())


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> RunFolder:
    """A run that was opened and has done nothing yet."""
    return open_run(tmp_path / "run", config)


def write_manifest(
    folder: Path, stage: str, *, done: int, rejected: dict[str, int] | None = None, pending: int = 0, name: str = "", **figures: Any
) -> Manifest:
    """A manifest of the files that lie in `folder`."""
    reasons = rejected or {}
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != "manifest.json")
    return Manifest(
        stage=stage,
        stage_version=1,
        name=name,
        fingerprint="f" * 64,
        counts=Counts.of(done=done, rejected=sum(reasons.values()), pending=pending),
        rejected_by_reason=reasons,
        files=file_entries(folder, names),
        figures=figures,
        started_at="2026-12-02T08:00:00+00:00",
        finished_at="2026-12-02T08:10:00+00:00",
    ).write(folder)


def write_prompts(run: RunFolder, name: str, lengths: list[int]) -> Manifest:
    """Phase 1 of one dataset: prompts of the given lengths."""
    folder = run.prompts(name)
    folder.mkdir(parents=True)
    rows = {"id": [f"{n:032x}" for n in range(len(lengths))], "input_ids": [list(range(length)) for length in lengths]}
    pq.write_table(
        pa.table(rows, schema=pa.schema({"id": pa.string(), "input_ids": pa.list_(pa.int32())})), folder / "prompts.parquet"
    )
    return write_manifest(
        folder,
        "prepare",
        done=len(lengths),
        rejected={"duplicate": 2, "near_duplicate": 1, "contaminated": 4, "no_user_turn": 5, "bad_json": 6},
        name=name,
        license="CC0-1.0",
        rows=len(lengths) + 18,
        samples=[f"<|im_start|>user\nwhat {name} asks"],
        histogram=[{"from": 0, "to": 16, "prompts": len(lengths)}],
        splits={"train": len(lengths) - 1, "heldout": 1},
        tokens={"p50": int(np.median(lengths)), "p90": max(lengths), "max": max(lengths), "sum": sum(lengths)},
    )


def write_responses(run: RunFolder, name: str, prompt_lengths: list[int], lengths: list[int]) -> Manifest:
    """Phase 2 of one dataset: responses of the given lengths, in the order of the prompts."""
    folder = run.responses(name)
    folder.mkdir(parents=True)
    rows = [
        {"id": f"{n:032x}", "input_ids": [3] * (prompt + length), "loss_mask": [0] * prompt + [1] * length, "prompt_tokens": prompt}
        for n, (prompt, length) in enumerate(zip(prompt_lengths, lengths, strict=True))
    ]
    (folder / "tokenized_data.jsonl").write_bytes(b"".join(json_line(row) for row in rows))
    return write_manifest(
        folder,
        "generate",
        done=len(lengths),
        name=name,
        replies=len(lengths),
        tokens=sum(lengths),
        tokens_median=int(np.median(lengths)),
        tokens_mean=float(np.mean(lengths)),
        tokens_p90=int(np.percentile(lengths, 90)),
        tokens_p99=max(lengths),
        share_cut_by_length=0.25,
        share_with_reasoning=0.0,
    )


def write_metrics(run: RunFolder, steps: int) -> None:
    """Phase 5's metrics: a training row every 10 steps, a held-out replay every 50."""
    run.draft.mkdir(parents=True, exist_ok=True)
    with open(run.draft / "metrics.jsonl", "wb") as file:
        for step in range(10, steps + 1, 10):
            losses = [4.0 / step**0.2 + 0.2 * number for number in range(4)]
            file.write(
                json_line(
                    {
                        "kind": "train",
                        "step": step,
                        "epoch": 0,
                        "seconds": step * 0.5,
                        "loss": sum(losses),
                        "step_loss": losses,
                        "step_accuracy": [0.5 - 0.08 * number - 1 / step for number in range(4)],
                        "per_dataset": {name: {"step_loss": losses, "kept": 100} for name in DATASETS},
                        "positions_per_s": 512.5,
                    }
                )
            )
            if step % 50 == 0:
                per_dataset = {
                    name: {"accept_length": 1 + step / 500 + n / 10, "verifications": 200, "accepted": 50}
                    for n, name in enumerate(DATASETS)
                }
                file.write(
                    json_line(
                        {
                            "kind": "heldout",
                            "step": step,
                            "epoch": 0,
                            "accept_length": 1 + step / 480,
                            "verifications": 400,
                            "accepted": 100,
                            "per_dataset": per_dataset,
                        }
                    )
                )


def write_results(run: RunFolder) -> dict[str, Any]:
    """Phase 6's results.json, made by its own code from raw measurements."""
    from eyas.speculate.contexts import by_context
    from eyas.speculate.results import Row, SetMeasurement, TimedBlock, summarise

    rows = [
        Row(
            id=f"{n:032x}",
            dataset=DATASETS[n % 2],
            prompt_ids=[3, 4],
            reference_ids=[5] * 40,
            loop_free_tokens=36,
            draft_ids=[5] * 40,
            outcome="tie" if n == 3 else "identical",
            verifications=20 + n,
            accepted=14 + (n * 7) % 11,
            baselines={"bigram": (25, 6), "prompt_lookup": (26, 4 + n % 3)},
            predicted=(20, 14),
        )
        for n in range(12)
    ]
    blocks = [
        TimedBlock(
            side=side,
            concurrency=1,
            round=number,
            wall_s=10.0 if side == "off" else 8.0,
            output_tokens=400,
            datasets=["alpha"] * 12,
            reply_tokens=[33] * 12,
            latencies_s=[0.8] * 12,
        )
        for number, side in enumerate(("off", "on", "on", "off"))
    ]
    results = summarise(
        [SetMeasurement(name="heldout", rows=rows, blocks=blocks)], engine="embedded", num_draft_tokens=3, min_verifications=2000
    )
    results |= {"trained_tokens": 36, "by_context": by_context(rows, 36)}
    run.benchmark.mkdir(parents=True, exist_ok=True)
    rewrite_results(run, results)
    return results


def rewrite_results(run: RunFolder, results: dict[str, Any]) -> None:
    """Phase 6 with these results, manifest included."""
    write_json(run.benchmark / "results.json", results)
    write_manifest(run.benchmark, "benchmark", done=results["outputs"]["checked"])


@pytest.fixture
def half_run(run: RunFolder) -> RunFolder:
    """Prompts of two datasets, responses of one."""
    for name in DATASETS:
        write_prompts(run, name, [4, 5, 6, 7])
    write_responses(run, DATASETS[0], [4, 5, 6, 7], [10, 20, 30, 40])
    return run


@pytest.fixture
def finished_run(half_run: RunFolder) -> RunFolder:
    """All six phases, as they leave the folder."""
    run = half_run
    write_responses(run, DATASETS[1], [4, 5, 6, 7], [50, 50, 8, 9])
    for folder, stage in ((run.merged, "merge"), (run.hidden, "extract")):
        folder.mkdir()
        write_manifest(folder, stage, done=8)
    write_metrics(run, 200)
    write_manifest(run.draft, "train", done=6, accept_length=1.4167)
    run.export.mkdir()
    write_json(run.export / "config.json", {"architectures": ["LlamaForCausalLMEagle3"]})
    write_manifest(run.export, "export", done=1)
    write_results(run)
    return run
