"""Blocks: what they do to a config, what they keep secret, what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.blocks.core import Block
from prefect.blocks.fields import SecretDict
from prefect.client.orchestration import get_client
from pydantic import SecretStr, ValidationError

from blocks import Alert, RunStorage, SGLangServer, TargetHost
from blocks.loading import load_block
from eyas.errors import ConfigError
from tests.prefect.paper import Paper, config_with
from tests.prefect.test_pipeline import run_pipeline


async def test_a_server_block_replaces_the_section_and_keeps_its_key_out_of_the_config() -> None:
    await SGLangServer(urls=["http://10.0.0.7:30000"], api_key=SecretStr("hush-hush"), max_concurrency=8).save(
        "blackwell", overwrite=True
    )
    block = await load_block(SGLangServer, "blackwell")
    config = block.applied(config_with())
    assert (config.server.kind, config.server.urls, config.server.max_concurrency) == ("sglang", ["http://10.0.0.7:30000"], 8)
    assert "hush-hush" not in config.model_dump_json() + repr(block) + str(block)
    assert block.api_key.get_secret_value() == "hush-hush"


async def test_a_missing_block_is_refused_with_the_next_step(paper: Paper, run: str) -> None:
    with pytest.raises(ConfigError, match=r"no SGLang Server block named 'nowhere'.*create it"):
        await load_block(SGLangServer, "nowhere")
    state = await run_pipeline(run, server_block="nowhere")
    assert isinstance(await state.aresult(raise_on_failure=False), ConfigError)
    assert not paper.made


def test_a_server_block_without_urls_is_refused() -> None:
    with pytest.raises(ValidationError, match="urls"):
        SGLangServer(urls=[])


def test_a_host_block_must_know_the_modes_it_is_asked_for() -> None:
    host = TargetHost(kind="command", commands={"generate": "true", "none": "true"})
    assert host.applied(config_with()).operate.host.commands == {"generate": "true", "none": "true"}
    with pytest.raises(ValidationError, match="none"):
        TargetHost(kind="command", commands={"generate": "true"}).applied(config_with())


async def test_results_and_final_files_go_to_the_storage_block(paper: Paper, run: str, tmp_path: Path) -> None:
    """Workers in fresh containers share nothing but this: https://github.com/PrefectHQ/prefect/issues/8637."""
    shared = tmp_path / "shared"
    await RunStorage(url=str(shared)).save("team", overwrite=True)
    assert (await run_pipeline(run, storage_block="team")).is_completed()
    assert (shared / "paper" / "run.json").is_file()
    assert (shared / "paper" / "draft" / "export" / "data.txt").is_file()
    assert not (Path(run) / ".prefect").exists()
    assert (await run_pipeline(run, storage_block="team")).is_completed()
    assert paper.sessions == 1


async def test_storage_reads_back_what_it_wrote_and_stays_inside(tmp_path: Path) -> None:
    storage = RunStorage(url=str(tmp_path / "shared"))
    await storage.write_path("a/b", b"content")
    assert await storage.read_path("a/b") == b"content"
    with pytest.raises(ValueError, match="does not exist"):
        await storage.read_path("a/c")
    with pytest.raises(ValueError, match="leaves"):
        await storage.write_path("../outside", b"")


@pytest.mark.parametrize("kind", [SGLangServer, TargetHost, RunStorage, Alert])
def test_a_blocks_form_has_no_toggles_of_types_and_says_what_each_field_is(kind: type[Block]) -> None:
    schema = kind.model_json_schema()
    assert kind.get_description()
    assert kind.get_code_example()
    for name, field in schema["properties"].items():
        assert "anyOf" not in field, name
        assert field["description"].endswith("."), name


async def test_the_server_hands_out_no_secret_unless_asked_by_a_run() -> None:
    await SGLangServer(urls=["http://10.0.0.7:30000"], api_key=SecretStr("hush-hush")).save("masked", overwrite=True)
    await RunStorage(url="s3://team/eyas", options=SecretDict({"secret": "hush-hush"})).save("masked", overwrite=True)
    async with get_client() as client:
        for kind in (SGLangServer, RunStorage):
            document = await client.read_block_document_by_name("masked", kind.get_block_type_slug(), include_secrets=False)
            assert "hush-hush" not in document.model_dump_json()
