"""The benchmark as an operator of one host runs it: real SGLang, restarted between the sides by commands.

One benchmark for all of it: target alone, draft, draft, target alone; the same again with a tree in place of the chain;
replies at temperature 1 from both sides.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyas.config import RunConfig
from eyas.files import read_json
from eyas.manifest import verify_manifest
from eyas.operate.hosts import CommandHost, sides_of
from eyas.speculate.benchmark import benchmark
from eyas.speculate.measure import SAMPLED_TOKENS
from eyas.speculate.results import SetMeasurement
from eyas.speculate.sampling import same_distribution
from eyas.workspace import RunFolder
from tests.engines.conftest import ROOT, SGLANG_FLAGS, free_port

pytestmark = pytest.mark.engines

NUM_PROMPTS = 8
# Even SGLang samples the first token, of the prefill: a prompt after which little is uncertain shows nothing. Simulated on
# held-out prompts, 64 replies after two of them gave p up to 0.0008, 32 after six always the least possible, 0.00025.
NUM_SAMPLED, NUM_SAMPLED_PROMPTS = 48, 6

# What an operator would write: ends the server that runs, then starts the next in a process group of its own.
HOST = """#!/bin/bash
set -eu
cd {folder}
if [ -f pid ]; then
    kill -KILL -- "-$(cat pid)"
    while kill -0 -- "-$(cat pid)" 2>/dev/null; do sleep 0.2; done
    rm pid
fi
mode=$1; shift
[ "$mode" = none ] && exit 0
env -u PYTHONPATH setsid {command} "$@" > "$mode.log" 2>&1 &
echo $! > pid
"""


@dataclass
class Measured:
    run: RunFolder
    results: dict[str, Any]
    modes: list[str]

    @property
    def sampled(self) -> SetMeasurement:
        (path,) = self.run.benchmark.glob("raw-heldout-*.json")
        return SetMeasurement.model_validate(read_json(path))


@pytest.fixture(scope="module")
def measured(finished_run: RunFolder, sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("one-host")
    run = RunFolder(folder / "run").create()
    for name in ("prompts", "merged", "draft/export"):
        shutil.copytree(finished_run.root / name, run.root / name, dirs_exist_ok=True)
    record = read_json(finished_run.run_json)
    assert isinstance(record, dict)
    config = _config(RunConfig.model_validate(record["config"]), folder, sglang_python)
    said: list[str] = []
    host = CommandHost(run, config, say=said.append)
    try:
        benchmark(run, config, serve=sides_of(host, run.export))
    finally:
        if (folder / "pid").is_file():
            with suppress(ProcessLookupError):
                os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
    results = read_json(run.benchmark / "results.json")
    assert isinstance(results, dict)
    return Measured(run, results, [line.split()[2].rstrip(":") for line in said if line.startswith("host: mode")])


def _config(config: RunConfig, folder: Path, python: Path) -> RunConfig:
    from eyas.target.spec import load_target

    port = free_port()
    parts = [str(python), str(ROOT / "engines/sglang/launch.py"), "--model-path", str(load_target(config.target).folder)]
    parts += [*SGLANG_FLAGS, "--dtype", "float32", "--port", str(port)]
    script = folder / "host.sh"
    script.write_text(HOST.format(folder=shlex.quote(str(folder)), command=shlex.join(parts)))
    drafting = (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft} --speculative-num-steps {steps} "
        "--speculative-eagle-topk {top_k} --speculative-num-draft-tokens {tokens}"
    )
    raw = config.model_dump(mode="json")
    raw["server"] |= {"kind": "sglang", "urls": [f"http://127.0.0.1:{port}"], "deadline_floor_s": 900}
    raw["operate"]["host"] = {
        "kind": "command",
        "commands": {
            "generate": f"bash {script} generate",
            "none": f"bash {script} none",
            "draft": f"bash {script} draft {drafting}",
        },
        "ready_timeout_s": 900,
    }
    raw["benchmark"] = {
        "sets": ["heldout"],
        "prompts_per_set": NUM_PROMPTS,
        "max_new_tokens": 48,
        "counting_concurrency": 8,
        "timed_prompts": 2,
        "sampled_replies": NUM_SAMPLED,
        "sampled_prompts": NUM_SAMPLED_PROMPTS,
        "grid": [{"num_steps": 3, "top_k": 2, "num_verified": 6}],
        "hardware": "cpu",
    }
    return RunConfig.model_validate(raw)


def test_one_host_is_restarted_in_abba_order_for_every_shape(measured: Measured) -> None:
    one_round = [mode for side in ("generate", "draft", "draft", "generate") for mode in (side, "none")]
    assert measured.modes == one_round * 2
    assert verify_manifest(measured.run.benchmark).counts.done == NUM_PROMPTS


def test_chain_and_tree_give_the_targets_own_replies(measured: Measured) -> None:
    """In fp32 every reply is identical, counted and timed, with chain and tree, and the chain does as its replay says."""
    results = measured.results
    assert results["outputs"]["identical"] == results["outputs"]["checked"] > 0
    assert results["accept_length"]["overall"] == pytest.approx(results["predicted_accept_length"], rel=0.03)
    chain, tree = results["grid"]
    assert "top-k=2" in tree["shape"]
    assert tree["outputs"]["identical"] == tree["outputs"]["checked"] > 0
    # The tree's six tokens hold the likeliest branches: it accepts what the chain does, but for a few leaves left out.
    assert tree["accept_length"] > 0.97 * chain["accept_length"]
    assert tree["num_verifications"] > 0
    assert all(point["speedup"] > 0 for shape in results["grid"] for point in shape["timing"])


def test_the_test_of_sampling_sees_that_sglang_on_a_cpu_ignores_the_temperature(measured: Measured) -> None:
    """SGLang 0.5.23 verifies greedily on every CPU (`_verify_uses_greedy` in its eagle_utils.py): a real broken sampler.

    The same test on two halves of the target's own replies, the other side of it, finds nothing.
    """
    results = measured.results
    assert results["sampling"]["holds"] is False
    assert results["deployment"]["serves_draft"] is False
    assert "distribution at temperature 1" in results["deployment"]["reason"]
    half = NUM_SAMPLED // 2
    own = [(item.off[:half], item.off[half:]) for item in measured.sampled.sampled]
    assert all(len(reply) <= SAMPLED_TOKENS for side in own for replies in side for reply in replies)
    verdict = same_distribution(own)
    assert verdict is not None
    assert verdict["holds"]
