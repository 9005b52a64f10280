"""Every source gives the same states of the same tiny target, and says in clear words when it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.config import RunConfig
from eyas.errors import ConfigError, GateError
from eyas.files import read_json
from eyas.hidden.extract import extract
from eyas.hidden.sources.protocol import Source
from eyas.hidden.sources.sglang import SglangSource
from eyas.hidden.sources.transformers import TransformersSource
from eyas.hidden.sources.vllm import VllmSource
from eyas.hidden.store import HiddenStore
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target
from tests.hidden.fake_sglang import fake_sglang
from tests.hidden.fake_vllm import fake_vllm
from tests.hidden.tiny import TinyRun, plain_states

SEQUENCES = [np.random.default_rng(n).integers(5, 261, size).astype(np.int32) for n, size in enumerate((30, 1, 7, 64, 7))]


def open_sglang(url: str, target: Path, **changes: Any) -> SglangSource:
    spec = load_target(TargetConfig(model=str(target)))
    return SglangSource([url], **{"final_urls": [], "sink": None, "spec": spec, "concurrency": 3, **changes})


def open_vllm(url: str, target: Path, sink: Path) -> VllmSource:
    return VllmSource([url], sink=sink, spec=load_target(TargetConfig(model=str(target))), concurrency=3)


@pytest.fixture(params=["transformers", "sglang over HTTP", "sglang with the plugin", "vllm"])
def source(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> Iterator[Source]:
    with ExitStack() as stack:
        if request.param == "transformers":
            spec = load_target(TargetConfig(model=str(target)))
            yield TransformersSource(spec, dtype="float32", batch_tokens=64, threads=1)
        elif request.param == "sglang over HTTP":
            final_url = stack.enter_context(fake_sglang(target, mode="final"))
            yield open_sglang(stack.enter_context(fake_sglang(target, mode="aux", fault="busy")), target, final_urls=[final_url])
        elif request.param == "vllm":
            sink = tmp_path / "sink"
            url = stack.enter_context(fake_vllm(target, sink, fault="busy"))
            yield open_vllm(url, target, sink)
            assert list(sink.iterdir()) == []
        else:
            sink = tmp_path / "sink"
            sink.mkdir()
            yield open_sglang(stack.enter_context(fake_sglang(target, mode="aux", sink=sink)), target, sink=sink)
            assert list(sink.iterdir()) == []  # what was read is gone


def test_a_source_conforms(source: Source, target: Path) -> None:
    seen = dict(source.extract(SEQUENCES))
    assert sorted(seen) == list(range(len(SEQUENCES)))
    for index, sequence in enumerate(SEQUENCES):
        aux, final = plain_states(target, sequence.tolist())
        assert (seen[index].aux.dtype, seen[index].final.dtype) == (torch.bfloat16, torch.bfloat16)
        torch.testing.assert_close(seen[index].aux.float(), aux, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(seen[index].final.float(), final, rtol=1e-2, atol=1e-2)
    assert dict(source.extract([])) == {}


def test_rows_lost_to_a_prefix_cache_are_refused(target: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/44485: only the uncached suffix has states."""
    with fake_sglang(target, mode="aux", fault="prefix_cache") as url:
        source = open_sglang(url, target, final_urls=[url], sink=target)
        with pytest.raises(ConfigError, match="4 ids from its prefix cache"):
            list(source.extract(SEQUENCES[:1]))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other_ids", "not of the ids that were sent"),
        ("truncates", "read 28 of 30 ids"),
        ("other_rid", "answered rid='another'"),
    ],
)
@pytest.mark.parametrize("has_sink", [True, False])
def test_states_of_sglang_that_are_not_ours_are_refused(
    target: Path, tmp_path: Path, fault: str, message: str, has_sink: bool
) -> None:
    """Review of https://github.com/sgl-project/sglang/pull/30177: as many rows as ids, of a neighbour request."""
    sink = tmp_path if has_sink else None
    mode = "aux" if has_sink else "final"
    with fake_sglang(target, mode="aux") as aux_url, fake_sglang(target, mode=mode, sink=sink, fault=fault) as url:
        source = open_sglang(url if has_sink else aux_url, target, sink=sink, final_urls=[url])
        with pytest.raises(ConfigError, match=message):
            list(source.extract(SEQUENCES[:1]))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"disable_radix_cache": False}, "is not in the mode that extraction needs"),
        ({"chunked_prefill_size": 2048}, "is not in the mode that extraction needs"),
        ({"enable_return_aux_hidden_states": False}, "is not in the mode that extraction needs"),
    ],
)
def test_a_server_in_the_wrong_mode_is_refused_before_the_first_request(target: Path, info: dict[str, Any], message: str) -> None:
    with fake_sglang(target, mode="aux", info=info) as url, pytest.raises(ConfigError, match=message):
        open_sglang(url, target, sink=target)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("prefix_cache", r"wrote states \[26, 4, 32\] .* wanted \[30, 4, 32\]"),
        ("other_ids", "of the ids that were sent"),
        ("no_connector", "its connector is not active"),
        ("refuses", "refused 30 ids"),
    ],
)
def test_states_of_vllm_that_are_not_ours_are_refused(target: Path, tmp_path: Path, fault: str, message: str) -> None:
    """https://github.com/vllm-project/vllm/issues/44485; review of https://github.com/sgl-project/sglang/pull/30177: ids too."""
    with fake_vllm(target, tmp_path / "sink", fault=fault) as url:
        source = open_vllm(url, target, tmp_path / "sink")
        with pytest.raises(ConfigError, match=message):
            list(source.extract(SEQUENCES[:1]))


def test_vllm_without_servers_says_how_to_start_one(target: Path) -> None:
    spec = load_target(TargetConfig(model=str(target)))
    with pytest.raises(ConfigError, match=r'hidden\.urls .*"eagle_aux_hidden_state_layer_ids": \[2, 4, 5, 8\]'):
        VllmSource([], sink=None, spec=spec, concurrency=1)


def test_a_server_without_the_plugin_is_named(target: Path, tmp_path: Path) -> None:
    with fake_sglang(target, mode="aux", sink=tmp_path, fault="no_plugin") as url:
        source = open_sglang(url, target, sink=tmp_path)
        with pytest.raises(ConfigError, match="its plugin is not active"):
            list(source.extract(SEQUENCES[:1]))


def test_missing_servers_are_a_configuration_error(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.urls started with"):
        SglangSource([], final_urls=[], sink=None, spec=load_target(TargetConfig(model=str(target))), concurrency=1)


@pytest.fixture(params=["sglang over HTTP", "sglang with the plugin", "vllm"])
def faulty_run(request: pytest.FixtureRequest, tiny: TinyRun, tmp_path: Path) -> Iterator[Callable[[str], RunConfig]]:
    """Starts the servers of a source, with a fault, and gives the config of a run over them."""
    sink = tmp_path / "sink"
    sink.mkdir()
    with ExitStack() as stack:

        def start(fault: str) -> RunConfig:
            hidden = {"source": "sglang", "probe_records": 3, "disk_reserve_bytes": 0}
            server = {}
            if request.param == "vllm":
                url = stack.enter_context(fake_vllm(tiny.target, sink, fault=fault))
                hidden |= {"source": "vllm", "urls": [url], "sink": str(sink)}
            else:
                is_plugin = request.param == "sglang with the plugin"
                url = stack.enter_context(fake_sglang(tiny.target, mode="aux", sink=sink if is_plugin else None, fault=fault))
                final_url = stack.enter_context(fake_sglang(tiny.target, mode="final"))
                server = {"server": {"kind": "sglang", "urls": [url]}}
                hidden |= {"sink": str(sink)} if is_plugin else {"final_urls": [final_url]}
            return tiny.config("a", hidden=hidden, generation={"sampling": {"temperature": 0.0}}, **server)

        yield start


def test_a_run_extracts_from_servers_whose_blocks_are_proven(tiny: TinyRun, faulty_run: Callable[[str], RunConfig]) -> None:
    rows = tiny.write_greedy("a", 5)
    manifest = extract(tiny.run, faulty_run(""))
    assert manifest.counts.done == 5
    errors = read_json(tiny.run.hidden / "probe.json")["figures"]["state_errors"]
    assert sorted(errors) == ["final", "high", "low", "middle"]
    assert max(errors.values()) < 0.01
    record = HiddenStore(tiny.run.hidden).record(rows[0]["id"])
    torch.testing.assert_close(record.aux.float(), plain_states(tiny.target, rows[0]["input_ids"])[0], rtol=1e-2, atol=1e-2)


def test_a_server_that_gives_other_blocks_is_named_before_anything_is_stored(
    tiny: TinyRun, faulty_run: Callable[[str], RunConfig]
) -> None:
    tiny.write_greedy("a", 5)
    with pytest.raises(GateError, match=r"the low state is not the output of block 1 .* output of block 0 .* off by -1"):
        extract(tiny.run, faulty_run("shifted_layers"))
    assert not list(tiny.run.hidden.glob("shard*"))


def test_aux_states_of_another_request_over_http_are_refused(target: Path) -> None:
    with fake_sglang(target, mode="aux", fault="other_request") as url, fake_sglang(target, mode="final") as final_url:
        source = open_sglang(url, target, final_urls=[final_url])
        with pytest.raises(ConfigError, match="which the same request decoded"):
            list(source.extract(SEQUENCES[:1]))


def test_a_target_too_large_to_be_compared_is_said(
    tiny: TinyRun, faulty_run: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.write_greedy("a", 5)
    monkeypatch.setattr("eyas.hidden.proving._MEMORY_SHARE", 0.0)
    assert extract(tiny.run, faulty_run("shifted_layers")).counts.done == 5
    assert "blocks are not compared with a plain forward of the target: its weights are 0.0 GB" in caplog.text
