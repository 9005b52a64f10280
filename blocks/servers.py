"""One or many SGLang servers of the target, as a Prefect block."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from eyas.config import RunConfig
from eyas.settings import ServerUrl


class SGLangServer(Block):
    """Running SGLang servers that serve the target: where they are, their key, what they must serve."""

    _block_type_name = "SGLang Server"
    _block_type_slug = "sglang-server"
    _description = "Running SGLang servers that serve the target. All must serve the same model with the same key."
    _code_example = 'SGLangServer(urls=["http://10.0.0.7:30000"], api_key="…").save("blackwell")'

    urls: list[ServerUrl] = Field(min_length=1, description='Base URL of every server, as a list: `["http://10.0.0.7:30000"]`.')
    api_key: SecretStr = Field(default=SecretStr(""), description="API key of the servers (--api-key); empty for none.")
    model: str = Field(default="", description="Model path or name the servers must serve; empty takes the target's.")
    max_concurrency: int = Field(default=0, ge=0, description="Requests in flight per server; 0 learns it from the server.")

    def applied(self, config: RunConfig) -> RunConfig:
        """The config with its server section pointing here; the key stays in the block."""
        changes = {"kind": "sglang", "urls": self.urls, "model": self.model, "max_concurrency": self.max_concurrency}
        section = type(config.server).model_validate({**config.server.model_dump(), **changes})
        return config.model_copy(update={"server": section})
