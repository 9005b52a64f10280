"""Tiny targets with fixed seeds, random drafts for them, and ways to run requests with and without HTTP."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eyas.draft.spec import DraftSpec
from eyas.engine.draft_model import DraftModel
from eyas.engine.model import TargetModel
from eyas.engine.pages import PagePool
from eyas.engine.request import Request
from eyas.engine.runner import TargetRunner
from eyas.engine.sampling import SamplingParams
from eyas.engine.scheduler import Scheduler
from eyas.engine.speculation import SpeculativeRunner
from eyas.files import write_json
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}{% endif %}"
)


def save_target(folder: Path, kind: str = "llama", *, vocab_size: int = 64, seed: int = 0) -> Path:
    """A random target of `kind` (llama, llama3-rope, untied, qwen2, qwen3) as a model folder without tokenizer."""
    torch.manual_seed(seed)
    if kind == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES, vocab_size=vocab_size, tie_word_embeddings=True))
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=0.5)
            torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=0.5)
            torch.nn.init.normal_(layer.self_attn.v_proj.bias, std=0.5)
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=vocab_size, tie_word_embeddings=True))
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_norm.weight, mean=1.0, std=0.3)
            torch.nn.init.normal_(layer.self_attn.k_norm.weight, mean=1.0, std=0.3)
    else:
        rope = {"rope_parameters": LLAMA3_ROPE} if kind == "llama3-rope" else {}
        model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab_size, tie_word_embeddings=kind != "untied", **rope))
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight") or name == "model.norm.weight":
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and seven special tokens, with a chat template, into a model folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def save_draft(folder: Path, target: TargetSpec, *, draft_vocab_size: int, num_kv_heads: int = 2, seed: int = 1) -> Path:
    """A random draft for `target` in the export's format, keeping every other target id."""
    torch.manual_seed(seed)
    spec = DraftSpec(
        hidden_size=target.hidden_size,
        intermediate_size=64,
        num_heads=6,
        num_kv_heads=num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope["theta"],
        rope_scaling=target.rope["scaling"],
        context_length=target.context_length,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_blocks=target.aux_blocks,
        eos_token_ids=tuple(target.eos_token_ids),
    )
    tensors = {name: torch.randn(shape) * 0.3 + (1.0 if "norm" in name else 0.0) for name, shape in spec.tensor_shapes.items()}
    kept = torch.arange(target.vocab_size)[:: target.vocab_size // draft_vocab_size][:draft_vocab_size]
    t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, "d2t": kept - torch.arange(draft_vocab_size), "t2d": t2d}, folder / "model.safetensors")
    write_json(folder / "config.json", spec.engine_config("float32"))
    return folder


def make_runner(
    spec: TargetSpec, dtype: torch.dtype = torch.float32, *, draft: Path | None = None, num_drafts: int = 3, num_pages: int = 200
) -> TargetRunner:
    """A runner over `spec`, speculating if a draft is given."""
    model = TargetModel(spec, dtype)
    kv_heads = [spec.num_kv_heads] * spec.num_layers
    if draft is None:
        return TargetRunner(model, PagePool(kv_heads=kv_heads, num_pages=num_pages, head_dim=spec.head_dim, dtype=dtype), {2})
    loaded = DraftModel(draft, model)
    pool = PagePool(kv_heads=[*kv_heads, loaded.spec.num_kv_heads], num_pages=num_pages, head_dim=spec.head_dim, dtype=dtype)
    return SpeculativeRunner(model, loaded, pool, {2}, num_drafts)


def run_requests(
    runner: TargetRunner,
    prompts: list[list[int]],
    params: list[SamplingParams] | SamplingParams,
    *,
    max_running: int = 16,
    chunk: int = 512,
    **named: Any,
) -> list[Request]:
    """Run all prompts through a scheduler of their own and return the finished requests, in order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    done = [threading.Event() for _ in prompts]
    deaths: list[BaseException] = []

    def died(error: BaseException) -> None:
        deaths.append(error)
        for event in done:
            event.set()

    scheduler = Scheduler(
        runner,
        end_ids={2},
        decode=lambda ids: " ".join(map(str, ids)),
        max_running=max_running,
        max_queued=0,
        chunk_tokens=chunk,
        on_death=died,
    )
    requests = [
        Request(prompt_ids=list(prompt), params=p, rid=str(i), emit=lambda _, event=event: event.set(), **named)
        for i, (prompt, p, event) in enumerate(zip(prompts, each, done, strict=True))
    ]
    for request in requests:
        scheduler.submit(request)
    scheduler.start()
    for event in done:
        assert event.wait(60), "a request did not finish"
    scheduler.stop()
    scheduler.join(10)
    if deaths:
        raise deaths[0]
    return requests


def greedy(max_new_tokens: int = 24, **named: Any) -> SamplingParams:
    """Greedy parameters that run to their length."""
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **named})


def random_prompts(count: int, low: int, high: int, *, vocab_size: int = 64, seed: int = 3) -> list[list[int]]:
    """Prompts of random ids with lengths in [low, high)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    """A tiny Llama of 64 tokens."""
    return load_target(TargetConfig(model=str(save_target(tmp_path_factory.mktemp("engine") / "llama"))))


@pytest.fixture(scope="session")
def draft(target: TargetSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft of 32 tokens for `target`."""
    return save_draft(tmp_path_factory.mktemp("engine") / "draft", target, draft_vocab_size=32)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests share two cores."""
    torch.set_num_threads(1)
