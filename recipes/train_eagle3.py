"""Train an EAGLE-3 drafter with a trimmed or a full head and measure its speedup.

accelerate launch recipes/train_eagle3.py                                      # the 8,192 tokens that the target writes most
accelerate launch recipes/train_eagle3.py --head.kind trimmed --head.vocab runs/x/vocab.safetensors
accelerate launch recipes/train_eagle3.py --head.kind full --name eagle3-full
"""

from dataclasses import dataclass, field

from specdraft.config import run_program
from specdraft.models.heads import HeadConfig
from specdraft.pipeline import RunConfig, run


@dataclass
class Eagle3RunConfig(RunConfig):
    name: str = "eagle3"
    head: HeadConfig = field(default_factory=lambda: HeadConfig(kind="trimmed"))


if __name__ == "__main__":
    run_program(run, Eagle3RunConfig)
