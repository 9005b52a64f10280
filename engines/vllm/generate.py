"""Run one job in real vLLM and print what came out: `python generate.py JOB.json RESULT.json`.

JOB:    {"target": folder, "draft": folder or "", "num_draft_tokens": K, "dtype": "bfloat16" | "float32",
         "prompts": [[ids]], "max_new_tokens": [n per prompt], "stop_token_ids": [ids], "max_model_len": n, "max_num_seqs": n}
RESULT: {"output_ids": [[ids]], "metrics": {name: count}}  (metrics: the raw `vllm:spec_decode_*` counters)

Greedy, ids in and ids out, nothing tokenised; eager mode (40 s to start, compiling takes minutes).
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main(job_path, result_path):
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    with open(job_path) as file:
        job = json.load(file)
    speculation = None
    if job["draft"]:
        speculation = {"method": "eagle3", "model": job["draft"], "num_speculative_tokens": job["num_draft_tokens"]}
    engine = LLM(
        job["target"], dtype=job["dtype"], max_model_len=job["max_model_len"], max_num_seqs=job["max_num_seqs"],
        enforce_eager=True, disable_log_stats=False, enable_prefix_caching=False, speculative_config=speculation,
    )  # fmt: skip
    sampling = [
        SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=job["stop_token_ids"], detokenize=False)
        for limit in job["max_new_tokens"]
    ]
    outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]], sampling, use_tqdm=False)
    metrics = {
        metric.name: metric.value for metric in engine.get_metrics() if "spec_decode" in metric.name and hasattr(metric, "value")
    }
    result = {"output_ids": [list(output.outputs[0].token_ids) for output in outputs], "metrics": metrics}
    with open(result_path, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
