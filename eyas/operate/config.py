"""Decisions, alarms and the host of a run as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from eyas.settings import Settings

Mode = Literal["generate", "extract", "none", "draft"]


class HostConfig(Settings):
    """Who brings the target's servers into the mode a phase needs; only for server.kind sglang."""

    kind: Literal["manual", "command"] = Field(
        default="manual", description="manual asks the operator and verifies; command runs the commands below and verifies."
    )
    commands: dict[Mode, str] = Field(
        default_factory=dict,
        description='Shell command per mode (generate, extract, none, draft): `{"none": "ssh gpu1 stop-serving"}`; {draft} stands '
        "for the exported draft's folder, {steps}, {top_k} and {tokens} for its shape.",
    )
    num_gpus: int = Field(default=0, ge=0, description="GPUs of the host, for the plan's GPU-hours; 0 leaves them out.")
    ready_timeout_s: float = Field(default=3600.0, gt=0, description="Seconds until the servers must answer in a new mode.")

    @model_validator(mode="after")
    def _commands_are_there(self) -> HostConfig:
        missing = [mode for mode in ("generate", "none") if self.kind == "command" and mode not in self.commands]
        if missing:
            raise ValueError(f"operate.host.commands lacks {' and '.join(missing)}; kind command needs them")
        return self


class RunnerConfig(Settings):
    """Where the tasks of phase 1 (one per dataset) and phase 4 (one per shard) run; only in the Prefect flows."""

    kind: Literal["threads", "ray"] = Field(
        default="threads", description="threads runs them in the flow's process; ray spreads them over a Ray cluster."
    )
    address: str = Field(
        default="", description="Ray cluster, for instance ray://head:10001; empty starts one on this machine for the run."
    )
    cpus_per_task: int = Field(default=1, ge=1, description="Cores that Ray sets aside for one task.")
    gpus_per_task: float = Field(default=0.0, ge=0, description="GPUs that Ray sets aside for one task.")


class OperateConfig(Settings):
    """Plan, decision and watch."""

    host: HostConfig = HostConfig()
    runner: RunnerConfig = RunnerConfig()
    overlap: Literal["auto", "yes", "no"] = Field(
        default="auto",
        description="Whether later phases work while replies are generated; auto does so where they have processors of their own.",
    )
    learning_curve_share: float = Field(
        default=0.12,
        ge=0,
        le=1,
        description="Share of the training records that a learning curve is measured on while replies are generated; 0 makes none.",
    )
    decision: Literal["accept", "ask"] = Field(
        default="accept", description="accept goes on with the plan; ask waits for a person."
    )
    decision_timeout_s: float = Field(default=3600.0, gt=0, description="Seconds to wait for a person.")
    decision_default: Literal["accept", "abort"] = Field(default="accept", description="What happens when nobody answers.")
    stall_s: float = Field(default=300.0, gt=0, description="Seconds without progress that count as a stall.")
