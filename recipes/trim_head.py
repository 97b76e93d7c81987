"""Cut the head of a trained full-vocabulary drafter (full or low-rank) to a vocabulary map, without training (FR-Spec, VocabTrim).

python recipes/trim_head.py --drafter runs/eagle3-full/drafter --vocab vocab.safetensors --output runs/trimmed/drafter

The result is a drafter folder like any other: measure it, export it, or train it further (--warm-start, for a trimmed head).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from specdraft.config import UserError, config_to_dict, run_program
from specdraft.data.vocab import VocabMap, require_tokens
from specdraft.export.folder import require_replaceable
from specdraft.models.checkpoint import load_drafter, read_config, read_taps, save_drafter
from specdraft.models.initialise import trimmed_copy
from specdraft.models.target import TargetModel


@dataclass
class TrimConfig:
    """drafter: folder with a head over all tokens.   vocab: see data_prep/build_vocab.py.   output: folder to write."""

    drafter: Path = Path("runs/eagle3-full/drafter")
    vocab: Path = Path("vocab.safetensors")
    output: Path = Path("runs/trimmed/drafter")
    target: str = "default"


def main(config: TrimConfig) -> None:
    if config.output.resolve() == config.drafter.resolve():
        raise UserError(f"output: got the drafter's own folder {config.output}; give another")
    require_replaceable(config.output)
    vocab = VocabMap.load(config.vocab)
    dtype = getattr(torch, read_config(config.drafter)["dtype"])
    target = TargetModel.load(config.target, tap_layers=read_taps(config.drafter))
    if vocab.vocab_size != target.vocab_size:
        raise UserError(
            f"vocab {config.vocab}: made for {vocab.vocab_size} tokens, the target has {target.vocab_size}; build it again"
        )
    require_tokens(vocab, target.eos_token_ids, str(config.vocab))
    drafter = trimmed_copy(load_drafter(config.drafter, target, dtype), vocab)
    card = (
        f"# EAGLE-3 drafter for {target.name}\n\nThe drafter {config.drafter}, its {drafter.config.head.kind} head cut to {len(vocab)} "
        f"of {vocab.vocab_size} tokens (map {vocab.hash}) without training. Not measured yet.\n"
    )
    save_drafter(config.output, drafter, target, card, config_to_dict(config), dtype)
    shape = " x ".join(f"{n:,}" for n in drafter.lm_head.weight.shape)
    print(f"{config.output}: {drafter.config.head.kind} head of {shape}, map {vocab.hash}")


if __name__ == "__main__":
    run_program(main, TrimConfig)
