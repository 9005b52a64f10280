"""The benchmark on the embedded engine itself: a draft that knows a little, served, counted, replayed."""

from __future__ import annotations

import json
from contextlib import ExitStack
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
from eyas.speculate.baselines import BigramTable
from eyas.speculate.blocks import SIDES, BlockStore
from eyas.speculate.lossless import LocalJudge
from eyas.speculate.measure import collect, compare
from eyas.speculate.predict import Predictor
from eyas.speculate.results import SetMeasurement
from eyas.speculate.sampling import same_distribution
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
    folder, run = tmp_path_factory.mktemp("target"), RunFolder(tmp_path_factory.mktemp("run")).create()
    spec = save_target(model, folder)
    run.export.mkdir(parents=True)
    fit_draft(model, spec, run.export)
    settings = {"num_draft_tokens": K, "max_new_tokens": CAP, "timed_prompts": 2, "counting_concurrency": 4, "dtype": "float32"}
    settings |= {"grid": [{"num_steps": 2}], "sampled_replies": 60, "sampled_prompts": 2}
    config = RunConfig.model_validate(
        {"target": {"model": str(folder)}, "server": {"engine": {"threads": 1}}, "benchmark": settings}
    )
    with ExitStack() as stack:
        servers = open_servers(run, config, spec, stack, cache_tokens=2048, api_key="")
        store = BlockStore(run.benchmark / "blocks")
        blocks, asked = collect({"heldout": PROMPTS}, servers, config.benchmark, store, lambda name, word: None)
        assert all(check.holds for checks in servers.account.identity.values() for check in checks)
        (measurement,) = compare(
            blocks,
            asked,
            config.benchmark,
            measure_tie=LocalJudge(model, K),
            bigrams=BigramTable({}),
            predict=Predictor(run.export, spec, model, K).counts,
        )
    return measurement


def test_a_shorter_chain_is_the_same_draft_cut_short(measured: SetMeasurement) -> None:
    (point,) = measured.grid
    assert set(point.outcomes) == {"identical"}
    assert 1 < 1 + point.accepted / point.verifications <= 3
    assert len(point.histogram) <= 3


def test_replies_at_temperature_1_come_from_one_distribution(measured: SetMeasurement) -> None:
    found = same_distribution([(item.off, item.on) for item in measured.sampled])
    assert found is not None
    assert (found["prompts"], found["replies_per_side"], found["holds"]) == (2, 120, True)
    assert len({tuple(reply) for reply in measured.sampled[0].on}) > 10


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
    with ExitStack() as stack:
        servers = open_servers(run, config, spec, stack, cache_tokens=256, api_key="")
        urls = [servers.get(side, config.benchmark.shape).url for side in SIDES[:2]]
        contexts = [httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] for url in urls]
    assert contexts == [64, 64]
