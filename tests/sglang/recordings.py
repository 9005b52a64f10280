"""Bodies that a real SGLang 0.5.23 server sent (SmolLM2-135M-Instruct on a CPU), and what our rules say of each."""

from __future__ import annotations

PROMPT = list(range(100, 116))  # the recorded prompt had 16 ids
META = (
    '"weight_version":"default","num_retractions":0,"storage_prefetch_wait":0.0,"storage_staging_wait":0.0,'
    '"forward_entry_time":1796191310.0249908,"prefill_finished_time":1796191312.7559338,"queue_time":0.0006012639998971281,'
    '"reasoning_tokens":0,"cached_tokens":0,"weight_versions":[{"version":"default","start":0,"end":8}],'
    '"cached_tokens_details":null,"dp_rank":null,"e2e_latency":5.653142527,"first_token_latency":2.735721122658788,'
    '"decode_throughput":2.399379119377059'
)
STOP = (
    '{"text":"The capital of France is Paris.<|im_end|>","output_ids":[504,3575,282,4649,314,7042,30,2],"meta_info":{'
    '"id":"my-rid-1","finish_reason":{"type":"stop","matched":2},"prompt_tokens":16,"completion_tokens":8,' + META + "}}"
)
LENGTH = (
    '{"text":"The capital of","output_ids":[504,3575,282],"meta_info":{"id":"my-rid-1",'
    '"finish_reason":{"type":"length","length":3},"prompt_tokens":16,"completion_tokens":3,' + META + "}}"
)
ABORTED = (
    '{"text":"The capital","output_ids":[504,3575],"meta_info":{"id":"my-rid-1",'
    '"finish_reason":{"type":"abort","message":"Aborted","status_code":null,"err_type":null},"prompt_tokens":16,'
    '"completion_tokens":2,' + META + "}}"
)
PREFILL_ONLY = (
    '{"text":"","output_ids":[],"meta_info":{"id":"my-rid-1","finish_reason":{"type":"length","length":0},"prompt_tokens":16,'
    '"completion_tokens":0,' + META + "}}"
)
RENDERED = (  # of the one user turn "hi", with return_prompt_token_ids; from meta_info on left out
    '{"id":"xyz","object":"chat.completion","created":1796191784,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant",'
    '"content":"Hello there!","reasoning_content":null},"logprobs":null,"finish_reason":"length","matched_stop":null,'
    '"prompt_token_ids":[1,9690,198,2683,359,253,5356,5646,11173,3365,3511,308,34519,28,7018,411,407,19712,8182,2,198,1,4093,198,'
    '6004,2,198,1,520,9531,198],"response_token_ids":[19556,665,17]}]}'
)
TEXTS = {
    (504, 3575, 282, 4649, 314, 7042, 30, 2): "The capital of France is Paris.<|im_end|>",
    (504, 3575, 282): "The capital of",
    (504, 3575): "The capital",
    (): "",
}
ERRORS = {
    '{"error":"Unauthorized"}': "Unauthorized",
    '{"error":{"message":"top_p must be in (0, 1], got 1.5."}}': "top_p must be in (0, 1], got 1.5.",
    '{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}': "The request queue is full.",
    '{"error":"unknown field `foo`, expected one of `max_new_tokens`"}': "unknown field `foo`, expected one of `max_new_tokens`",
    "<html>Bad gateway</html>": "24 bytes that are not JSON",
}
LOADS = (
    '{"timestamp":"2026-12-02T06:09:46.509604+00:00","version":"0.5.23","loads":[{"timestamp":1796191786.5090108,"dp_rank":0,'
    '"num_running_reqs":3,"num_waiting_reqs":1,"max_total_num_tokens":65536,"max_running_requests":32,"token_usage":0.25,'
    '"gen_throughput":7.5,"cache_hit_rate":0.9375,"queues":{"waiting":0,"grammar":0,"paused":0,"retracted":2,"prealloc_ready":0}}]}'
)
METRICS = """# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="tiny"} 42.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="tiny"} 8.0
sglang:num_retracted_reqs{engine_type="unified",model_name="tiny",pid="20155",tp_rank="0"} 0.0
sglang:fwd_occupancy{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} NaN
sglang:routing_keys_active 0.0
http_requests_total{endpoint="/model_info"} broken
"""
