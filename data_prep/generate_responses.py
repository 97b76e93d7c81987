"""prompts.jsonl -> answers.jsonl: the target answers every prompt. Interrupt it at will: the same command goes on.

python data_prep/generate_responses.py --prompts prompts.jsonl --answers answers.jsonl --target org/model
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from specdraft.config import UserError, run_program
from specdraft.data.tasks import read_prompts
from specdraft.decoding.answers import AnswerConfig, answer_prompts, estimate_answers
from specdraft.models.target import TargetModel


@dataclass
class ResponsesConfig:
    """prompts: JSONL file (see make_prompts.py).   answers: file to write.   max_prompts: the first n of them; None = all."""

    prompts: Path = Path("prompts.jsonl")
    answers: Path = Path("answers.jsonl")
    target: str = "default"
    max_prompts: int | None = None
    device: str = "cpu"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    generate: AnswerConfig = field(default_factory=AnswerConfig)

    def __post_init__(self) -> None:
        if self.max_prompts is not None and self.max_prompts < 1:
            raise UserError(f"max_prompts: got {self.max_prompts}, allowed: 1 or more")


def main(config: ResponsesConfig) -> None:
    prompts = read_prompts(config.prompts)[: config.max_prompts]
    target = TargetModel.load(config.target, dtype=getattr(torch, config.dtype), device=config.device)
    print(estimate_answers(target, prompts, config.generate, config.answers))
    rows = answer_prompts(target, prompts, config.answers, config.generate)
    tokens = sum(end - start for row in rows for start, end in row.spans)
    finished = sum(row.finished[-1] for row in rows)
    print(f"{config.answers}: {len(rows)} conversations, {tokens:,} answer tokens, {finished} ended by themselves")


if __name__ == "__main__":
    run_program(main, ResponsesConfig)
