"""The written-out forward pass and the paged cache against transformers, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.engine.request import LogprobOptions
from eyas.errors import ConfigError
from eyas.files import read_json, write_json
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from tests.engine.conftest import greedy, make_runner, random_prompts, run_requests, save_target


def slow_greedy(spec: TargetSpec, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by recomputing everything for every token."""
    model = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=torch.float32)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "untied", "qwen2", "qwen3"])
def test_greedy_replies_equal_transformers(kind: str, tmp_path: Path) -> None:
    spec = load_target(TargetConfig(model=str(save_target(tmp_path, kind))))
    prompts = random_prompts(3, 1, 150)
    requests = run_requests(make_runner(spec), prompts, greedy(16))
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == slow_greedy(spec, prompt, 16)


def test_batches_chunks_shared_prefixes_and_scattered_pages_change_nothing(target: TargetSpec) -> None:
    head = random_prompts(1, 200, 201)[0]
    prompts = [*random_prompts(6, 1, 300), *([*head, *tail] for tail in random_prompts(6, 1, 100, seed=9))]
    params = [greedy(4 + 13 * i) for i in range(12)]
    alone = [run_requests(make_runner(target), [p], q)[0].output_ids for p, q in zip(prompts, params, strict=True)]
    runner = make_runner(target)
    first = run_requests(runner, prompts, params, max_running=5, chunk=64)
    again = run_requests(runner, prompts, params, max_running=12, chunk=128)
    assert [r.output_ids for r in first] == alone
    assert [r.output_ids for r in again] == alone
    assert sum(r.num_cached for r in again) > 0


def test_a_row_in_bf16_is_bitwise_independent_of_what_runs_beside_it(target: TargetSpec) -> None:
    prompts = random_prompts(9, 1, 200)
    options = {"logprob_options": LogprobOptions()}
    alone = [run_requests(make_runner(target, torch.bfloat16), [p], greedy(70), **options)[0] for p in prompts]
    together = run_requests(make_runner(target, torch.bfloat16), prompts, greedy(70), chunk=64, max_running=4, **options)
    for one, other in zip(alone, together, strict=True):
        assert one.output_ids == other.output_ids
        assert one.output_logprobs.tokens == other.output_logprobs.tokens


def test_requests_retracted_for_want_of_pages_make_the_same_replies(target: TargetSpec) -> None:
    prompts = random_prompts(6, 30, 60)
    wanted = [r.output_ids for r in run_requests(make_runner(target), prompts, greedy(120))]
    short = run_requests(make_runner(target, num_pages=8), prompts, greedy(120))
    assert [r.output_ids for r in short] == wanted
    assert sum(r.num_retractions for r in short) > 0


def test_input_and_output_logprobs_equal_transformers(target: TargetSpec) -> None:
    prompt = random_prompts(1, 100, 101)[0]
    options = LogprobOptions(start=0, num_top=3, token_ids=[5, 6])
    request = run_requests(make_runner(target), [prompt], greedy(5), chunk=64, logprob_options=options)[0]
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)
    ids = [*prompt, *request.output_ids]
    with torch.inference_mode():
        truth = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    wanted = truth[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    seen = [*request.input_logprobs.tokens, *request.output_logprobs.tokens]
    assert [token for _, token in seen] == ids
    assert seen[0][0] is None
    torch.testing.assert_close(torch.tensor([value for value, _ in seen[1:]]), wanted, atol=2e-4, rtol=0)
    best = [token for _, token in request.output_logprobs.top[0]]
    assert best == truth[len(prompt) - 1].topk(3).indices.tolist()
    assert [pair[1] for pair in request.output_logprobs.asked[0]] == [5, 6]


def test_an_unknown_architecture_is_refused_in_one_line(tmp_path: Path) -> None:
    save_target(tmp_path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"architectures": ["GemmaForCausalLM"]})
    with pytest.raises(ConfigError, match="GemmaForCausalLM") as caught:
        make_runner(load_target(TargetConfig(model=str(tmp_path))))
    assert "\n" not in str(caught.value)
