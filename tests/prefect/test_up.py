"""What `python -m deployments up` says: everything that it registered, where to begin, how to end it."""

from __future__ import annotations

from pathlib import Path

from deployments.__main__ import account
from deployments.catalogue import catalogue
from flows.server import default_home


def running() -> dict[str, object]:
    names = [f"{entry.flow.name}/{entry.name}" for entry in catalogue()]
    return {"ui": "http://127.0.0.1:4200", "database": "/home/prefect.db", "runs_home": "/runs", "deployments": names}


def test_it_names_every_deployment_with_what_it_does_and_the_first_step() -> None:
    text = account(running(), default_home())
    lines = {line.split()[0]: line for line in text.split("\n")}
    for entry in catalogue():
        assert len(lines[f"{entry.flow.name}/{entry.name}"].split()) > 4, "a name and a sentence"
    assert "/deployments: choose local-smollm2-quick" in lines["begin"]
    assert lines["end"].split(maxsplit=1)[1] == "make down"


def test_a_stack_of_another_folder_is_ended_by_its_own_command() -> None:
    assert account(running(), Path("/elsewhere")).endswith("-m deployments down --home /elsewhere")


def test_a_presets_whole_description_is_the_deployments() -> None:
    (quick,) = [entry for entry in catalogue() if entry.name == "local-smollm2-quick"]
    assert quick.description.endswith("stand-ins for the reference datasets.")
