"""What an extraction demands of its config, checked days before it runs (no torch: a process that only drives servers asks too)."""

from __future__ import annotations

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.hidden.codec import BLOCK, CODECS
from eyas.hidden.config import HiddenConfig
from eyas.target.spec import TargetSpec


def check_codec(config: HiddenConfig, spec: TargetSpec) -> None:
    """Raise `ConfigError` where the codec cannot hold states of this target's width."""
    if CODECS[config.codec].aux != "bf16" and spec.hidden_size % BLOCK:
        raise ConfigError(
            f"hidden.codec {config.codec} codes {BLOCK} channels together, the target's hidden size {spec.hidden_size} is no "
            "multiple of that; choose hidden.codec bf16"
        )


def check_source(config: RunConfig, api_key: str) -> None:
    """Raise `ConfigError` where servers, folder or key that `hidden.source` needs are not named."""
    hidden = config.hidden
    if hidden.source == "transformers":
        return
    urls = hidden.urls or (config.server.urls if hidden.source == "sglang" else [])
    if not urls:
        where = "server.urls or hidden.urls" if hidden.source == "sglang" else "hidden.urls"
        raise ConfigError(f"hidden.source {hidden.source} has no server; name one in {where}, or choose hidden.source transformers")
    if not hidden.sink and (hidden.source == "vllm" or not hidden.final_urls):
        other = ", or hidden.final_urls for a small target" if hidden.source == "sglang" else ""
        raise ConfigError(
            f"hidden.source {hidden.source} has nowhere to read states from; set hidden.sink, the folder that our plugin "
            f"in SGLang or vLLM's connector writes to{other}"
        )
    if api_key and not config.server.api_key_file:
        raise ConfigError(
            f"hidden.source {hidden.source} runs in several processes, which read the servers' key from server.api_key_file alone, "
            "and it is empty; write the key to a file and name it there"
        )
