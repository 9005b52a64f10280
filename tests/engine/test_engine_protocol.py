"""The server over HTTP: shapes, statuses and words as a real SGLang 0.5.23 gave them.

`RECORDED` holds replies of a real server (SmolLM2-135M-Instruct on CPU), so it is an independent truth for names
and types; the tiny target here gives other tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.engine.config import EngineConfig
from eyas.engine.process import EngineProcess
from tests.engine.conftest import add_tokenizer, save_target

RECORDED_META = json.loads(
    '{"id":"my-rid-1","finish_reason":{"type":"stop","matched":2},"prompt_tokens":16,"weight_version":"default",'
    '"num_retractions":0,"forward_entry_time":1796191310.0249908,"prefill_finished_time":1796191312.7559338,'
    '"queue_time":0.0006012639998971281,"reasoning_tokens":0,"completion_tokens":8,"cached_tokens":0,'
    '"weight_versions":[{"version":"default","start":0,"end":8}],"cached_tokens_details":null,"dp_rank":null,'
    '"e2e_latency":5.653142527,"request_received_ts":1796191310.0202127,"first_token_latency":2.735721122658788,'
    '"request_finished_ts":1796191315.673355,"decode_throughput":2.399379119377059,'
    '"response_sent_to_client_ts":1796191315.6738443}'
)
UNKNOWN_KEY = (
    "unknown field `foo`, expected one of `max_new_tokens`, `stop`, `stop_token_ids`, `stop_regex`, `temperature`, `top_p`, "
    "`top_k`, `min_p`, `frequency_penalty`, `presence_penalty`, `repetition_penalty`, `min_new_tokens`, `n`, `json_schema`, "
    "`regex`, `ebnf`, `structural_tag`, `ignore_eos`, `skip_special_tokens`, `spaces_between_special_tokens`, `no_stop_trim`, "
    "`stream_interval`, `logit_bias`, `sampling_seed`, `custom_params`, `beam_width`, `watermark`, `choice`"
)
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
IDS = [1, 30, 40, 50, 60]
KEY = "secret key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = save_target(tmp_path_factory.mktemp("protocol"), vocab_size=259)
    add_tokenizer(folder)
    config = EngineConfig(dtype="float32", threads=1, max_running_requests=2, max_queued_requests=2, prefill_chunk_tokens=64)
    with EngineProcess(folder, config=config, api_key=KEY, served_model="tiny") as process:
        yield process


@pytest.fixture
def client(server: EngineProcess) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=240, trust_env=False) as client:
        yield client


def generate(client: httpx.Client, **body: Any) -> Any:
    reply = client.post("/generate", json={"sampling_params": GREEDY, "input_ids": IDS} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def wait_until(check: Any, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def running(client: httpx.Client) -> int:
    return int(client.get("/v1/loads").json()["loads"][0]["num_running_reqs"])


def test_a_reply_has_the_recorded_names_and_types(client: httpx.Client) -> None:
    reply = generate(client, rid="my-rid-1")
    assert set(reply) == {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    assert set(meta) == set(RECORDED_META)
    for name, value in RECORDED_META.items():
        if name not in ("finish_reason", "cached_tokens_details"):
            assert type(meta[name]) is type(value), name
    assert meta["id"] == "my-rid-1"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], len(reply["output_ids"])) == (5, 8, 8)


@pytest.mark.parametrize(
    ("body", "status", "wanted"),
    [
        ({"sampling_params": {"foo": 1}}, 400, {"error": UNKNOWN_KEY}),
        (
            {"sampling_params": {"temperature": -1.0}},
            400,
            {"error": {"message": "temperature must be a non-negative finite number, got -1.0."}},
        ),
        ({"sampling_params": {"top_p": 1.5}}, 400, {"error": {"message": "top_p must be in (0, 1], got 1.5."}}),
        ({"sampling_params": {"max_new_tokens": -1}}, 400, {"error": {"message": "max_new_tokens must be at least 0, got -1."}}),
        ({"input_ids": None}, 400, {"error": {"message": "Either text, input_ids or input_embeds should be provided."}}),
        (
            {"input_ids": [5] * 2100},
            400,
            {"error": {"message": "The input (2100 tokens) is longer than the model's context length (1024 tokens)."}},
        ),
        (
            {"input_ids": [5] * 1000, "sampling_params": {"max_new_tokens": 100}},
            400,
            {
                "error": {
                    "message": "Requested token count exceeds the model's maximum context length of 1024 tokens. You requested a "
                    "total of 1100 tokens: 1000 tokens from the input messages and 100 tokens for the completion. Please reduce "
                    "the number of tokens in the input messages or the completion to fit within the limit."
                }
            },
        ),
    ],
)
def test_refusals_have_the_recorded_bodies(client: httpx.Client, body: dict[str, Any], status: int, wanted: Any) -> None:
    reply = client.post("/generate", json={"input_ids": IDS} | body)
    assert (reply.status_code, reply.json()) == (status, wanted)


@pytest.mark.parametrize("prompt", [{"input_ids": []}, {"input_ids": [[5], []]}, {"text": ""}])
def test_an_empty_prompt_is_a_400_and_not_the_servers_death(client: httpx.Client, prompt: dict[str, Any]) -> None:
    reply = client.post("/generate", json=prompt)
    assert reply.status_code == 400
    assert "empty" in reply.json()["error"]["message"]
    generate(client)


@pytest.mark.parametrize("content", [b"{not json", b'{"text": 5}', b"[1]"])
def test_malformed_bodies_are_400_in_the_object_shape(client: httpx.Client, content: bytes) -> None:
    reply = client.post("/generate", content=content, headers={"content-type": "application/json"})
    body = reply.json()
    assert reply.status_code == 400
    assert set(body) == {"object", "message", "type", "param", "code"}
    assert (body["object"], body["type"], body["param"], body["code"]) == ("error", "Bad Request", None, 400)
    assert "validation error" in body["message"]


def test_the_key_is_wanted_everywhere_but_for_health_ready_and_metrics(server: EngineProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=240, trust_env=False) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/model_info", "/get_model_info", "/v1/models", "/server_info", "/v1/loads", "/flush_cache"):
                reply = client.get(path, headers=headers)
                assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
            assert client.post("/generate", json={"input_ids": IDS}, headers=headers).status_code == 401
            for path in ("/health", "/health_generate", "/ready", "/metrics"):
                assert client.get(path, headers=headers).status_code == 200


def test_unknown_top_level_fields_are_ignored_and_ids_win_over_text(client: httpx.Client) -> None:
    assert generate(client, foo=1, text="other")["output_ids"] == generate(client)["output_ids"]


def test_text_is_tokenized_by_the_targets_tokenizer(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"model": "tiny", "prompt": "Hi there"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 8
    assert tokens["max_model_len"] == 1024
    reply = client.post("/generate", json={"text": "Hi there", "sampling_params": GREEDY}).json()
    assert reply["meta_info"]["prompt_tokens"] == 8
    assert reply["output_ids"] == generate(client, input_ids=tokens["tokens"])["output_ids"]


def test_batches_keep_their_order_ids_and_own_parameters(client: httpx.Client) -> None:
    params = [GREEDY, GREEDY | {"max_new_tokens": 2}]
    replies = generate(client, input_ids=[IDS, IDS], rid=["a", "b"], sampling_params=params)
    assert [r["meta_info"]["id"] for r in replies] == ["a", "b"]
    assert [len(r["output_ids"]) for r in replies] == [8, 2]
    assert len(generate(client, sampling_params=GREEDY | {"n": 2})) == 2


def test_stops_lengths_and_trimming_follow_the_recordings(client: httpx.Client) -> None:
    ids = generate(client)["output_ids"]
    stop = {"stop_token_ids": [ids[3]], "skip_special_tokens": False}
    end = ids.index(ids[3]) + 1
    trimmed = generate(client, sampling_params=GREEDY | stop)
    assert trimmed["output_ids"] == ids[:end]  # the stop token stays in the ids
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}
    assert trimmed["meta_info"]["completion_tokens"] == end
    whole = generate(client, sampling_params=GREEDY | stop | {"no_stop_trim": True})
    assert whole["text"].startswith(trimmed["text"])
    assert len(whole["text"]) > len(trimmed["text"])
    nothing = generate(client, sampling_params={"max_new_tokens": 0})
    assert (nothing["text"], nothing["output_ids"]) == ("", [])
    assert nothing["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_a_stop_string_ends_the_ids_at_its_token_and_the_text_before_it(client: httpx.Client) -> None:
    bias = {str(token): 50.0 for token in (60,)}
    free = generate(client, sampling_params=GREEDY | {"logit_bias": bias})
    letter = free["text"][0]
    reply = generate(client, sampling_params=GREEDY | {"logit_bias": bias, "stop": [letter * 3]})
    assert reply["output_ids"] == [60, 60, 60]
    assert reply["text"] == ""
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": letter * 3}


def test_minimum_length_keeps_end_tokens_away(client: httpx.Client) -> None:
    favoured = {"temperature": 0, "max_new_tokens": 8, "logit_bias": {"2": 100.0}}
    assert generate(client, sampling_params=favoured)["output_ids"] == [2]
    later = generate(client, sampling_params=favoured | {"min_new_tokens": 5})["output_ids"]
    assert len(later) == 6
    assert later[5] == 2


def test_a_seed_fixes_a_sampled_reply(client: httpx.Client) -> None:
    params = {"temperature": 1.5, "max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 7}
    first, again = generate(client, sampling_params=params), generate(client, sampling_params=params)
    other = generate(client, sampling_params=params | {"sampling_seed": 8})
    assert first["output_ids"] == again["output_ids"] != other["output_ids"]


def test_logprobs_come_as_value_id_text(client: httpx.Client) -> None:
    meta = generate(client, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[9])["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 1, None]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 8
    for own, top, asked in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True
    ):
        assert top[0] == own  # greedy: the token is the best
        assert [entry[1] for entry in asked] == [9]
    only_output = generate(client, return_logprob=True)["meta_info"]
    assert only_output["input_token_logprobs"] == []


def test_a_repeated_prompt_reports_its_cached_tokens(client: httpx.Client) -> None:
    prompt = [7 + i % 90 for i in range(200)]
    first = generate(client, input_ids=prompt, extra_key="mine")
    again = generate(client, input_ids=prompt, extra_key="mine")
    assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (0, 192)
    assert again["meta_info"]["cached_tokens_details"] == {"device": 192, "host": 0}
    assert first["output_ids"] == again["output_ids"]
    assert generate(client, input_ids=prompt, extra_key="other")["meta_info"]["cached_tokens"] == 0


def events(client: httpx.Client, **body: Any) -> list[Any]:
    with client.stream("POST", "/generate", json={"input_ids": IDS, "sampling_params": GREEDY, "stream": True} | body) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_is_cumulative_and_ends_like_the_plain_reply(client: httpx.Client) -> None:
    chunks = events(client)
    plain = generate(client)
    assert [len(chunk["output_ids"]) for chunk in chunks] == list(range(1, 9))
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (plain["text"], plain["output_ids"])
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_an_error_in_a_stream_is_an_event_after_200(client: httpx.Client) -> None:
    assert events(client, input_ids=[5] * 2100) == [
        {
            "error": {
                "message": "The input (2100 tokens) is longer than the model's context length (1024 tokens).",
                "type": "invalid_request_error",
                "code": 400,
                "retryable": False,
            }
        }
    ]


def long_request(server: EngineProcess, results: list[httpx.Response], rid: str | None = None) -> threading.Thread:
    body = {"input_ids": IDS, "rid": rid, "sampling_params": GREEDY | {"max_new_tokens": 1000}}

    def post() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        results.append(httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=240, trust_env=False))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def test_an_aborted_request_answers_200_with_what_it_has(server: EngineProcess, client: httpx.Client) -> None:
    results: list[httpx.Response] = []
    thread = long_request(server, results, rid="long")
    wait_until(lambda: running(client) == 1)
    assert client.post("/flush_cache").status_code == 400
    duplicate = client.post("/generate", json={"input_ids": IDS, "rid": "long"})
    assert duplicate.status_code == 400
    assert client.post("/abort_request", json={"rid": "long"}).content == b""
    thread.join(240)
    reply = results[0].json()
    assert results[0].status_code == 200
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < 1000
    assert client.post("/abort_request", json={"rid": "unknown"}).status_code == 200
    flushed = client.post("/flush_cache")
    assert (flushed.status_code, flushed.text.splitlines()[0]) == (200, "Cache flushed.")


def test_a_full_queue_answers_503_in_the_recorded_shape(server: EngineProcess, client: httpx.Client) -> None:
    results: list[httpx.Response] = []
    threads = [long_request(server, results) for _ in range(4)]
    load = {}

    def is_full() -> bool:
        load.update(client.get("/v1/loads").json()["loads"][0])
        return (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 2)

    wait_until(is_full)
    reply = client.post("/generate", json={"input_ids": IDS})
    assert reply.status_code == 503
    assert reply.json() == {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}
    client.post("/abort_request", json={"abort_all": True})
    for thread in threads:
        thread.join(240)
    assert all(r.json()["meta_info"]["finish_reason"]["type"] == "abort" for r in results)


def test_a_client_that_goes_away_frees_its_place(server: EngineProcess, client: httpx.Client) -> None:
    body = {"input_ids": IDS, "sampling_params": GREEDY | {"max_new_tokens": 1000}}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=body, timeout=httpx.Timeout(10, read=0.05))
    wait_until(lambda: running(client) == 0 and "sglang:num_aborted_requests_total{" in client.get("/metrics").text)


def test_chat_renders_messages_and_tools_with_the_targets_template(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {
        "model": "nope",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": tools,
        "chat_template_kwargs": {"thinking": True},
        "max_tokens": 1,
        "return_prompt_token_ids": True,
    }
    reply = client.post("/v1/chat/completions", json=body).json()
    wanted = "<|im_start|>tools " + json.dumps(tools) + "<|im_end|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert reply["choices"][0]["prompt_token_ids"] == client.post("/tokenize", json={"prompt": wanted}).json()["tokens"]
    assert reply["usage"]["completion_tokens"] == 1
    assert reply["model"] == "nope"
    long = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a" * 3000}]})
    assert (long.status_code, long.json()["type"], long.json()["code"]) == (400, "BadRequestError", 400)
    assert "is longer than the model's context length (1024 tokens)." in long.json()["message"]


def test_the_server_describes_itself(client: httpx.Client) -> None:
    model = client.get("/model_info").json()
    assert (model["served_model_name"], model["model_type"], model["architectures"]) == ("tiny", "llama", ["LlamaForCausalLM"])
    assert client.get("/get_model_info").json() == model
    [entry] = client.get("/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == ("tiny", 1024)
    info = client.get("/server_info").json()
    assert (info["context_length"], info["max_running_requests"], info["max_queued_requests"]) == (1024, 2, 2)
    assert (info["dtype"], info["scripted_reasoning"], info["speculative_algorithm"]) == ("float32", False, None)
    assert KEY not in json.dumps(info)


def test_metrics_count_tokens_under_sglangs_names(client: httpx.Client) -> None:
    def value(name: str) -> float:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"sglang:{name}{{")]
        assert len(lines) == 1, name
        return float(lines[0].rsplit(" ", 1)[1])

    before = value("generation_tokens_total"), value("prompt_tokens_total"), value("num_requests_total")
    generate(client)
    after = value("generation_tokens_total"), value("prompt_tokens_total"), value("num_requests_total")
    assert [b - a for a, b in zip(before, after, strict=True)] == [8, 5, 1]
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput", "cache_hit_rate", "max_total_num_tokens"):
        value(name)


def test_a_port_in_use_is_one_clear_line_and_exit_code_2(server: EngineProcess, tmp_path: Path) -> None:
    import subprocess
    import sys

    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run([sys.executable, "-m", "eyas.engine", "--port", port], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"127.0.0.1:{port}" in done.stderr
