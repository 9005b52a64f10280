"""What the server says of itself: model, arguments, loads and Prometheus metrics, under SGLang's names."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from eyas.engine.service import Service
from eyas.engine.stats import LATENCY_BUCKETS_S, Histogram

SGLANG_VERSION = "0.5.23"
"""The version whose protocol is spoken."""


def model_info(service: Service) -> dict[str, Any]:
    """`/model_info`."""
    return {
        "model_path": str(service.spec.folder),
        "served_model_name": service.served_model,
        "tokenizer_path": str(service.spec.folder),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": service.spec.model_type,
        "architectures": [service.spec.architecture],
    }


def server_info(service: Service) -> dict[str, Any]:
    """`/server_info`: the server's arguments, flat, and the state of its one worker."""
    stats = service.scheduler.stats
    return {
        **service.server_args,
        "model_path": str(service.spec.folder),
        "tokenizer_path": str(service.spec.folder),
        "served_model_name": service.served_model,
        "context_length": service.spec.context_length,
        "max_running_requests": service.config.max_running_requests,
        "max_queued_requests": service.config.max_queued_requests or None,
        "max_total_tokens": stats.capacity_tokens,
        "chunked_prefill_size": service.config.prefill_chunk_tokens,
        "page_size": 64,
        "device": "cpu",
        "tp_size": 1,
        "dp_size": 1,
        "enable_metrics": True,
        "disable_radix_cache": False,
        "target_fingerprint": service.spec.fingerprint,
        "version": SGLANG_VERSION,
        "internal_states": [
            {
                "last_gen_throughput": stats.gen_throughput,
                "max_running_requests_effective": service.config.max_running_requests,
                "avg_spec_accept_length": stats.spec_accept_length or None,
                "step_us": stats.counters["step_us"],
                "steps": stats.counters["steps"],
            }
        ],
    }


def models(service: Service) -> dict[str, Any]:
    """`/v1/models`."""
    entry = {
        "id": service.served_model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": service.served_model,
        "parent": None,
        "max_model_len": service.spec.context_length,
    }
    return {"object": "list", "data": [entry]}


def loads(service: Service) -> dict[str, Any]:
    """`/v1/loads`."""
    stats = service.scheduler.stats
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_used_tokens": stats.num_used_tokens,
        "num_total_tokens": stats.num_used_tokens,
        "max_total_num_tokens": stats.capacity_tokens,
        "max_running_requests": stats.max_running,
        "token_usage": stats.token_usage,
        "gen_throughput": stats.gen_throughput,
        "cache_hit_rate": stats.cache_hit_rate,
        "utilization": stats.num_running / stats.max_running,
        "memory": {"token_capacity": stats.capacity_tokens},
        "queues": {"waiting": stats.num_waiting, "grammar": 0, "paused": 0, "retracted": 0},
    }
    timestamp = datetime.now(UTC).isoformat()
    return {"timestamp": timestamp, "version": SGLANG_VERSION, "accelerator": None, "num_accelerators": 1, "loads": [load]}


def metrics(service: Service) -> str:
    """`/metrics`, in Prometheus' text format."""
    stats = service.scheduler.stats
    counters = stats.counters
    labels = {"engine_type": "unified", "model_name": service.served_model}
    worker = labels | {"moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
    served = labels | {"is_streaming": "false"}
    proposed = counters["spec_proposed"]
    lines: list[str] = []
    for name, value in {
        "num_running_reqs": stats.num_running,
        "num_queue_reqs": stats.num_waiting,
        "num_used_tokens": stats.num_used_tokens,
        "token_usage": stats.token_usage,
        "full_token_usage": stats.token_usage,
        "gen_throughput": stats.gen_throughput,
        "cache_hit_rate": stats.cache_hit_rate,
        "max_total_num_tokens": stats.capacity_tokens,
        "context_len": service.spec.context_length,
        "utilization": stats.num_running / stats.max_running,
        "num_retracted_reqs": 0,
        "num_paused_reqs": 0,
        "num_grammar_queue_reqs": 0,
        "spec_accept_length": stats.spec_accept_length,
        "spec_accept_rate": counters["spec_accepted"] / proposed if proposed else 0.0,
    }.items():
        lines += _lines(name, "gauge", [("", worker, value)])
    for name, value, where in (
        ("prompt_tokens_total", counters["prompt_tokens"], served),
        ("generation_tokens_total", counters["generation_tokens"], served),
        ("num_requests_total", counters["requests"], served),
        ("num_aborted_requests_total", counters["aborted"], served),
        ("num_retractions_total", counters["retracted"], worker),
        ("spec_verify_calls_total", counters["spec_verifications"], served),
        ("cached_tokens_total", counters["cached_tokens"], labels | {"cache_source": "device"}),
    ):
        lines += _lines(name, "counter", [("", where, value)])
    lines += _histogram("time_to_first_token_seconds", stats.first_token, served)
    lines += _histogram("e2e_request_latency_seconds", stats.end_to_end, served)
    lines += _histogram("queue_time_seconds", stats.queueing, worker)
    return "\n".join(lines) + "\n"


def _lines(name: str, kind: str, samples: list[tuple[str, dict[str, str], float]]) -> list[str]:
    out = [f"# TYPE sglang:{name} {kind}"]
    for suffix, labels, value in samples:
        text = ",".join(f'{key}="{_escape(label)}"' for key, label in sorted(labels.items()))
        out.append(f"sglang:{name}{suffix}{{{text}}} {float(value)}")
    return out


def _histogram(name: str, histogram: Histogram, labels: dict[str, str]) -> list[str]:
    buckets = [
        ("_bucket", labels | {"le": str(bound)}, float(count))
        for bound, count in zip(LATENCY_BUCKETS_S, histogram.counts, strict=True)
    ]
    total = float(histogram.count)
    tail = [("_bucket", labels | {"le": "+Inf"}, total), ("_sum", labels, histogram.total), ("_count", labels, total)]
    return _lines(name, "histogram", [*buckets, *tail])


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
