"""Greedy answers of vLLM to prompts, with a drafter or without. Runs in .venv-vllm; of ours only vLLM's plugin is loaded, by vLLM itself.

vllm_generate.py TASK OUT      TASK: JSON with target, drafter (or null), drafted, dtype, max_new_tokens, prompts (token ids)
OUT: JSON with tokens (of each prompt), seconds, drafts, accepted (by position).
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def counted(llm) -> tuple[int, list[int]]:
    """Drafts so far, and accepted tokens by position."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return (metrics[DRAFTS].value, list(metrics[ACCEPTED].values)) if DRAFTS in metrics else (0, [])


def main(task_path: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    task = json.loads(Path(task_path).read_text())
    speculative = None
    if task["drafter"] is not None:
        speculative = {"method": "eagle3", "model": task["drafter"], "num_speculative_tokens": task["drafted"]}
    llm = LLM(
        model=task["target"],
        dtype=task["dtype"],
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=task["max_new_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # warm-up
    drafts, accepted = counted(llm)
    tokens, seconds = [], 0.0
    for prompt in prompts:
        start = time.perf_counter()
        tokens.append(list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids))
        seconds += time.perf_counter() - start
    now, positions = counted(llm)
    accepted = [new - old for new, old in zip(positions, accepted, strict=True)]
    Path(out).write_text(
        json.dumps({"tokens": tokens, "seconds": seconds, "drafts": now - drafts, "accepted": accepted})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
