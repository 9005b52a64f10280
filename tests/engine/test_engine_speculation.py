"""Speculation: proposals against a slow reference, replies against plain decoding, counts against the replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from eyas.engine.model import Rotary
from eyas.engine.request import Request
from eyas.engine.sampling import SamplingParams
from eyas.errors import ConfigError
from eyas.files import read_json, write_json
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from tests.engine.conftest import greedy, make_runner, random_prompts, run_requests, save_draft, save_target


def slow_chain(spec: TargetSpec, folder: Path, ids: list[int], num_drafts: int) -> list[int]:
    """The K proposals after `ids`, recomputing target and draft from nothing, one column at a time."""
    w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = read_json(folder / "config.json")
    model = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    # hidden_states[k + 1] is the output of block k
    aux = torch.cat([hidden[k + 1][0] for k in (1, spec.num_layers // 2 - 1, spec.num_layers - 4)], -1)
    heads, kv, d, eps = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]
    rotary = Rotary(model.config, d, 1024)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[name]

    keys: list[Tensor] = []
    values: list[Tensor] = []

    def column(token: int, state: Tensor, position: int) -> Tensor:
        x = torch.cat(
            [
                norm(model.model.embed_tokens.weight[token], "midlayer.input_layernorm.weight"),
                norm(state, "midlayer.hidden_norm.weight"),
            ]
        )
        q, k, v = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ x).view(-1, d) for n in "qkv")
        cos, sin = torch.from_numpy(rotary.cos[position]), torch.from_numpy(rotary.sin[position])
        q, k = (
            torch.cat([x[:, : d // 2] * cos - x[:, d // 2 :] * sin, x[:, d // 2 :] * cos + x[:, : d // 2] * sin], -1)
            for x in (q, k)
        )
        keys.append(k)
        values.append(v)
        outs = []
        for head in range(heads):
            group = head // (heads // kv)
            scores = torch.stack([key[group] @ q[head] for key in keys]) / d**0.5
            outs.append(sum(p * value[group] for p, value in zip(scores.softmax(0), values, strict=True)))
        state = state + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(outs)
        y = norm(state, "midlayer.post_attention_layernorm.weight")
        gate = functional.silu(w["midlayer.mlp.gate_proj.weight"] @ y) * (w["midlayer.mlp.up_proj.weight"] @ y)
        return state + w["midlayer.mlp.down_proj.weight"] @ gate

    with torch.inference_mode():
        for t in range(len(ids) - 1):
            state = column(ids[t + 1], w["fc.weight"] @ aux[t], t)
        chain: list[int] = []
        for step in range(num_drafts):
            best = int((w["lm_head.weight"] @ norm(state, "norm.weight")).argmax())
            chain.append(best + int(w["d2t"][best]))
            if step + 1 < num_drafts:
                state = column(chain[-1], state, len(ids) - 1 + step)
    return chain


def spy_on_proposals(runner: Any) -> list[tuple[list[int], list[int]]]:
    """Record (known tokens, proposals) of every step that `runner` makes."""
    seen: list[tuple[list[int], list[int]]] = []
    plain = runner.step

    def step(decoding: list[Request], pieces: Any) -> Any:
        results = plain(decoding, pieces)
        seen.extend(([*r.prompt_ids, *r.output_ids, *tokens], list(r.drafts)) for r, tokens in results)
        return results

    runner.step = step
    return seen


@pytest.mark.parametrize(("num_drafts", "num_kv_heads"), [(3, 2), (1, 3), (4, 6)])
def test_proposals_equal_a_slow_reference(num_drafts: int, num_kv_heads: int, target: TargetSpec, tmp_path: Path) -> None:
    draft = save_draft(tmp_path, target, draft_vocab_size=32, num_kv_heads=num_kv_heads)
    runner = make_runner(target, draft=draft, num_drafts=num_drafts)
    seen = spy_on_proposals(runner)
    run_requests(runner, random_prompts(2, 60, 70), greedy(10), chunk=64)
    assert len(seen) > 6
    for known, drafts in seen:
        assert drafts == slow_chain(target, draft, known, num_drafts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replies_equal_plain_greedy_decoding(dtype: torch.dtype, tmp_path: Path) -> None:
    spec = load_target(TargetConfig(model=str(save_target(tmp_path / "target", vocab_size=12))))
    draft = save_draft(tmp_path / "draft", spec, draft_vocab_size=6)
    prompts = random_prompts(9, 1, 150, vocab_size=12)
    plain = run_requests(make_runner(spec, dtype), prompts, greedy(90))
    fast = run_requests(make_runner(spec, dtype, draft=draft), prompts, greedy(90), max_running=5, chunk=64)
    assert [r.output_ids for r in fast] == [r.output_ids for r in plain]
    assert sum(r.spec.accepted for r in fast if r.spec) > 20


def test_counts_add_up_to_the_reply_and_stop_at_its_end(tmp_path: Path) -> None:
    spec = load_target(TargetConfig(model=str(save_target(tmp_path / "target", vocab_size=12))))
    draft = save_draft(tmp_path / "draft", spec, draft_vocab_size=6)
    for request in run_requests(make_runner(spec, draft=draft), random_prompts(8, 3, 40, vocab_size=12), greedy(41)):
        counts = request.spec
        assert counts is not None
        assert counts.proposed == 3 * counts.verifications
        assert sum(counts.histogram) == counts.verifications
        assert sum(i * n for i, n in enumerate(counts.histogram)) == counts.accepted
        # each verification gives its accepted drafts and one more; only the last may be cut by the length
        assert 41 - 1 in (counts.accepted + counts.verifications, counts.accepted + counts.verifications - 1)


def test_a_reply_ends_at_a_stop_token_inside_an_accepted_run(tmp_path: Path) -> None:
    spec = load_target(TargetConfig(model=str(save_target(tmp_path / "target", vocab_size=12))))
    draft = save_draft(tmp_path / "draft", spec, draft_vocab_size=6)
    prompts = random_prompts(6, 3, 40, vocab_size=12)
    free = run_requests(make_runner(spec), prompts, greedy(40))
    stops = [frozenset({r.output_ids[17]}) for r in free]
    params = [greedy(40, stop_token_ids=stop) for stop in stops]
    fast = run_requests(make_runner(spec, draft=draft), prompts, params)
    for request, whole, stop in zip(fast, free, stops, strict=True):
        end = next(i for i, token in enumerate(whole.output_ids) if token in stop)
        assert request.output_ids == whole.output_ids[: end + 1]
        assert request.finish_reason == {"type": "stop", "matched": request.output_ids[-1]}


def test_a_seeded_sampled_reply_is_the_same_whatever_runs_beside_it(target: TargetSpec, draft: Path) -> None:
    prompts = random_prompts(6, 5, 100)
    params = [SamplingParams(temperature=0.9, top_p=0.9, sampling_seed=i, max_new_tokens=40, ignore_eos=True) for i in range(6)]
    alone = [
        run_requests(make_runner(target, torch.bfloat16, draft=draft), [p], q)[0].output_ids
        for p, q in zip(prompts, params, strict=True)
    ]
    together = run_requests(make_runner(target, torch.bfloat16, draft=draft), prompts, params)
    assert [r.output_ids for r in together] == alone


def test_a_draft_of_another_target_is_refused(target: TargetSpec, tmp_path: Path) -> None:
    draft = save_draft(tmp_path, target, draft_vocab_size=32)
    config = read_json(draft / "config.json")
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 5]
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 6]
    write_json(draft / "config.json", config)
    with pytest.raises(ConfigError, match="aux_blocks"):
        make_runner(target, draft=draft)
