"""answers.jsonl (or conversations) -> the target's hidden states on disk, for training without running the target.

python data_prep/extract_hidden_states.py --data answers.jsonl --output states --target org/model
torchrun --nproc-per-node 8 data_prep/extract_hidden_states.py ...      # every rank its share

Interrupt it at will: the same command goes on after the last whole file, also with another number of ranks. OUTPUT also
gets `answers.jsonl`, the sequences that the states belong to (cut to max_length): train on those.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from specdraft.config import run_program
from specdraft.data.chat import AnswerRow, check_masks, read_examples
from specdraft.data.shards import ShardConfig, extract
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path


@dataclass
class ExtractConfig:
    """data: answers.jsonl, or a JSONL file of conversations ({"messages": [...]}).   output: a folder.   tap_layers: None =
    (2, L//2, L-3).   max_length: tokens kept of every sequence.   device: `cuda` takes one GPU for each rank."""

    data: Path = Path("answers.jsonl")
    output: Path = Path("states")
    target: str = "default"
    tap_layers: tuple[int, ...] | None = None
    max_length: int = 1024
    device: str = "cpu"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    shards: ShardConfig = field(default_factory=ShardConfig)


def main(config: ExtractConfig) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if config.device == "cuda" else config.device
    target = TargetModel.load(
        config.target, dtype=getattr(torch, config.dtype), device=device, tap_layers=config.tap_layers
    )
    examples, account = read_examples(config.data, target.tokenizer, config.max_length)
    print(f"{config.data}: {account}")
    check_masks(examples, target.tokenizer)
    account = extract(target, examples, config.output, config.max_length, config.shards, rank, world)
    print(f"{config.output}: rank {rank} of {world}, {account}")
    if rank == 0:
        with atomic_path(config.output / "answers.jsonl") as temporary, open(temporary, "w", encoding="utf-8") as file:
            for example in examples:
                file.write(AnswerRow.from_example(example, "data", target.eos_token_ids).to_json() + "\n")


if __name__ == "__main__":
    run_program(main, ExtractConfig)
