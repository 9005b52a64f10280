"""What cannot work is refused at once: exit code 2, one line, the thing and the next step named."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyas.config import load_config
from eyas.errors import ConfigError
from eyas.files import read_json, write_json
from eyas.hidden.demands import check_source
from eyas.operate import cli, preflight
from eyas.operate.phases import PHASES, require_earlier
from eyas.speculate.servers import check_shapes
from eyas.workspace import RunFolder
from tests.operate.conftest import DATASETS

ROOT = Path(__file__).parents[2]
Write = Callable[..., Path]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `eyas run --no-prefect` and give the one line with which it refuses."""

    def refuse(config: Path, *words: str, run: Path | None = None) -> str:
        code = cli.main(["run", "--no-prefect", "--config", str(config), "--run", str(run or tmp_path / "run"), *words])
        captured = capsys.readouterr()
        assert code == 2, captured.err
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("error: ")
        assert "Traceback" not in captured.err
        return lines[0]

    return refuse


def test_unknown_key(config_file: Write, refused: Callable[..., str]) -> None:
    assert "unknown key 'draft.epoks'" in refused(config_file(draft__epoks=3))


def test_value_out_of_range(config_file: Write, refused: Callable[..., str]) -> None:
    line = refused(config_file(), "--set", "draft.epochs=-1")
    assert "draft.epochs" in line
    assert "greater than 0" in line


def test_missing_config(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "absent.yaml cannot be read" in refused(tmp_path / "absent.yaml")


def test_no_config_for_a_run_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--run", str(tmp_path / "none")]) == 2
    assert "no --config is given" in capsys.readouterr().err


def test_missing_prompt_file(config_file: Write, refused: Callable[..., str]) -> None:
    line = refused(config_file(), "--set", "prompts.datasets.0.source=file:/nowhere/rows.jsonl")
    assert "B1_calls" in line
    assert "/nowhere/rows.jsonl does not exist" in line


def test_every_missing_file_is_named_at_once_and_no_folder_beside_absolute_paths(
    config_file: Write, refused: Callable[..., str]
) -> None:
    changes = ["--set", "prompts.datasets.0.source=file:/nowhere/rows.jsonl", "--set", "benchmark.sets=['file:/nowhere/q.jsonl']"]
    line = refused(config_file(), *changes)
    assert "B1_calls.source: /nowhere/rows.jsonl, benchmark.sets.0: /nowhere/q.jsonl do not exist; correct the path" in line
    assert "relative" not in line


def test_a_missing_relative_file_says_where_its_path_begins(config_file: Write, refused: Callable[..., str]) -> None:
    line = refused(config_file(), "--set", "prompts.datasets.0.source=file:rows-of-nobody.jsonl")
    assert f"rows-of-nobody.jsonl does not exist; correct the path (a relative path begins at {Path.cwd()})" in line


def test_unknown_package_of_prompts(config_file: Write, refused: Callable[..., str]) -> None:
    assert "package:none" in refused(config_file(), "--set", "prompts.datasets.0.source=package:none")


def test_no_dataset(config_file: Write, refused: Callable[..., str]) -> None:
    assert "prompts.datasets is empty" in refused(config_file(prompts__datasets=[]))


def test_tokenizer_without_chat_template(config_file: Write, target_folder: Path, refused: Callable[..., str]) -> None:
    settings = read_json(target_folder / "tokenizer_config.json")
    write_json(target_folder / "tokenizer_config.json", {key: settings[key] for key in settings if key != "chat_template"})
    assert "no chat template" in refused(config_file())


def test_target_of_an_unknown_architecture(config_file: Write, target_folder: Path, refused: Callable[..., str]) -> None:
    write_json(target_folder / "config.json", read_json(target_folder / "config.json") | {"model_type": "nobody_knows"})
    assert "cannot be built by transformers" in refused(config_file())


def test_target_that_has_no_head_to_read(config_file: Write, target_folder: Path, refused: Callable[..., str]) -> None:
    encoder = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 8}
    write_json(target_folder / "config.json", read_json(target_folder / "config.json") | encoder)
    assert str(target_folder) in refused(config_file())


def test_port_in_use(config_file: Write, refused: Callable[..., str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = refused(config_file(), "--set", f"server.engine.port={port}")
    assert f"server.engine.port {port} is in use" in line


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs a folder that root cannot write either")
def test_read_only_run_folder(config_file: Write, refused: Callable[..., str]) -> None:
    line = refused(config_file(), run=Path("/proc/self/run"))
    assert "cannot be written" in line
    assert "--run" in line


def test_too_little_disk(config_file: Write, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 5_000)
    line = refused(config_file())
    assert "5 kB free" in line
    assert "keeps" in line


def test_dry_run_says_that_the_disk_is_too_small(
    config_file: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eyas.operate import plan

    monkeypatch.setattr(plan, "free_bytes", lambda _: 5_000)
    run = tmp_path / "run"
    assert cli.main(["run", "--dry-run", "--config", str(config_file()), "--run", str(run)]) == 2
    captured = capsys.readouterr()
    assert "Extract hidden states" in captured.out
    assert "5 kB free" in captured.err
    assert not run.exists()


@contextmanager
def model_server(answers: dict[str, Any], *, status: int = 200) -> Iterator[str]:
    """A server that says who it is."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_server_of_another_model(config_file: Write, refused: Callable[..., str]) -> None:
    with model_server({"model_path": "/models/other", "served_model_name": "other"}) as url:
        line = refused(config_file(server={"kind": "sglang", "urls": [url]}))
    assert "other" in line
    assert "server.urls" in line


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1:30000", "127.0.0.1:30000", "http://", "http://a:0", "http://a:99999", "http://[::1", "http://a b", ""]
)
@pytest.mark.parametrize("key", ["server.urls", "hidden.urls", "hidden.final_urls", "benchmark.draft_urls"])
def test_what_is_no_address_of_a_server(url: str, key: str, config_file: Write, refused: Callable[..., str]) -> None:
    line = refused(config_file(), "--set", f"{key}={json.dumps([url])}")
    assert f"{key}.0" in line
    assert "is no URL of a server" in line


def test_a_proxy_in_the_environment_is_not_asked_for_a_server(
    config_file: Write, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with model_server({"model_path": "/models/other"}) as url:
        assert "serves /models/other" in refused(config_file(server={"kind": "sglang", "urls": [url]}))


def test_server_that_refuses_the_key(config_file: Write, refused: Callable[..., str]) -> None:
    with model_server({"error": "Unauthorized"}, status=401) as url:
        assert "EYAS_API_KEY" in refused(config_file(server={"kind": "sglang", "urls": [url]}))


def test_what_is_right_passes(config_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--dry-run", "--config", str(config_file()), "--run", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "in all: time" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("generation.sampling.stop_token_ids=[64]", "stop_token_ids holds 64, the tokenizer of target"),
        ("generation.sampling.stop_token_ids=[1, -2]", "stop_token_ids holds -2, the tokenizer of target"),
        ("merging.draft_vocab_size=65", "draft_vocab_size is 65, the vocabulary of target"),
        ("target.context_length=513", "context_length is 513, "),
        ("target.context_length=72", "context of 72 tokens leaves no room for a prompt"),
        ("target.context_length=-1", "target.context_length: Input should be greater than or equal to 0"),
        ("server.engine.max_total_tokens=1", "max_total_tokens is 1, one request of target"),
        ("server.engine.max_total_tokens=511", "may hold 512"),
        ("target.chat_template_kwargs={tokenize: true}", "chat_template_kwargs sets 'tokenize'"),
        ("merging.mixture={B9: 2.0}", "mixture names B9"),
    ],
)
def test_values_outside_of_the_targets_range(setting: str, wanted: str, config_file: Write, refused: Callable[..., str]) -> None:
    assert wanted in refused(config_file(), "--set", setting)


def test_a_draft_vocabulary_without_room_for_the_end_tokens(config_file: Write, refused: Callable[..., str]) -> None:
    line = refused(
        config_file(), "--set", "merging.draft_vocab_size=8", "--set", f"generation.sampling.stop_token_ids={[*range(3, 12)]}"
    )
    assert "tokens alone are 10" in line


@pytest.mark.parametrize(
    ("scaling", "passes"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, True),
        ({"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8}, False),
    ],
)
def test_a_stated_scaling_of_positions_allows_a_longer_context(
    scaling: dict[str, Any], passes: bool, config_file: Write, target_folder: Path, tmp_path: Path
) -> None:
    raw = read_json(target_folder / "config.json")
    write_json(target_folder / "config.json", raw | {"rope_scaling": scaling})
    words = ["--config", str(config_file()), "--set", "target.context_length=2048", "--run", str(tmp_path / "run")]
    assert cli.main(["run", "--dry-run", *words]) == (0 if passes else 2)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["generate"], "prepare"),
        (["merge"], "generate"),
        (["extract"], "generate"),
        (["train"], "merge"),
        (["export"], "train"),
        (["bench"], "prepare"),
        (["adopt", "--dataset", "B1_calls", "rows.jsonl"], "prepare"),
    ],
)
def test_a_phase_run_too_early_names_the_one_to_run_first(
    words: list[str], first: str, config_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *rest = words
    assert cli.main([verb, "--config", str(config_file()), "--run", str(tmp_path / "run"), *rest]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"run `eyas {first} --run {tmp_path / 'run'}` first" in line


def test_a_phase_may_follow_what_is_finished(finished_run: RunFolder) -> None:
    for phase in PHASES:
        require_earlier(finished_run, phase, list(DATASETS))
    (finished_run.hidden / "manifest.json").unlink()
    require_earlier(finished_run, "train", list(DATASETS), running=["extract", "train"])
    with pytest.raises(ConfigError, match="run `eyas extract"):
        require_earlier(finished_run, "train", list(DATASETS))


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"benchmark": {"sets": ["heldout", "mt_bench"]}}, "'mt_bench' is none of bfcl, gsm8k, .*, mt-bench; correct it"),
        ({"benchmark": {"sets": ["gsm8k"]}}, "hub:.*gsm8k.* cannot be fetched: HF_HUB_OFFLINE .* give file:PATH"),
        ({"benchmark": {"sets": ["package:nope"]}}, "source package:nope is not known"),
        ({"benchmark": {"sets": ["heldout", "heldout"]}}, "give one name twice: heldout"),
        ({"benchmark": {"max_new_tokens": 512}}, "benchmark.max_new_tokens is 512, the target's context is 512 tokens"),
        ({"benchmark": {"concurrency": [1, 0]}}, "benchmark.concurrency.1: .*greater than or equal to 1, got 0"),
        ({"benchmark": {"concurrency": [600]}}, "600 requests in flight, the embedded engine runs 512 at once"),
        (
            {"benchmark": {"grid": [{"num_steps": 3, "top_k": 4, "num_verified": 8}]}},
            "is a tree, the embedded engine drafts chains",
        ),
        ({"prompts": {"heldout_share": 0}}, "prompts.heldout_share is 0"),
        ({"prompts": {"decontaminate_against": ["nope"]}}, "'nope' is none of bfcl, .*give package:NAME, hub:ID or file:PATH"),
        ({"hidden": {"source": "sglang"}}, "hidden.source sglang has no server"),
        ({"hidden": {"source": "vllm", "urls": ["http://127.0.0.1:1"]}}, "nowhere to read states from; set hidden.sink"),
        ({"hidden": {"source": "sglang", "urls": ["http://127.0.0.1:1"]}}, "or hidden.final_urls"),
        ({"draft": {"num_kv_heads": 3}}, "draft.num_kv_heads is 3, wanted a divisor of the 4 heads"),
        ({"draft": {"betas": [0.9, 1]}}, "draft.betas.1: .*less than 1"),
        ({"draft": {"wandb_project": "x"}}, "draft.wandb_project wants the package wandb, which is not installed"),
    ],
)
def test_what_a_later_phase_would_refuse_is_refused_before_the_first(
    sections: dict[str, dict[str, Any]],
    wanted: str,
    raw_config: dict[str, Any],
    config_file: Write,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else known(name))
    changes = {section: raw_config.get(section, {}) | values for section, values in sections.items()}
    assert re.search(wanted, refused(config_file(**changes)))


def test_states_from_servers_want_the_key_in_a_file(
    config_file: Write, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "secret")
    hidden = {"source": "vllm", "urls": ["http://127.0.0.1:1"], "sink": "/states"}
    assert "server.api_key_file alone" in refused(config_file(hidden=hidden))


def test_a_pipe_or_a_device_is_no_source(config_file: Write, tmp_path: Path, refused: Callable[..., str]) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for source in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        line = refused(config_file(prompts={"datasets": [{"name": "a", "source": f"file:{source}"}]}))
        assert "cannot be read twice" in line


@pytest.mark.parametrize("preset", sorted((ROOT / "deployments/presets").glob("*.yaml")), ids=lambda path: str(path.stem))
def test_every_preset_can_reach_its_last_phase(preset: Path) -> None:
    config = load_config(preset)
    check_source(config, "key from the file" if config.server.api_key_file else "")
    check_shapes(config)
