"""The benchmark on the embedded engine itself: a draft that knows a little, served, counted, replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from eyas.config import RunConfig
from eyas.draft.config import DraftConfig
from eyas.draft.data import Record, make_batch
from eyas.draft.model import Draft, rms_norm
from eyas.draft.spec import DraftSpec
from eyas.engine.config import EngineConfig
from eyas.engine.process import EngineProcess
from eyas.sglang.config import ServerConfig
from eyas.speculate.baselines import BigramTable
from eyas.speculate.config import BenchmarkConfig
from eyas.speculate.load import Server
from eyas.speculate.lossless import LocalJudge
from eyas.speculate.measure import measure_set
from eyas.speculate.predict import Predictor
from eyas.speculate.results import SetMeasurement
from eyas.speculate.servers import open_servers
from eyas.speculate.sets import BenchmarkPrompt
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder
from tests.speculate.conftest import VOCAB, greedy

K = 3
CAP = 60
PROMPTS = [BenchmarkPrompt(id=f"p{first}", dataset="b1", input_ids=[first, first + 7, 5, first + 1]) for first in range(10, 34, 4)]


def save_target(model: Any, folder: Path) -> TargetSpec:
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", unk_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return load_target(TargetConfig(model=str(folder)))


def fit_draft(model: Any, spec: TargetSpec, folder: Path, *, steps: int = 25) -> None:
    """Overfit a draft to half of the prompts' replies, so that it hits often on some and seldom on others."""
    draft_spec = DraftSpec.from_target(spec, DraftConfig(), VOCAB)
    torch.manual_seed(0)
    draft = Draft(draft_spec, model.get_input_embeddings().weight.detach())
    records, wanted = [], []
    for prompt in PROMPTS[::2]:
        ids = torch.tensor(prompt.input_ids + greedy(model, prompt.input_ids, CAP, [2]))
        with torch.inference_mode():
            states = model(ids[None], output_hidden_states=True).hidden_states
        aux = torch.cat([states[block + 1][0] for block in spec.aux_blocks], -1).clone()
        mask = torch.arange(len(ids)) >= len(prompt.input_ids)
        records.append(Record(id=prompt.id, dataset="b1", tokens=ids, loss_mask=mask, aux=aux, final=aux[:, :0]))
        wanted.append(ids)
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    batches = [(make_batch([record], K), ids[len(PROMPTS[0].input_ids) + 1 :]) for record, ids in zip(records, wanted, strict=True)]
    for _ in range(steps):
        for batch, tokens in batches:
            states = draft.unroll(batch, K)
            loss = torch.zeros(())
            for step, state in enumerate(states):
                logits = draft.lm_head(rms_norm(state, draft.norm.weight, draft_spec.rms_norm_eps))
                loss = loss + cross_entropy(logits[: len(tokens) - step], tokens[step:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    tensors = {name: value.detach().clone() for name, value in draft.named_parameters()}
    tensors["d2t"], tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool)
    (folder / "config.json").write_text(json.dumps(draft_spec.engine_config("float32")))
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def measured(model: Any, tmp_path_factory: pytest.TempPathFactory) -> SetMeasurement:
    folder, export = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("export")
    spec = save_target(model, folder)
    fit_draft(model, spec, export)
    engine = EngineConfig(dtype="float32", threads=1, max_running_requests=8)
    config = BenchmarkConfig(num_draft_tokens=K, max_new_tokens=CAP, timed_prompts=2, counting_concurrency=4)
    with (
        EngineProcess(folder, config=engine) as off,
        EngineProcess(folder, config=engine, draft_dir=export, num_draft_tokens=K) as on,
    ):
        servers = {
            side: Server(url=process.url, config=ServerConfig(), has_draft=process is on, stop_token_ids=(2,))
            for side, process in (("off", off), ("on", on))
        }
        return measure_set(
            "heldout",
            PROMPTS,
            servers,  # type: ignore[arg-type]
            config,
            measure_tie=LocalJudge(model, K),
            bigrams=BigramTable({}),
            predict=Predictor(export, spec, model, K).counts,
            step=lambda word: None,
        )


def test_every_reply_in_fp32_is_identical(measured: SetMeasurement) -> None:
    outcomes = [row.outcome for row in measured.rows] + [outcome for block in measured.blocks for outcome in block.outcomes]
    assert outcomes == ["identical"] * len(outcomes)


def test_engine_without_draft_gives_the_targets_own_replies(measured: SetMeasurement, model: Any) -> None:
    for row in measured.rows:
        assert row.reference_ids == greedy(model, row.prompt_ids, CAP, [2])


def test_served_counts_are_the_replayed_ones_request_by_request(measured: SetMeasurement) -> None:
    """The replay is the served chain: the same hits, the same walk, in fp32 without ties."""
    served = [(row.verifications, row.accepted) for row in measured.rows]
    assert served == [row.predicted for row in measured.rows]
    lengths = [1 + accepted / verifications for verifications, accepted in served]
    assert max(lengths) > 2.0  # the draft knows something
    assert min(lengths) < max(lengths)


def test_both_engines_serve_the_configured_context(model: Any, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    spec = save_target(model, target)
    run = RunFolder(tmp_path / "run").create()
    run.export.mkdir(parents=True)
    fit_draft(model, spec, run.export, steps=0)
    engine = {"dtype": "float32", "threads": 1, "max_running_requests": 2}
    config = RunConfig.model_validate({"target": {"model": str(target), "context_length": 64}, "server": {"engine": engine}})
    with open_servers(run, config, spec, cache_tokens=256, api_key="") as pair:
        contexts = [httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] for server in pair.servers.values()]
    assert contexts == [64, 64]
