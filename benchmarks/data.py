"""Data preparation against the bare model: answers in tokens/s, and the tapped forward pass in tokens/s.

    python benchmarks/data.py --json

Answers: `answer_prompts` on built-in prompts against a decode loop of the same batch with nothing but the target's forward pass
and argmax. Tapped forward: `Online` (taps, unpadding, collating) against the Hugging Face trunk on the same examples as one padded
batch. The two of each pair take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from specdraft.data.chat import answers_to_examples
from specdraft.data.source import Online, pad_ids
from specdraft.data.tasks import builtin_prompts
from specdraft.decoding.answers import AnswerConfig, answer_prompts
from specdraft.models.target import TargetModel
from specdraft.provenance import others_cpu_share, provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = TargetModel.load("default")
    prompts, config = builtin_prompts()[: args.prompts], AnswerConfig(max_new_tokens=args.tokens)
    rates: dict[str, list[float]] = {"answers": [], "bare decode": [], "tapped forward": [], "bare forward": []}
    others = others_cpu_share()
    for number in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            rows = answer_prompts(target, prompts, Path(folder) / "answers.jsonl", config)
            rates["answers"].append(
                sum(end - begin for row in rows for begin, end in row.spans) / (time.perf_counter() - start)
            )
        rates["bare decode"].append(bare_decode(target, rows, args.tokens))
        examples, _ = answers_to_examples(rows[number * 16 : number * 16 + 16])
        tokens = sum(len(example.input_ids) for example in examples)
        start = time.perf_counter()
        Online(target).batch(examples)
        rates["tapped forward"].append(tokens / (time.perf_counter() - start))
        start = time.perf_counter()
        with torch.inference_mode():
            target.model.get_decoder()(input_ids=pad_ids(examples)[0], use_cache=False)
        rates["bare forward"].append(tokens / (time.perf_counter() - start))
    for name, values in rates.items():
        print(f"{name:15} {statistics.median(values):7,.0f} tok/s ({min(values):,.0f} to {max(values):,.0f})")
    if args.json:
        medians = {name: statistics.median(values) for name, values in rates.items()}
        print(json.dumps({**medians, "others_cpu_share": round(others, 2), **vars(args), **provenance()}))


@torch.inference_mode()
def bare_decode(target: TargetModel, rows: list, count: int) -> float:
    """Tokens/s of as many steps at the full batch size, prompts' prefill included, no row ever ending."""
    prompts = [row.input_ids[: row.spans[0][0]] for row in rows]
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for b, prompt in enumerate(prompts):
        ids[b, : lengths[b]] = torch.tensor(prompt)
    start = time.perf_counter()
    cache = target.new_cache(len(prompts), max(lengths) + count)
    logits = target.forward(ids, cache, counts=lengths, want_taps=False, logits_for="last").logits
    for _ in range(count - 1):
        logits = target.forward(
            logits[:, -1].max(-1).indices[:, None], cache, want_taps=False, logits_for="last"
        ).logits
    return len(prompts) * count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
