"""States from vLLM's own servers: its method `extract_hidden_states` and its hidden-states connector.

The connector writes one safetensors file a request, [T, 4, H] with its token ids, under a lock that is free
once the file is whole. vLLM numbers *inputs* of blocks, so output of block k is its id k + 1, and its id n
is the last block's output *before* the final norm, which is applied here. The prefix cache must be off, or
only the rest of a prompt has states (https://github.com/vllm-project/vllm/issues/44485); rows and ids are compared.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.errors import ConfigError, ServerError
from eyas.hidden.sources.concurrent import concurrently
from eyas.hidden.sources.protocol import States, TokenIds
from eyas.target.spec import TargetSpec
from eyas.target.weights import load_head

_ATTEMPTS = 4
_TIMEOUT_S = 600.0


def server_flags(spec: TargetSpec, sink: Path) -> list[str]:
    """What `vllm serve TARGET` must be started with to give these states in `sink`."""
    layers = [*(block + 1 for block in spec.aux_blocks), spec.num_layers]
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(sink)},
    }
    settings = ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]
    return ["--no-enable-prefix-caching", *settings]


class VllmSource:
    """Posts every sequence once for its prefill and reads the file that the connector wrote; several requests in flight."""

    def __init__(self, urls: Sequence[str], *, sink: Path | None, spec: TargetSpec, concurrency: int, api_key: str = "") -> None:
        if not urls or sink is None:
            raise ConfigError(
                "hidden.source vllm needs hidden.urls and hidden.sink, the folder that those servers' connector writes to; "
                f"start each with: vllm serve {spec.folder} {' '.join(server_flags(spec, sink or Path('SINK')))}"
            )
        self._urls, self._sink, self._spec, self._concurrency = list(urls), sink, spec, concurrency
        self._norm = load_head(spec, torch.float32).norm
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        transport = httpx.HTTPTransport(retries=2)
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False, transport=transport)
        self._models = {url: self._served_model(url) for url in self._urls}

    def extract(self, sequences: Sequence[TokenIds]) -> Iterator[tuple[int, States]]:
        """See `Source`."""
        return concurrently(sequences, self._concurrency, self._states)

    def _states(self, index: int, sequence: TokenIds) -> States:
        url = self._urls[index % len(self._urls)]
        answer = self._post(url, sequence)
        name = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(name, str):
            raise ConfigError(f"{url} answered without states: its connector is not active; {self._how_to_start()}")
        path = self._sink / Path(name).name  # the folder is ours to name, whatever the server calls it
        tensors = self._read(path, url)
        states, ids = tensors.get("hidden_states"), tensors.get("token_ids")
        wanted = [len(sequence), 4, self._spec.hidden_size]
        if states is None or ids is None or list(states.shape) != wanted or ids.tolist() != sequence.tolist():
            seen = None if states is None else list(states.shape)
            raise ConfigError(
                f"{url} wrote states {seen} to {path.name}, wanted {wanted} of the ids that were sent: is its prefix cache on, or "
                f"are its layers others? {self._how_to_start()}"
            )
        for done in (path, path.with_name(f"{path.name}.lock")):
            done.unlink(missing_ok=True)
        last = F.rms_norm(states[:, 3].float(), (self._spec.hidden_size,), self._norm, self._spec.rms_norm_eps)
        return States(aux=states[:, :3].flatten(1).to(torch.bfloat16), final=last.to(torch.bfloat16))

    def _post(self, url: str, sequence: TokenIds) -> dict[str, Any]:
        """The answer to one prefill; raises `ConfigError` for what cannot heal, `ServerError` after several attempts."""
        body = {"model": self._models[url], "prompt": sequence.tolist(), "max_tokens": 1, "temperature": 0.0}
        problem = ""
        for _ in range(_ATTEMPTS):
            try:
                reply = self._client.post(f"{url}/v1/completions", json=body)
                if reply.status_code == 200:
                    answer: dict[str, Any] = reply.json()
                    return answer
            except (httpx.HTTPError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            problem = f"{reply.status_code}: {reply.text[:200]}"
            if 400 <= reply.status_code < 500:
                raise ConfigError(f"{url}/v1/completions refused {len(sequence)} ids ({problem}); {self._how_to_start()}")
        raise ServerError(
            f"{url}/v1/completions gave no states after {_ATTEMPTS} attempts ({problem}); look at the server, then run again"
        )

    def _read(self, path: Path, url: str) -> dict[str, torch.Tensor]:
        try:
            with open(path.with_name(f"{path.name}.lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # sleeps until the writer is done, or dead
                return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ServerError(
                f"{url} answered, but {path} cannot be read ({error}); hidden.sink must be the server's shared_storage_path: "
                f"{self._how_to_start()}"
            ) from error

    def _served_model(self, url: str) -> str:
        try:
            return str(self._client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{url}/v1/models did not answer ({error!r}); {self._how_to_start()}") from error

    def _how_to_start(self) -> str:
        return f"start it with: vllm serve {self._spec.folder} {' '.join(server_flags(self._spec, self._sink))}"
