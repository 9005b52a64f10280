"""Put the draft of a finished benchmark into service, or leave the target without one and say why.

Brings the host into mode draft, sends the canary to every server, and goes back to the target alone if anything does
not hold, be it that the servers never came up. What was decided stands in `benchmark/deployment.json`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationError

from eyas.config import RunConfig
from eyas.draft.export import check_export
from eyas.errors import ArtifactError, EyasError
from eyas.files import read_json, write_json
from eyas.manifest import Manifest, now, verify_manifest
from eyas.operate.hosts import Draft, Say, TargetHost, host_of
from eyas.sglang.identity import FINGERPRINT_NAME, kept_fingerprint
from eyas.speculate.canary import canary
from eyas.speculate.deploy import Check, Decision, decide
from eyas.speculate.results import Row, SetMeasurement
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder

CANARIES = 32

Outcome = Literal[
    "nothing was switched",
    "being proven",
    "serving with the draft",
    "going back",
    "rolled back: serving the target without draft",
]


class Deployment(Decision):
    """What became of a draft: `benchmark/deployment.json`."""

    at: str
    outcome: Outcome


def deploy_run(run: RunFolder, config: RunConfig, *, api_key: str = "", say: Say = print) -> Deployment:
    """`deploy` on the host that the config names; Eyas' own engine is tried and then ended with this process."""
    host = host_of(run, config, api_key=api_key, say=say)
    try:
        return deploy(run, config, host, api_key=api_key, say=say)
    finally:
        if config.server.kind == "embedded":
            host.enter("none")


def deploy(run: RunFolder, config: RunConfig, host: TargetHost, *, api_key: str = "", say: Say = print) -> Deployment:
    """Serve the draft if every check holds; otherwise the host serves the target alone. The host is left serving.

    Raises `ArtifactError`, and switches nothing, where the benchmark or generation's fingerprint of the target is missing or
    damaged, or the draft is not the one that was measured or one of another target; and whatever the way back raises.
    """
    manifest = verify_manifest(run.benchmark)
    measured = Decision.model_validate(_results(run)["deployment"])
    export = run.export.resolve()
    if not measured.serves_draft:
        say(f"the benchmark does not let the draft be served: {measured.reason}")
        return _record(run, measured, "nothing was switched")
    spec = load_target(config.target)
    check_measured(run, spec, manifest)
    rows, at_generation = canary_rows(run, manifest), kept_fingerprint(run.root / FINGERPRINT_NAME)
    checks: list[Check] = []
    _record(run, Decision(serves_draft=False, reason="the draft is being proven", checks=[]), "being proven")
    try:
        for url in host.enter("draft", draft=Draft(export, config.benchmark.shape)):
            checks += canary(url, rows, config, spec, export, at_generation=at_generation, api_key=api_key)
    except EyasError as error:
        checks.append(Check(name="service", holds=False, seen=str(error), wanted="servers that answer with the draft"))
    except BaseException as error:  # Ctrl-C, SIGTERM, a cancelled flow: nobody has proven what would go on serving
        reason = f"interrupted before the draft was proven ({type(error).__name__})"
        _roll_back(run, host, Decision(serves_draft=False, reason=reason, checks=checks), say)
        raise
    decision = decide(checks)
    if decision.serves_draft:
        return _record(run, decision, "serving with the draft")
    return _roll_back(run, host, decision, say)


def _roll_back(run: RunFolder, host: TargetHost, decision: Decision, say: Say) -> Deployment:
    say(f"going back to the target without draft: {decision.reason}")
    _record(run, decision, "going back")  # first, so that the reason stands even if the way back fails
    host.enter("generate", alone=True)
    return _record(run, decision, "rolled back: serving the target without draft")


def check_measured(run: RunFolder, spec: TargetSpec, benchmark: Manifest) -> None:
    """Refuse a draft that is not, byte for byte, what the benchmark measured on this target; raises `ArtifactError`."""
    exported = check_export(run, spec)
    now_there = {f"draft/export/{entry.path}": entry.sha256 for entry in exported.files} | {"target": spec.fingerprint}
    for name, measured in benchmark.inputs.items():
        if name in now_there and now_there[name] != measured:
            raise ArtifactError(
                f"{name} is not what the benchmark in {run.benchmark} measured; run the benchmark again (eyas bench)"
            )


def canary_rows(run: RunFolder, manifest: Manifest) -> list[Row]:
    """Up to 32 rows of the benchmark's first set, as its raw file has them."""
    name = next((entry.path for entry in manifest.files if entry.path.startswith("raw-")), None)
    if name is None:
        raise ArtifactError(f"{run.benchmark}/manifest.json names no raw file; run the benchmark again")
    try:
        return SetMeasurement.model_validate(read_json(run.benchmark / name)).rows[:CANARIES]
    except ValidationError as error:
        raise ArtifactError(f"{run.benchmark / name} is not what this version writes; run the benchmark again") from error


def _results(run: RunFolder) -> dict[str, object]:
    results = read_json(run.benchmark / "results.json")
    if not isinstance(results, dict) or "deployment" not in results:
        raise ArtifactError(f"{run.benchmark}/results.json holds no decision; run the benchmark again")
    return results


def _record(run: RunFolder, decision: Decision, outcome: Outcome) -> Deployment:
    deployment = Deployment(**decision.model_dump(), at=now(), outcome=outcome)
    write_json(run.benchmark / "deployment.json", deployment.model_dump())
    return deployment
