"""Small targets for the export tests: a plain one, and one whose vocabulary is padded."""

import pytest
from small_drafters import PADDED

from specdraft.models.target import TargetModel
from specdraft.testing import TINY_VOCAB, tiny_model, tiny_tokenizer


@pytest.fixture(scope="package")
def target():
    return TargetModel.from_model(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="package")
def padded_target():
    """12 rows of its embedding are no tokens."""
    target = TargetModel.from_model(tiny_model(vocab=PADDED), tiny_tokenizer())
    assert target.vocab_size == TINY_VOCAB < target.hf_config.vocab_size
    return target
