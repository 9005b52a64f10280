"""What counts as a reply of `/generate`: every rule has its own error, and only a reply that passes all becomes data.

SGLang answers 200 for much that is no reply: an aborted request with placeholder counts, a prompt that
`--allow-auto-truncate` cut, output of another request. `accept` is the one gate. Cost: about 0.1 ms a
reply, and the decoding of its ids (0.5 ms per 1,000 tokens with a fast tokenizer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from eyas.errors import EyasError

REPLACEMENT = "\ufffd"
MIN_OUTPUT_TOKENS = 2

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One `POST /generate`: prompt ids, sampling parameters as they are sent, and the id to abort it by.

    `accept` judges a reply by `max_new_tokens` and `stop_token_ids` of the sampling parameters.
    """

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]

    def body(self) -> dict[str, Any]:
        return {"rid": self.rid, "input_ids": self.input_ids, "sampling_params": self.sampling_params}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An accepted reply. `text_match` says how `decode(ids) == text` held: exactly, empty text, or up to a trailing U+FFFD."""

    output_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    text_match: Literal["exact", "empty", "replacement"]
    queue_time_s: float
    first_token_s: float
    e2e_s: float
    num_retractions: int


class ReplyError(EyasError):
    """A reply that is no data. `reason` is its slug; `can_heal` says that another attempt may differ."""

    reason = "bad_reply"
    can_heal = True


class MalformedReply(ReplyError):
    """Not the JSON object of the contract: an HTML page, a batch, a field missing or of another type."""

    reason = "malformed_reply"


class AbortedReply(ReplyError):
    """`finish_reason` is an abort, or names an error, although the status is 200; with a 4xx the request itself is refused."""

    reason = "aborted"

    def __init__(self, message: str, *, can_heal: bool) -> None:
        super().__init__(message)
        self.can_heal = can_heal


class UnknownFinish(ReplyError):
    """`finish_reason` is null, missing or of a type that is neither stop nor length."""

    reason = "unknown_finish"


class WrongRid(ReplyError):
    """The reply carries another request's id."""

    reason = "wrong_rid"


class TruncatedPrompt(ReplyError):
    """The server saw fewer prompt tokens than were sent (`--allow-auto-truncate`)."""

    reason = "prompt_truncated"
    can_heal = False


class GrownPrompt(ReplyError):
    """The server saw more prompt tokens than were sent (a second BOS, a template applied again)."""

    reason = "prompt_grew"
    can_heal = False


class WrongCompletionCount(ReplyError):
    """`completion_tokens` is not the number of `output_ids`."""

    reason = "wrong_completion_count"


class PromptInOutput(ReplyError):
    """`output_ids` begin with the prompt."""

    reason = "prompt_in_output"
    can_heal = False


class TokenOutOfRange(ReplyError):
    """An output id is no row of the target's vocabulary."""

    reason = "token_out_of_range"
    can_heal = False


class StopTokenMissing(ReplyError):
    """The reply says that it stopped at a token which is not its last."""

    reason = "stop_token_missing"
    can_heal = False


class UnexpectedStop(ReplyError):
    """The reply stopped at none of the stop tokens sent. A string is the server's own mark: SGLang writes that NaN happened."""

    reason = "unexpected_stop"

    def __init__(self, message: str, *, can_heal: bool) -> None:
        super().__init__(message)
        self.can_heal = can_heal


class CutTooEarly(ReplyError):
    """The reply ends for its length with fewer ids than were asked for."""

    reason = "cut_too_early"
    can_heal = False


class OverTheCap(ReplyError):
    """More output ids than were asked for."""

    reason = "over_the_cap"


class TextMismatch(ReplyError):
    """`decode(output_ids)` is not the text: another tokenizer, or text and ids of different requests."""

    reason = "text_mismatch"


class TooShort(ReplyError):
    """Fewer than two generated ids: no position of such a record can be trained on."""

    reason = "too_short"
    can_heal = False


class _Finish(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: StrictStr
    matched: StrictInt | StrictStr | None = None
    message: str | None = None
    status_code: int | None = None


class _Weights(BaseModel):
    """Tokens `start` to `end` of a reply came from the weights `version`; an update between them makes two of these."""

    model_config = ConfigDict(extra="ignore")
    version: str


class _Meta(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: StrictStr
    finish_reason: _Finish | None = None
    prompt_tokens: StrictInt = Field(ge=0)
    completion_tokens: StrictInt = Field(ge=0)
    cached_tokens: int = 0
    weight_version: str | None = None
    weight_versions: list[_Weights] | None = None
    num_retractions: int = 0
    queue_time: float | None = None
    first_token_latency: float | None = None
    e2e_latency: float | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")
    text: StrictStr
    output_ids: list[StrictInt] | None = None
    meta_info: _Meta


class _FinishOnly(BaseModel):
    """The part that is read first: an abort may lack everything else."""

    model_config = ConfigDict(extra="ignore")

    class Meta(BaseModel):
        model_config = ConfigDict(extra="ignore")
        finish_reason: _Finish | None = None

    meta_info: Meta


def accept(body: bytes, request: GenerateRequest, *, decode: Decode, vocab_size: int, where: str) -> Reply:
    """Apply every acceptance rule to the bytes of a 200 reply to `request`; raises the rule's `ReplyError`.

    `decode` turns ids into text with special tokens kept, as the request asks the server to; `where` is the URL.
    """
    try:
        finish = _FinishOnly.model_validate_json(body).meta_info.finish_reason
        if finish is not None and (finish.type == "abort" or (finish.status_code or 0) >= 400):
            raise _aborted(finish, request, where)
        if finish is None or finish.type not in ("stop", "length"):
            seen = None if finish is None else finish.type
            raise UnknownFinish(f"{where} rid={request.rid}: finish_reason is {seen!r}, wanted stop or length")
        parsed = _Body.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise MalformedReply(
            f"{where} rid={request.rid}: {len(body)} bytes are no reply of /generate ({field}: {first['msg']}); "
            "is the URL an SGLang server, with no page of a proxy in between?"
        ) from error
    output_ids = _checked_counts(parsed, request, where)
    _check_ids(output_ids, finish, request, vocab_size, where)
    meta = parsed.meta_info
    return Reply(
        output_ids=output_ids,
        finish_reason="stop" if finish.type == "stop" else "length",
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        weight_version=_weights(meta),
        text_match=_match_text(parsed.text, output_ids, decode, request, where),
        queue_time_s=meta.queue_time or 0.0,
        first_token_s=meta.first_token_latency or 0.0,
        e2e_s=meta.e2e_latency or 0.0,
        num_retractions=meta.num_retractions,
    )


def _weights(meta: _Meta) -> str:
    """The version of the weights behind a reply; all of them, joined by commas, where they changed while it was made."""
    versions = dict.fromkeys(piece.version for piece in meta.weight_versions or [])
    return ", ".join(versions) if len(versions) > 1 else meta.weight_version or ""


def _aborted(finish: _Finish, request: GenerateRequest, where: str) -> AbortedReply:
    is_refused = finish.status_code is not None and 400 <= finish.status_code < 500 and finish.status_code != 429
    return AbortedReply(
        f"{where} rid={request.rid}: aborted with status {finish.status_code}, message {(finish.message or '')!r:.200}",
        can_heal=not is_refused,
    )


def _checked_counts(parsed: _Body, request: GenerateRequest, where: str) -> list[int]:
    meta, wanted = parsed.meta_info, len(request.input_ids)
    if meta.id != request.rid:
        raise WrongRid(f"{where}: reply of rid={meta.id!r:.80} to rid={request.rid}")
    if meta.prompt_tokens < wanted:
        raise TruncatedPrompt(
            f"{where} rid={request.rid}: the server read {meta.prompt_tokens} prompt tokens of {wanted}; "
            "start it without --allow-auto-truncate"
        )
    if meta.prompt_tokens > wanted:
        raise GrownPrompt(
            f"{where} rid={request.rid}: the server read {meta.prompt_tokens} prompt tokens, {wanted} were sent; "
            "something between us adds tokens to input_ids"
        )
    if parsed.output_ids is None:
        raise MalformedReply(f"{where} rid={request.rid}: no output_ids; is the server started with --skip-tokenizer-init?")
    output_ids = parsed.output_ids
    if wanted > 1 and output_ids[:wanted] == request.input_ids:  # whatever they count: a rendered prompt is no answer
        raise PromptInOutput(f"{where} rid={request.rid}: output_ids begin with the prompt's {wanted} ids")
    if len(output_ids) != meta.completion_tokens:
        raise WrongCompletionCount(
            f"{where} rid={request.rid}: completion_tokens is {meta.completion_tokens}, output_ids has {len(output_ids)}"
        )
    return output_ids


def _check_ids(output_ids: list[int], finish: _Finish, request: GenerateRequest, vocab_size: int, where: str) -> None:
    if output_ids and not 0 <= min(output_ids) <= max(output_ids) < vocab_size:
        raise TokenOutOfRange(f"{where} rid={request.rid}: an output id lies outside 0..{vocab_size - 1}")
    _check_end(output_ids, finish, request, where)
    if len(output_ids) < MIN_OUTPUT_TOKENS:
        raise TooShort(f"{where} rid={request.rid}: {len(output_ids)} generated ids, wanted at least {MIN_OUTPUT_TOKENS}")


def _check_end(output_ids: list[int], finish: _Finish, request: GenerateRequest, where: str) -> None:
    cap, ends, num_ids = request.sampling_params["max_new_tokens"], request.sampling_params["stop_token_ids"], len(output_ids)
    if num_ids > cap:
        raise OverTheCap(f"{where} rid={request.rid}: {num_ids} output ids, max_new_tokens is {cap}")
    if finish.type == "length":
        if num_ids < cap:
            raise CutTooEarly(
                f"{where} rid={request.rid}: cut for its length after {num_ids} ids, max_new_tokens is {cap}; "
                "give the server room for prompt and reply (context length, KV cache)"
            )
        return
    if finish.matched not in ends:
        raise UnexpectedStop(
            f"{where} rid={request.rid}: stopped at {finish.matched!r:.80}, wanted one of the stop tokens {ends}; a string is an "
            "error of the server (see its log), a token may belong to generation.sampling.stop_token_ids",
            can_heal=not isinstance(finish.matched, int),
        )
    if output_ids[-1:] != [finish.matched]:
        raise StopTokenMissing(
            f"{where} rid={request.rid}: stopped at token {finish.matched}, but the last of {num_ids} output ids is "
            f"{output_ids[-1:]}; use a server that returns the stop token in output_ids"
        )


def _match_text(
    text: str, output_ids: list[int], decode: Decode, request: GenerateRequest, where: str
) -> Literal["exact", "empty", "replacement"]:
    decoded = decode(output_ids)
    if decoded == text:
        return "exact"
    if not text:
        return "empty"
    if (text.endswith(REPLACEMENT) or decoded.endswith(REPLACEMENT)) and decoded.rstrip(REPLACEMENT) == text.rstrip(REPLACEMENT):
        return "replacement"
    raise TextMismatch(
        f"{where} rid={request.rid}: the text has {len(text)} characters, its {len(output_ids)} ids decode to {len(decoded)} "
        "others; the server's tokenizer is not the target's"
    )
