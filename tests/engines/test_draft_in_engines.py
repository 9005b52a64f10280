"""An exported draft in three engines: real SGLang, real vLLM and the embedded one, against each other and the replay.

All in fp32 and greedy, on the loop-free part of the target's own replies, so that every engine makes the
same tokens and only what the draft contributes can differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.config import RunConfig
from eyas.draft.config import DraftConfig
from eyas.draft.export import load_export
from eyas.draft.spec import DraftSpec
from eyas.engine.config import EngineConfig
from eyas.engine.process import EngineProcess
from eyas.files import write_json
from eyas.sglang.config import ServerConfig
from eyas.speculate.accept import AcceptCounts, counts_from_vllm, pool
from eyas.speculate.config import DraftShape
from eyas.speculate.load import Server, run_block
from eyas.speculate.loops import loop_free_tokens
from eyas.speculate.lossless import LocalJudge, judge, load_judge
from eyas.speculate.predict import Predictor
from eyas.speculate.results import Side
from eyas.speculate.server_judge import ServerJudge
from eyas.speculate.sets import BenchmarkPrompt, load_set
from eyas.target.spec import TargetSpec
from eyas.workspace import RunFolder
from tests.engines.conftest import RunVllm, sglang_server

pytestmark = pytest.mark.engines

K = 3
CAP = 64
WANTED_VERIFICATIONS = 2000


@dataclass
class Case:
    """Prompts, the target's own replies, and the caps that leave out loops."""

    target: TargetSpec
    export: Path
    prompts: list[BenchmarkPrompt]
    replies: list[list[int]]
    caps: list[int]
    judge_model: Any

    def outcomes(self, seen: list[list[int]]) -> list[str]:
        return [
            judge(LocalJudge(self.judge_model, K), prompt.input_ids, reply[:cap], ids).outcome
            for prompt, reply, cap, ids in zip(self.prompts, self.replies, self.caps, seen, strict=True)
        ]


def sglang_flags(draft: Path) -> list[str]:
    flags = f"--dtype float32 --speculative-algorithm EAGLE3 --speculative-num-steps {K} --speculative-eagle-topk 1"
    return [*flags.split(), "--speculative-num-draft-tokens", str(K + 1), "--speculative-draft-model-path", str(draft)]


def server(url: str, target: TargetSpec, *, has_draft: bool) -> Server:
    return Server(url=url, config=ServerConfig(), has_draft=has_draft, stop_token_ids=tuple(target.eos_token_ids))


def standard_prompts(target: TargetSpec, per_set: int) -> list[BenchmarkPrompt]:
    config = RunConfig.model_validate({"benchmark": {"prompts_per_set": per_set}})
    unused = RunFolder(Path("unused"))
    return [prompt for source in ("package:mt-bench", "package:humaneval") for prompt in load_set(unused, config, target, source)]


def make_case(target: TargetSpec, export: Path, per_set: int, log: Path) -> Case:
    prompts = standard_prompts(target, per_set)
    with EngineProcess(target.folder, config=EngineConfig(dtype="float32"), log=log) as engine:
        block = run_block(server(engine.url, target, has_draft=False), prompts, [CAP] * len(prompts), 32)
    replies = [reply.output_ids for reply in block.replies]
    caps = [max(2, loop_free_tokens(ids)) for ids in replies]
    return Case(target, export, prompts, replies, caps, load_judge(target, "float32"))


def in_embedded(case: Case, log: Path) -> tuple[AcceptCounts, list[list[int]]]:
    config = EngineConfig(dtype="float32")
    with EngineProcess(case.target.folder, config=config, draft_dir=case.export, num_draft_tokens=K, log=log) as engine:
        return served_by(engine.url, case)


def in_sglang(case: Case, python: Path, log: Path) -> tuple[AcceptCounts, list[list[int]]]:
    with sglang_server(python, log, case.target.folder, *sglang_flags(case.export)) as url:
        return served_by(url, case)


def served_by(url: str, case: Case) -> tuple[AcceptCounts, list[list[int]]]:
    block = run_block(server(url, case.target, has_draft=True), case.prompts, case.caps, 16)
    return pool(reply.counts for reply in block.replies if reply.counts), [reply.output_ids for reply in block.replies]


def in_vllm(case: Case, run: RunVllm) -> tuple[AcceptCounts, list[list[int]]]:
    job = {
        "target": str(case.target.folder),
        "draft": str(case.export),
        "num_draft_tokens": K,
        "dtype": "float32",
        "prompts": [prompt.input_ids for prompt in case.prompts],
        "max_new_tokens": case.caps,
        "stop_token_ids": case.target.eos_token_ids,
        "max_model_len": 2048,
        "max_num_seqs": 16,
    }
    result = run(job)
    return counts_from_vllm(result["metrics"]), result["output_ids"]


@pytest.fixture(scope="module")
def random_case(target: TargetSpec, tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Case:
    """A draft that has learnt nothing, in the exact format of the export."""
    folder = tmp_path_factory.mktemp("random-draft")
    spec = DraftSpec.from_target(target, DraftConfig(), 8192)
    torch.manual_seed(0)
    tensors = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in spec.tensor_shapes.items()}
    tensors["d2t"] = torch.arange(8192) * 5  # target id 6 i: offsets, not ids
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
    tensors["t2d"][torch.arange(8192) * 6] = True
    (folder / "config.json").write_text(json.dumps(spec.engine_config("bfloat16")))
    save_file(tensors, folder / "model.safetensors")
    load_export(folder)
    return make_case(target, folder, 2, logs / "embedded-random.log")


def test_sglang_loads_the_export_and_stays_lossless(random_case: Case, sglang_python: Path, logs: Path) -> None:
    """No embeddings in the file (SGLang takes the target's), offsets in d2t: https://github.com/lightseekorg/TorchSpec/issues/38,
    https://github.com/NVIDIA-NeMo/Automodel/pull/2447. Log-probabilities under speculation judge ties: they are the target's own.
    """
    case = random_case
    with sglang_server(sglang_python, logs / "sglang-random.log", case.target.folder, *sglang_flags(case.export)) as url:
        counts, seen = served_by(url, case)
        on = server(url, case.target, has_draft=True)
        runner_up = second_choice(case, 5)
        tokens = (case.replies[0][5], runner_up)
        gap, epsilon = ServerJudge(OneForBoth(on), DraftShape(num_steps=K))(case.prompts[0].input_ids, case.replies[0][:5], tokens)
    assert case.outcomes(seen) == ["identical"] * 4
    assert counts.verifications > 0
    assert counts.accept_length < 1.1
    assert gap == pytest.approx(
        LocalJudge(case.judge_model, K)(case.prompts[0].input_ids, case.replies[0][:5], tokens)[0], abs=1e-2
    )
    assert epsilon < 1e-3


class OneForBoth:
    """One running server, given out for either side."""

    is_side_by_side = True

    def __init__(self, server: Server) -> None:
        self.server = server

    def get(self, side: Side, shape: DraftShape, *, fresh: bool = False) -> Server:
        return self.server


def second_choice(case: Case, position: int) -> int:
    ids = torch.tensor([case.prompts[0].input_ids + case.replies[0][:position]])
    with torch.inference_mode():
        return int(case.judge_model(ids).logits[0, -1].topk(2).indices[1])


def test_vllm_loads_the_export_and_stays_lossless(random_case: Case, vllm_generate: RunVllm) -> None:
    """Missing names raise in vLLM: the export has all it reads, and embeddings are absent by intent."""
    counts, seen = in_vllm(random_case, vllm_generate)
    assert random_case.outcomes(seen) == ["identical"] * 4
    assert counts.verifications > 0
    assert counts.accept_length < 1.1


@pytest.fixture(scope="module")
def trained_case(finished_run: RunFolder, target: TargetSpec, logs: Path) -> Case:
    return make_case(target, finished_run.export.absolute(), 40, logs / "embedded.log")


def write_table(run: Path, case: Case, counts: dict[str, AcceptCounts], outcomes: dict[str, list[str]]) -> None:
    """`benchmark/engines.json` of the measured run: what its report shows beside its own figures."""
    rows = {
        name: {
            "accept_length": count.accept_length,
            "num_verifications": count.verifications,
            "num_accepted": count.accepted,
            "outputs": {outcome: outcomes[name].count(outcome) for outcome in ("identical", "tie", "wrong")}
            if name in outcomes
            else None,
        }
        for name, count in counts.items()
    }
    write_json(
        run / "benchmark" / "engines.json",
        {"dtype": "float32", "num_draft_tokens": K, "prompts": len(case.prompts), "engines": rows},
    )


def test_three_engines_and_the_replay_agree_on_the_accept_length(
    request: pytest.FixtureRequest,
    trained_case: Case,
    sglang_python: Path,
    vllm_generate: RunVllm,
    logs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One definition, raw counters, the same prompts and replies: within 3 % of one another, no reply wrong."""
    case = trained_case
    served = {
        "embedded": in_embedded(case, logs / "embedded-draft.log"),
        "sglang": in_sglang(case, sglang_python, logs / "sglang-draft.log"),
        "vllm": in_vllm(case, vllm_generate),
    }
    predictor = Predictor(case.export, case.target, case.judge_model, K)
    pairs = [(prompt.input_ids, reply[:cap]) for prompt, reply, cap in zip(case.prompts, case.replies, case.caps, strict=True)]
    counts = {name: item[0] for name, item in served.items()} | {"replay": pool(predictor.counts(pairs))}
    outcomes = {name: case.outcomes(item[1]) for name, item in served.items()}
    named = request.config.getoption("--engines-run", default="")
    if named:
        write_table(Path(named), case, counts, outcomes)
    with capsys.disabled():
        for name, count in counts.items():
            print(
                f"\n{name}: accept length {count.accept_length:.4f}, {count.accepted} accepted, {count.verifications} verifications"
            )
    assert all("wrong" not in outcome for outcome in outcomes.values()), outcomes
    assert min(count.verifications for count in counts.values()) >= WANTED_VERIFICATIONS
    lengths = [count.accept_length for count in counts.values()]
    assert max(lengths) / min(lengths) < 1.03, counts
