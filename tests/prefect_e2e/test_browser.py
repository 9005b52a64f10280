"""What a person does: fills the form, submits, sees the run complete, opens the artifacts. Pictures are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.prefect_e2e.browser import chromium
from tests.prefect_e2e.conftest import Stack, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PICTURES = Path(os.environ.get("EYAS_E2E_PICTURES", "build/e2e-pictures"))


def test_a_person_fills_the_form_and_reads_the_artifacts(stack: Stack, tmp_path: Path) -> None:
    deployment = stack.deployment("watch/watch-every-5-minutes")
    (stack.runs / "seen-in-browser").mkdir(exist_ok=True)
    with chromium(tmp_path / "profile") as page:
        page.open(f"{stack.ui}/deployments")
        page.wait_text("kimi-k2.5-blackwell")
        page.picture(PICTURES / "deployments.png", height=1100)
        page.open(f"{stack.ui}/deployments/deployment/{stack.deployment('pipeline/qwen3-8b-one-gpu')}/run")
        page.wait_text("Where the target is served")
        page.picture(PICTURES / "form.png", height=3000)

        page.open(f"{stack.ui}/deployments/deployment/{deployment}/run")
        page.wait_text("Folder that holds the run folders")
        page.fill("textarea", "seen-in-browser")
        page.click_text("Submit")
        wanted = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"name": {"like_": "seen-in-browser"}}}
        found = until(lambda: stack.call("POST", "/flow_runs/filter", **wanted).json(), 120)
        stack.wait_state(found[0]["id"], "COMPLETED", seconds=180)
        assert found[0]["parameters"] == {"runs": "seen-in-browser"}

        page.open(f"{stack.ui}/runs/flow-run/{found[0]['id']}")
        page.wait_text("Completed")
        page.picture(PICTURES / "run.png", height=1000)
        page.click_text("Artifacts", selector="li, [role=tab]")
        page.wait_text("all well in seen-in-browser")
        time.sleep(1)
        page.picture(PICTURES / "artifacts.png", height=1000)
