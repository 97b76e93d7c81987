"""Train an EAGLE-3 drafter with a low-rank head (SlimSpec, arXiv 2605.10453) and measure its speedup.

accelerate launch recipes/train_slimspec.py                                    # the default target, half an hour on two cores
accelerate launch recipes/train_slimspec.py --target org/model --head.rank 512
accelerate launch recipes/train_slimspec.py --config recipes/configs/smollm2_slimspec_2h.yaml
"""

from dataclasses import dataclass, field

from specdraft.config import run_program
from specdraft.models.heads import HeadConfig
from specdraft.pipeline import RunConfig, run


@dataclass
class SlimSpecConfig(RunConfig):
    name: str = "slimspec"
    head: HeadConfig = field(default_factory=lambda: HeadConfig(kind="lowrank"))


if __name__ == "__main__":
    run_program(run, SlimSpecConfig)
