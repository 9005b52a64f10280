"""States from SGLang's own servers, for targets that fit nowhere else.

Two ways. With `hidden.sink`, the folder that our plugin inside SGLang writes to: one request gives aux and
final states as a file, 8·H bytes a token. Without: plain HTTP, states as JSON numbers (about 0.4 MB a token at H = 7168, for
small targets only), and since one server gives either aux or final states, two sets of servers: `urls` in
aux mode and `final_urls` in full mode. Prefix cache and chunked prefill must be off; both are asked and proven.

That states belong to the ids sent is proven for every sequence: lm_head of the last final state must give the token that
the same request decoded. Costs one product of the head with a vector. Over HTTP the aux states come from another
request: it must have read as many ids and have decoded a token that the final state allows, too. That they are of the right
blocks is proven on the probe's sample (`eyas.hidden.proving`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.errors import ConfigError, ServerError
from eyas.hidden.probe import compare_greedy
from eyas.hidden.sources.concurrent import concurrently
from eyas.hidden.sources.protocol import States, TokenIds
from eyas.hidden.sources.sglang_plugin import FOLDER_VARIABLE, RID_PREFIX
from eyas.target.spec import TargetSpec
from eyas.target.weights import load_head

AUX_FLAGS = "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --disable-radix-cache --chunked-prefill-size -1"
FINAL_FLAGS = "--enable-return-hidden-states --disable-radix-cache --chunked-prefill-size -1"
_VERSION = "0.5.23 or newer"
_ATTEMPTS = 4
_TIMEOUT_S = 600.0


class SglangSource:
    """Posts every sequence once (twice without a sink) for its prefill; several requests in flight."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        final_urls: Sequence[str],
        sink: Path | None,
        spec: TargetSpec,
        concurrency: int,
        api_key: str = "",
    ) -> None:
        if not urls or (sink is None and not final_urls):
            raise ConfigError(
                f"hidden.source sglang needs servers: server.urls started with {AUX_FLAGS}, and either hidden.sink (the folder in "
                f"{FOLDER_VARIABLE} of servers with our plugin) or hidden.final_urls started with {FINAL_FLAGS}"
            )
        self._urls, self._final_urls, self._sink = list(urls), list(final_urls), sink
        self._hidden_size, self._concurrency = spec.hidden_size, concurrency
        self._lm_head = load_head(spec, torch.bfloat16).lm_head  # [V, H]
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        transport = httpx.HTTPTransport(retries=2)
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False, transport=transport)
        for url in self._urls:
            self._check_server(url, "enable_return_aux_hidden_states", AUX_FLAGS)
        for url in self._final_urls if sink is None else []:
            self._check_server(url, "enable_return_hidden_states", FINAL_FLAGS)

    def extract(self, sequences: Sequence[TokenIds]) -> Iterator[tuple[int, States]]:
        """See `Source`."""
        return concurrently(sequences, self._concurrency, self._states)

    def _states(self, index: int, sequence: TokenIds) -> States:
        url = self._urls[index % len(self._urls)]
        rid = f"{RID_PREFIX}{uuid.uuid4().hex}"
        if self._sink is not None:
            reply = self._post(url, rid, sequence)
            states = self._from_sink(self._sink, reply["meta_info"]["id"], url)  # the id of the attempt that succeeded
            self._check_token(states.final, reply, url)
            return states
        final_url = self._final_urls[index % len(self._final_urls)]
        aux_reply = self._post(url, f"x{rid}", sequence)  # our prefix alone would take the plugin's way
        aux = self._rows(aux_reply, url, 3 * self._hidden_size)
        reply = self._post(final_url, f"x{rid}", sequence)
        final = self._rows(reply, final_url, self._hidden_size)
        self._check_token(final, reply, final_url)
        self._check_token(final, aux_reply, url)
        return States(aux=aux, final=final)

    def _post(self, url: str, rid: str, sequence: TokenIds) -> dict[str, Any]:
        """The whole reply; raises `ConfigError` for what cannot heal, `ServerError` after several attempts."""
        body: dict[str, Any] = {
            "input_ids": sequence.tolist(),
            "extra_key": rid,  # a namespace of its own in any prefix cache
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_hidden_states": True,
        }
        problem = ""
        for attempt in range(_ATTEMPTS):
            body["rid"] = f"{rid}-{attempt}" if attempt else rid
            try:
                reply = self._client.post(f"{url}/generate", json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if 400 <= reply.status_code < 500:
                raise ConfigError(
                    f"{url}/generate refused states ({reply.status_code}: {reply.text[:200]}); start it with {AUX_FLAGS}"
                )
            whole = _whole(reply)
            if whole is not None:
                self._check_counts(whole["meta_info"], url, body["rid"], sequence)
                return whole
            problem = f"{reply.status_code}: {reply.text[:200]}"
        raise ServerError(
            f"{url}/generate gave no states after {_ATTEMPTS} attempts ({problem}); look at the server, then run again"
        )

    def _check_counts(self, meta: dict[str, Any], url: str, rid: str, sequence: TokenIds) -> None:
        if meta.get("id") != rid:
            raise ConfigError(f"{url} answered rid={meta.get('id')!r:.80} to rid={rid}: replies are mixed up on the way to it")
        if meta.get("prompt_tokens") != len(sequence):
            raise ConfigError(
                f"{url} read {meta.get('prompt_tokens')} of {len(sequence)} ids: it truncates prompts; raise its context"
            )
        if meta.get("cached_tokens"):
            raise ConfigError(
                f"{url} answered {meta['cached_tokens']} ids from its prefix cache, whose states are lost; {AUX_FLAGS}"
            )

    def _check_token(self, final: torch.Tensor, reply: dict[str, Any], url: str) -> None:
        token = reply["output_ids"][0]
        if not 0 <= token < len(self._lm_head):
            raise ConfigError(f"{url} decoded token {token}, the target's vocabulary has {len(self._lm_head)}; serve the target")
        is_hit, is_tie = compare_greedy(final[-1:], torch.tensor([token]), self._lm_head)
        if not bool(is_hit | is_tie):
            raise ConfigError(
                f"{url} gave {reply['meta_info']['id']} states that are not of the ids that were sent: lm_head of the last "
                f"does not give token {token}, which the same request decoded; does it serve the target, with {_VERSION}?"
            )

    def _rows(self, reply: dict[str, Any], url: str, width: int) -> torch.Tensor:
        """[T, width] from the JSON of a prefill: one matrix, or one a chunk; the vectors of decoded tokens are left out."""
        parts = [item for item in reply["meta_info"].get("hidden_states") or [] if item and isinstance(item[0], list)]
        rows = torch.tensor([row for part in parts for row in part], dtype=torch.float32)
        if rows.dim() != 2 or rows.shape[1] != width:
            raise ConfigError(
                f"{url} gave states of shape {list(rows.shape)}, wanted {width} wide; is it in the right mode? {AUX_FLAGS}"
            )
        return rows.to(torch.bfloat16)

    def _from_sink(self, sink: Path, rid: str, url: str) -> States:
        paths = sorted(sink.glob(f"{rid}.*.safetensors"), key=lambda path: int(path.name.split(".")[1]))
        if not paths:
            raise ConfigError(
                f"{url} answered, but wrote no states for {rid} to {sink}: its plugin is not active there; start it with "
                f"{FOLDER_VARIABLE}={sink} and Eyas installed beside it"
            )
        try:
            parts = [load_file(path) for path in paths]
        except (OSError, SafetensorError) as error:
            raise ServerError(f"{paths[0]} is not whole ({error}); run again") from error
        for path in paths:
            path.unlink()
        return States(aux=torch.cat([part["aux"] for part in parts]), final=torch.cat([part["final"] for part in parts]))

    def _check_server(self, url: str, wanted: str, flags: str) -> None:
        try:
            reply = self._client.get(f"{url}/server_info")
            info = reply.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"{url}/server_info did not answer ({error}); start the server with {flags}") from error
        if wanted not in info:
            raise ConfigError(f"{url} is a version of SGLang that cannot give these states (no {wanted}); use {_VERSION}")
        if not info[wanted] or not info.get("disable_radix_cache") or (info.get("chunked_prefill_size") or -1) > 0:
            seen = {key: info.get(key) for key in (wanted, "disable_radix_cache", "chunked_prefill_size")}
            raise ConfigError(f"{url} is not in the mode that extraction needs ({seen}); start it with {flags}")


def _whole(reply: httpx.Response) -> dict[str, Any] | None:
    """A whole reply with its one token; None where another attempt may help (server errors, aborts, half an answer)."""
    try:
        body: dict[str, Any] | None = reply.json() if reply.status_code == 200 else None
        is_whole = (
            body is not None
            and body["meta_info"]["finish_reason"]["type"] in ("stop", "length")
            and type(body["output_ids"][0]) is int
        )
    except (ValueError, LookupError, TypeError):
        return None
    return body if is_whole else None
