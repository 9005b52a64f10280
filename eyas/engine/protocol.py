"""Bodies of `/generate` and the error bodies of SGLang 0.5.23, shape by shape.

Four shapes stand side by side there, and a client must read them all: `{"error": "text"}` (auth, unknown sampling key),
`{"error": {"message"}}` (the manager's checks), `{"object": "error", …, "type": "Bad Request"}` (malformed bodies, never
422) and the same with `"type": "503"` (full queue). One deviation on purpose: an *empty prompt* ends a real server's
process on some backends; here it is a 400.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from eyas.engine.request import LogprobOptions
from eyas.engine.sampling import BadRequest, SamplingParams, parse_sampling

Items = list[Any]


class GenerateBody(BaseModel):
    """The fields of `/generate` that are read; others are ignored, as SGLang does."""

    model_config = ConfigDict(extra="ignore", strict=True)

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_hidden_states: bool | str | list[Any] = False
    return_prompt_token_ids: bool = False
    extra_key: str | list[str] | None = None


class Item(BaseModel):
    """One prompt of a body, with its own parameters."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt: str | list[int]
    params: SamplingParams
    rid: str | None
    logprobs: LogprobOptions | None
    namespace: str


class MalformedBody(Exception):
    """A body that is not JSON or has a field of a wrong type; `errors` are pydantic's."""

    def __init__(self, errors: Items) -> None:
        super().__init__(str(errors))
        self.errors = errors


async def read_body(request: HttpRequest) -> Any:
    """The request's JSON object; raises `MalformedBody`."""
    try:
        raw = await request.json()
    except ValueError as error:
        raise MalformedBody(
            [{"type": "json_invalid", "loc": ("body", 1), "msg": "JSON decode error", "input": {}, "ctx": {"error": str(error)}}]
        ) from error
    if not isinstance(raw, dict):
        raise MalformedBody(
            [{"type": "model_attributes_type", "loc": ("body",), "msg": "Input should be a valid dictionary", "input": raw}]
        )
    return raw


def parse_generate(raw: Any) -> tuple[GenerateBody, list[Item], bool]:
    """(body, one item per prompt and sample, whether the answer is a list); raises what the error bodies below are for."""
    try:
        body = GenerateBody.model_validate(raw)
    except ValidationError as error:
        wrong = [{**item, "loc": ("body", *item["loc"])} for item in error.errors(include_url=False, include_context=False)]
        raise MalformedBody(wrong) from error
    source: Any = body.input_ids if body.input_ids is not None else body.text
    if source is None:
        raise BadRequest("Either text, input_ids or input_embeds should be provided.")
    if body.return_hidden_states:
        raise BadRequest("The server is not configured to return hidden states. The embedded engine gives none.")
    is_batch = isinstance(source, list) and (not source or isinstance(source[0], (list, str)))
    prompts = source if is_batch else [source]
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise BadRequest("The prompt is empty; the embedded engine refuses it (a real server may die of it).")
    items: list[Item] = []
    is_list = is_batch
    for index, prompt in enumerate(prompts):
        params = parse_sampling(_of(body.sampling_params, index, is_batch))
        is_list = is_list or params.n > 1
        for _ in range(params.n):
            items.append(
                Item(
                    prompt=prompt,
                    params=params,
                    rid=_of(body.rid, index, is_batch) if params.n == 1 else None,
                    logprobs=_logprob_options(body, index, is_batch),
                    namespace=_of(body.extra_key, index, is_batch) or "",
                )
            )
    return body, items, is_list


def _of(value: Any, index: int, is_batch: bool) -> Any:
    if not (is_batch and isinstance(value, list)):
        return value
    if index >= len(value):
        raise BadRequest(f"a list of {len(value)} values stands beside more prompts.")
    return value[index]


def _logprob_options(body: GenerateBody, index: int, is_batch: bool) -> LogprobOptions | None:
    if not _of(body.return_logprob, index, is_batch):
        return None
    asked: Any = body.token_ids_logprob or []
    if asked and isinstance(asked[0], list):
        asked = _of(asked, index, is_batch)
    start = _of(body.logprob_start_len, index, is_batch)
    return LogprobOptions(
        start=-1 if start is None else start,
        num_top=_of(body.top_logprobs_num, index, is_batch) or 0,
        token_ids=asked,
        with_text=body.return_text_in_logprobs,
    )


def check_lengths(num_prompt: int, max_new_tokens: int, context_length: int) -> None:
    """Refuse what does not fit the context, with SGLang's words."""
    if num_prompt >= context_length:
        raise BadRequest(f"The input ({num_prompt} tokens) is longer than the model's context length ({context_length} tokens).")
    total = num_prompt + max_new_tokens
    if total > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
            f"You requested a total of {total} tokens: {num_prompt} tokens from the input messages and {max_new_tokens} tokens "
            "for the completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )


def manager_error(message: str) -> JSONResponse:
    """400 of the manager's checks."""
    return JSONResponse({"error": {"message": message}}, 400)


def plain_error(message: str, status: int) -> JSONResponse:
    """`error` as a string: auth and unknown sampling keys."""
    return JSONResponse({"error": message}, status)


def object_error(message: str, kind: str, status: int) -> JSONResponse:
    """The OpenAI-like shape: `kind` is "Bad Request", "BadRequestError" or a status as text."""
    return JSONResponse({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


def malformed_error(error: MalformedBody) -> JSONResponse:
    """400 of a malformed body."""
    count = len(error.errors)
    lines = "".join(f"  {item}\n" for item in error.errors)
    return object_error(f"{count} validation error{'s' * (count > 1)}:\n{lines}", "Bad Request", 400)


def stream_error(message: str) -> dict[str, Any]:
    """The error event of a stream, which has already been answered with 200."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}
