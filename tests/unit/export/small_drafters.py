"""Small drafters for the export tests: every head, every norm flag."""

import torch

from specdraft.data.vocab import VocabMap
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.testing import TINY_VOCAB

PADDED = TINY_VOCAB + 12
RANK, TRIMMED = 6, 100


def make_drafter(target, kind="lowrank", **flags):
    """A drafter with random weights, so that every tensor matters. A trimmed one has its draft ids in no order at all."""
    torch.manual_seed(1)
    vocab_map = VocabMap(torch.randperm(TINY_VOCAB)[:TRIMMED], TINY_VOCAB) if kind == "trimmed" else None
    head = HeadConfig(kind, rank=RANK, init="random")
    drafter = new_drafter(target, DrafterConfig(body_init="random", **flags), head, vocab_map)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return drafter.eval()
