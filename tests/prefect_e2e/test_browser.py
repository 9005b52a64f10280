"""What a person does: fills the form, submits, sees the run complete, opens the artifacts. Pictures are kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import SecretStr

from blocks import SGLangServer
from deployments.catalogue import HOST_QUEUE, Entry
from deployments.register import deploy
from flows.pipeline import pipeline
from tests.prefect_e2e.browser import Page, chromium
from tests.prefect_e2e.conftest import Stack, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

PICTURES = Path(os.environ.get("EYAS_E2E_PICTURES", "build/e2e-pictures"))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "profile") as page:
        yield page


def test_a_person_fills_the_form_sees_the_run_complete_and_reads_the_artifacts(stack: Stack, page: Page) -> None:
    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        entry = Entry(flow=pipeline, name="tiny", description="For the test.", queue=HOST_QUEUE, parameters=stack.tiny)
        asyncio.run(deploy(entry, stack.runs))
    deployment = stack.deployment("pipeline/tiny")
    page.open(f"{stack.ui}/deployments")
    page.wait_text("kimi-k2.5-blackwell")
    page.picture(PICTURES / "deployments.png", height=1100)
    page.open(f"{stack.ui}/deployments/deployment/{stack.deployment('pipeline/qwen3-8b-one-gpu')}/run")
    page.wait_text("Where the target is served")
    page.picture(PICTURES / "form.png", height=9000)

    page.open(f"{stack.ui}/deployments/deployment/{deployment}/run")
    page.wait_text("Run folder, reachable by every worker")
    page.fill("textarea", "seen-in-browser")
    page.click_text("Submit")
    wanted = {"deployments": {"id": {"any_": [deployment]}}}
    flow_run = until(lambda: stack.call("POST", "/flow_runs/filter", **wanted).json())[0]
    page.rest()
    assert flow_run["parameters"]["run"] == "seen-in-browser"
    address = f"{stack.ui}/runs/flow-run/{flow_run['id']}"
    stack.until(flow_run["id"], (stack.runs / "seen-in-browser" / "responses").is_dir)
    page.open(address)
    page.wait("/Running|Completed/.test(document.body?.innerText)")  # a quick machine may be through already
    page.picture(PICTURES / "run-generating.png", height=1300)
    page.rest()
    stack.wait_state(flow_run["id"], "COMPLETED")
    page.open(address)
    page.wait_text("Completed")
    page.picture(PICTURES / "run.png", height=1300)

    page.click_text("Artifacts", selector="li, [role=tab]")
    page.wait_text("replies identical")
    page.picture(PICTURES / "artifacts.png", height=2600)
    found = stack.call("POST", "/artifacts/filter", artifacts={"flow_run_id": {"any_": [flow_run["id"]]}}).json()
    artifacts = {item["key"].removeprefix("seen-in-browser-"): item["id"] for item in found}
    texts = {
        "plan": "Plan of seen-in-browser", "datasets": "B1_chat", "lengths": "response median", "training": "accept length",
        "accept-length": "identical / tie / wrong", "report": "Accept length", "generate-b1-chat": "12 of 12",
    }  # fmt: skip
    for name, text in texts.items():
        page.open(f"{stack.ui}/artifacts/artifact/{artifacts[name]}")
        page.wait_text(text)
        page.picture(PICTURES / f"artifact-{name}.png", height=1100)


def test_a_wrong_value_in_the_form_is_refused_before_a_run_exists(stack: Stack, page: Page) -> None:
    deployment = stack.deployment("pipeline/qwen3-8b-one-gpu")
    page.open(f"{stack.ui}/deployments/deployment/{deployment}/run")
    page.wait_text("Where the target is served")
    page.wait("document.querySelectorAll('input[type=number]').length > 10")
    page.fill("input[type=number]", "-7")
    page.click_text("Submit")
    page.wait_text("less than the minimum")
    assert page.ask("location.pathname").endswith("/run"), "still on the form"
    page.picture(PICTURES / "refused.png", height=1300)
    wanted = {"deployments": {"id": {"any_": [deployment]}}}
    assert all(run["state"]["type"] != "RUNNING" for run in stack.call("POST", "/flow_runs/filter", **wanted).json())


def test_the_blocks_say_what_they_are_for_and_mask_their_secrets(stack: Stack, page: Page) -> None:
    for slug, text in {
        "sglang-server": "Running SGLang servers that serve the target",
        "target-host": "drained, stopped and started",
        "run-storage": "any fsspec path",
        "eyas-alert": "Which events of a run are sent where",
    }.items():
        page.open(f"{stack.ui}/blocks/catalog/{slug}")
        page.wait_text(text)
    page.open(f"{stack.ui}/blocks/catalog/sglang-server/create")
    page.wait_text("API key of the servers")
    page.picture(PICTURES / "block-form.png", height=1100)
    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        block = SGLangServer(urls=["http://10.0.0.7:30000"], api_key=SecretStr("hush-hush"))
        saved = block.save("blackwell", overwrite=True, _sync=True)  # type: ignore[call-arg]
    page.open(f"{stack.ui}/blocks/block/{saved}")
    page.wait_text("http://10.0.0.7:30000")
    page.wait_text("****")
    assert "hush-hush" not in str(page.ask("document.documentElement.outerHTML"))
    page.picture(PICTURES / "block.png", height=1100)
