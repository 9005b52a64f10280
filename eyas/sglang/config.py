"""Where the target is served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from eyas.engine.config import EngineConfig
from eyas.settings import ServerUrl, Settings


class ServerConfig(Settings):
    """The SGLang servers of the target, or the embedded engine that Eyas starts itself."""

    kind: Literal["embedded", "sglang"] = Field(
        default="embedded", description="embedded starts Eyas' own CPU engine; sglang uses servers that are running."
    )
    urls: list[ServerUrl] = Field(default_factory=list, description="Base URLs of running SGLang servers, for kind sglang.")
    api_key_file: str = Field(default="", description="File that holds the servers' API key; empty for none.")
    model: str = Field(default="", description="Model path the servers must serve; empty takes the target's.")
    max_concurrency: int = Field(
        default=0, ge=0, description="Requests in flight per server; 0 learns it from the server's own limit."
    )
    connect_timeout_s: float = Field(default=10.0, gt=0, description="Seconds to open a connection.")
    keepalive_s: float = Field(default=4.0, gt=0, description="Idle seconds of a pooled connection; below uvicorn's 5 s.")
    min_tokens_per_s: float = Field(
        default=2.0, gt=0, description="Slowest decoding rate of one request that still counts as progress; sets its deadline."
    )
    deadline_floor_s: float = Field(default=120.0, gt=0, description="Shortest deadline of one request, in seconds.")
    outage_limit_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds that the run waits, paused, while no server answers; then it fails and can be resumed.",
    )
    poll_interval_s: float = Field(default=2.0, gt=0, description="Seconds between two looks at a server's load.")
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _urls_fit_kind(self) -> ServerConfig:
        if self.kind == "sglang" and not self.urls:
            raise ValueError("server.urls is empty; kind sglang needs at least one URL such as http://127.0.0.1:30000")
        return self
