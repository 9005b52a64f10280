"""The host of the target's processors, as a Prefect block."""

from __future__ import annotations

from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field

from eyas.config import RunConfig
from eyas.operate.config import HostConfig, Mode


class TargetHost(Block):
    """How one GPU host is brought into the mode that a phase needs: generate, extract, none (processors free), draft."""

    _block_type_name = "Target Host"
    _block_type_slug = "target-host"
    _description = "How the target's servers are drained, stopped and started in the mode that a phase needs."
    _code_example = (
        'TargetHost(kind="command", commands={"generate": "ssh gpu1 serve generate", "none": "ssh gpu1 serve stop"}).save("gpu1")'
    )

    kind: Literal["manual", "command"] = Field(
        description="manual asks the operator and verifies; command runs the commands and verifies."
    )
    commands: dict[Mode, str] = Field(
        default_factory=dict,
        description="Shell command per mode (generate, extract, none, draft); {draft} stands for the exported draft's folder.",
    )
    ready_timeout_s: float = Field(default=3600.0, gt=0, description="Seconds until the servers must answer in a new mode.")

    def applied(self, config: RunConfig) -> RunConfig:
        """The config with this host in its operate section."""
        host = HostConfig(kind=self.kind, commands=self.commands, ready_timeout_s=self.ready_timeout_s)
        return config.model_copy(update={"operate": config.operate.model_copy(update={"host": host})})
