"""A tiny target (byte-level tokenizer, no weights) and prompts of it, for tests that need no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.config import RunConfig
from eyas.files import digest_json
from eyas.manifest import Counts, Manifest, file_entries
from eyas.target.rendering import Renderer
from eyas.target.spec import TargetSpec, load_target
from eyas.target.tokenizer import load_tokenizer
from eyas.workspace import RunFolder

SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
END_ID = 2
FIRST_BYTE_ID = len(SPECIALS)
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_TEMPLATE = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def build_target(folder: Path, *, thinks: bool = False, context_length: int = 2048) -> Path:
    """Write config, tokenizer and template of a tiny target; 261 ids: five special ones and every byte."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>", "<think>", "</think>"] if thinks else ["<|im_start|>"],
    )
    tokenizer.chat_template = THINKING_TEMPLATE if thinks else TEMPLATE
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": len(vocab),
        "max_position_embeddings": context_length,
        "eos_token_id": END_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "do_sample": True}))
    return folder


def tiny_config(target: Path, datasets: dict[str, int], **sections: dict[str, Any]) -> RunConfig:
    """A run over {dataset: cap}; fast polling, short floors, everything else default."""
    server = {"poll_interval_s": 0.05, "deadline_floor_s": 20.0, "min_tokens_per_s": 1000.0, "outage_limit_s": 20.0}
    raw = {
        **sections,
        "target": {"model": str(target)},
        "server": {**server, **sections.get("server", {})},
        "prompts": {"datasets": [{"name": name, "source": "file:x", "max_new_tokens": cap} for name, cap in datasets.items()]},
        "generation": {"canary": 4, **sections.get("generation", {})},
    }
    return RunConfig.model_validate(raw)


def load_renderer(config: RunConfig) -> tuple[TargetSpec, Renderer]:
    spec = load_target(config.target)
    return spec, Renderer(spec, load_tokenizer(spec), config.target)


def write_prompts(
    run: RunFolder, config: RunConfig, dataset: str, count: int, *, with_tools: bool = False, are_alike: bool = False
) -> list[dict[str, Any]]:
    """Write `prompts/<dataset>/` as phase 1 does; returns the rows in file order. `are_alike` repeats one prompt."""
    _, renderer = load_renderer(config)
    cap = next(item.max_new_tokens for item in config.prompts.datasets if item.name == dataset)
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    rows = []
    for number in range(count):
        asked = 0 if are_alike else number
        messages = [{"role": "user", "content": f"{dataset} question {asked}: what is {asked} + {asked}?"}]
        row_tools = tools if with_tools and number % 5 == 0 else []
        rendered = renderer.render(messages, row_tools)
        conversation = digest_json([dataset, messages])[:32]
        rows.append(
            {
                "id": digest_json(["id", dataset, messages, number - asked])[:32],
                "dataset": dataset,
                "split": "heldout" if number % 10 == 0 else "train",
                "conversation": conversation,
                "messages": json.dumps(messages),
                "tools": json.dumps(row_tools),
                "input_ids": rendered.input_ids,
                "opens_think": rendered.opens_think,
                "max_new_tokens": cap,
            }
        )
    rows.sort(key=lambda row: row["id"])
    folder = run.prompts(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(
        [(name, pa.string()) for name in ("id", "dataset", "split", "conversation", "messages", "tools")]
        + [("input_ids", pa.list_(pa.int32())), ("opens_think", pa.bool_()), ("max_new_tokens", pa.int32())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "prompts.parquet")
    Manifest(
        stage="prepare",
        stage_version=1,
        name=dataset,
        fingerprint=digest_json([row["id"] for row in rows]),
        counts=Counts.of(done=count),
        files=file_entries(folder, ["prompts.parquet"]),
    ).write(folder)
    return rows
