"""Small run folders (merged order, map and hidden states) and a tiny target, written by docs/formats.md."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from eyas.config import RunConfig
from eyas.draft.data import Record
from eyas.files import digest_file
from eyas.hidden.codec import TOP, CodecName
from eyas.hidden.kind import StoreKind
from eyas.hidden.store.codecs import encode_states
from eyas.hidden.store.shard import ShardEntry, shard_tensors, write_entry, write_shard
from eyas.hidden.store.top import TopTargets
from eyas.manifest import Counts, Manifest, file_entries
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from eyas.target.weights import load_head
from eyas.workspace import RunFolder

H, V, D = 32, 96, 48
TARGET_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def write_target(folder: Path, **changes: object) -> Path:
    """A target folder with embeddings and norm only: nothing else may be read of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET_CONFIG, **changes}))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "model.embed_tokens.weight": torch.randn(V, H, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(H).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def learnable_records(count: int, seed: int = 0, *, length: int = 24, prompt: int = 6, dataset: str = "a") -> list[Record]:
    """Replies of a toy target that always says (3·x + 5) mod 40, with states that show its token and its next one."""
    embed = torch.randn(V, H, generator=torch.Generator().manual_seed(5)).bfloat16()
    generator = torch.Generator().manual_seed(seed)
    records = []
    for index in range(count):
        tokens = [int(torch.randint(0, 40, (1,), generator=generator))]
        while len(tokens) < length:
            tokens.append((3 * tokens[-1] + 5) % 40)
        now, following = torch.tensor(tokens), torch.tensor([*tokens[1:], (3 * tokens[-1] + 5) % 40])
        records.append(
            Record(
                id=f"{seed:02d}{index:030x}",
                dataset=dataset,
                tokens=now.int(),
                loss_mask=torch.tensor([0] * prompt + [1] * (length - prompt), dtype=torch.uint8),
                aux=torch.cat([embed[now], embed[following], embed[following]], -1),
                final=embed[following] * 2,  # its own row of the tied head is the largest logit
            )
        )
    return records


def write_run(
    root: Path,
    target: Path,
    train: list[Record],
    heldout: list[Record],
    *,
    kept_ids: list[int] | None = None,
    codec: CodecName = "bf16",
) -> RunFolder:
    """Write merged/ and hidden/ of a run, with manifests."""
    run = RunFolder(root).create()
    spec = load_target(TargetConfig(model=str(target)))
    everything = sorted([*train, *heldout], key=lambda record: record.id)
    run.merged.mkdir(parents=True, exist_ok=True)
    ids = torch.tensor(kept_ids if kept_ids is not None else list(range(D)))
    t2d = torch.zeros(spec.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    save_file({"d2t": ids - torch.arange(len(ids)), "t2d": t2d}, run.merged / "vocab_map.safetensors")
    heldout_ids = {record.id for record in heldout}
    columns = {
        "id": [record.id for record in everything],
        "dataset": [record.dataset for record in everything],
        "split": ["heldout" if record.id in heldout_ids else "train" for record in everything],
        "input_ids": pa.array([record.tokens.tolist() for record in everything], pa.list_(pa.int32())),
        "loss_mask": pa.array([record.loss_mask.tolist() for record in everything], pa.list_(pa.int8())),
    }
    pq.write_table(pa.table(columns), run.merged / "tokens.parquet")
    for name, records in (("order", train), ("heldout", heldout)):
        table = pa.table({"position": pa.array(range(len(records)), pa.int64()), "id": [record.id for record in records]})
        pq.write_table(table, run.merged / f"{name}.parquet")
    _manifest(run.merged, "merge", ["order.parquet", "heldout.parquet", "tokens.parquet", "vocab_map.safetensors"], len(everything))
    write_hidden(run.hidden, everything, spec, codec=codec, kept=ids, vocabulary=digest_file(run.merged / "vocab_map.safetensors"))
    return run


def write_hidden(
    folder: Path,
    records: list[Record],
    target: TargetSpec,
    *,
    codec: CodecName = "bf16",
    kept: torch.Tensor | None = None,
    vocabulary: str = "",
) -> None:
    """One shard with its sidecar and index; a codec of top-k probabilities needs the map's kept ids and digest."""
    top_targets = None
    if codec == "int4_top":
        assert kept is not None
        top_targets = TopTargets(lm_head=load_head(target, torch.float32).lm_head, kept=kept)
    kind = StoreKind(
        target=target.fingerprint,
        blocks=target.aux_blocks,
        hidden_size=target.hidden_size,
        codec=codec,
        source="transformers",
        dtype="float32",
        vocabulary=vocabulary if top_targets else "",
        num_top=min(TOP, len(top_targets.kept)) if top_targets else 0,
    )
    lengths = [len(record.tokens) for record in records]
    mask = torch.cat([record.loss_mask for record in records])
    states = encode_states(
        torch.cat([record.aux for record in records]).bfloat16(),
        torch.cat([record.final for record in records]).bfloat16(),
        mask,
        codec,
        top_targets,
    )
    tensors = shard_tensors(torch.cat([record.tokens for record in records]).int(), mask, lengths, states)
    folder.mkdir(parents=True, exist_ok=True)
    size_bytes, sha256 = write_shard(folder / "shard-00000.safetensors", tensors)
    addresses = [kind.address(record.tokens.int().numpy()) for record in records]
    entry = ShardEntry(
        name="shard-00000",
        dataset="a",
        number=0,
        kind=kind.digest(),
        plan="0" * 64,
        ids=[record.id for record in records],
        addresses=addresses,
        num_tokens=lengths,
        quarantined=[],
        size_bytes=size_bytes,
        sha256=sha256,
    )
    write_entry(folder, entry)
    index = pa.table(
        {
            "id": entry.ids,
            "shard": ["shard-00000"] * len(records),
            "row": pa.array(range(len(records)), pa.int32()),
            "num_tokens": pa.array(lengths, pa.int32()),
            "address": addresses,
        }
    )
    pq.write_table(index, folder / "index.parquet")
    (folder / "rejects.jsonl").write_bytes(b"")
    names = ["rejects.jsonl", "shard-00000.safetensors", "shard-00000.json", "index.parquet"]
    _manifest(folder, "extract", names, len(records), {"kind": kind.settings()})


def run_config(target: Path, **draft: object) -> RunConfig:
    """A config for such a run."""
    settings = {
        "num_unroll_steps": 3,
        "batch_tokens": 128,
        "max_steps": 40,
        "learning_rate": 3e-3,
        "eval_every": 10,
        "log_every": 5,
        "dtype": "float32",
        **draft,
    }
    return RunConfig.model_validate({"target": {"model": str(target)}, "draft": settings})


def _manifest(folder: Path, stage: str, names: list[str], count: int, config: dict | None = None) -> None:
    Manifest(
        stage=stage,
        stage_version=1,
        fingerprint="0" * 64,
        config=config or {},
        counts=Counts.of(done=count),
        files=file_entries(folder, names),
    ).write(folder)
