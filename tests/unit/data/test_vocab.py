import time

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdraft.config import UserError
from specdraft.data.chat import Example
from specdraft.data.vocab import (
    BYTE_FALLBACK,
    VocabMap,
    count_tokens,
    coverage,
    require_same_map,
    require_tokens,
    required_ids,
)
from specdraft.testing import tiny_tokenizer

COUNTS = torch.tensor([5, 0, 7, 5, 1, 0, 9, 2])


def test_from_counts_orders_by_count_then_id():
    vocab = VocabMap.from_counts(COUNTS, size=5)
    assert vocab.target_ids.tolist() == [6, 2, 0, 3, 7]
    assert vocab.offsets.tolist() == [6, 1, -2, 0, 3]
    assert vocab.draft_index.tolist() == [2, -1, 1, 3, -1, -1, 0, 4]


def test_required_ids_are_in_and_padded_rows_are_not():
    """Faults 12 and 16. Ids 6 and 7 stand for padded rows of the head, 5 for an end-of-turn token never seen."""
    vocab = VocabMap.from_counts(COUNTS, size=4, always=[5, 3], valid=6)
    assert vocab.target_ids.tolist() == [2, 0, 3, 5]
    full = VocabMap.from_counts(COUNTS, size=6, valid=6)
    assert sorted(full.target_ids.tolist()) == [0, 1, 2, 3, 4, 5]
    assert full.vocab_size == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 9}, "got 9, allowed: 1 .* to 8"),
        ({"size": 7, "valid": 6}, "got 7, allowed: 1 .* to 6"),
        ({"size": 2, "always": [1, 4, 5]}, "got 2, allowed: 3"),
        ({"size": 0}, "got 0"),
        ({"size": 4, "always": [7], "valid": 6}, "required ids"),
    ],
)
def test_from_counts_refuses(options, message):
    with pytest.raises(UserError, match=message):
        VocabMap.from_counts(COUNTS, **options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 2, 1]), "1 of 3 target ids are repeated"),
        (torch.tensor([1, 8]), "from 1 to 8, allowed: 0 to 7"),
        (torch.tensor([-1, 3]), "from -1 to 3"),
        (torch.tensor([], dtype=torch.int64), "no ids"),
        (torch.tensor([1.0]), "float32"),
    ],
)
def test_bad_ids_are_refused(ids, message):
    """Fault 14."""
    with pytest.raises(UserError, match=message):
        VocabMap(ids, 8)


def test_round_trip_through_the_offsets_keeps_any_order(tmp_path):
    """Faults 10 and 15: ids are gathered through d2t; ascending order is not assumed."""
    vocab = VocabMap(torch.tensor([6, 2, 0, 3]), 8)
    vocab.save(tmp_path / "vocab.safetensors")
    loaded = VocabMap.load(tmp_path / "vocab.safetensors")
    assert loaded.target_ids.tolist() == [6, 2, 0, 3]
    assert loaded == vocab
    assert loaded.hash == vocab.hash
    assert vocab.tensors()["t2d"].tolist() == [True, False, True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"t2d": torch.tensor([True, True])}, "expected d2t and t2d"),
        ({"d2t": torch.tensor([0, 0])}, "expected d2t and t2d"),
        ({"d2t": torch.tensor([0, 0]), "t2d": torch.tensor([True, False, True])}, "disagree about 2 of 3"),
        ({"d2t": torch.tensor([0, -1]), "t2d": torch.tensor([True, False])}, "repeated"),
        ({"d2t": torch.tensor([0, 7]), "t2d": torch.tensor([True, False])}, "allowed: 0 to 1"),
        ({"d2t": torch.tensor([0, 0]), "t2d": torch.tensor([1, 1])}, "t2d bool"),
    ],
)
def test_broken_files_are_refused(tmp_path, tensors, message):
    """Fault 14: d2t missing, zero, out of range, not unique, or at odds with t2d."""
    save_file(tensors, tmp_path / "vocab.safetensors")
    with pytest.raises(UserError, match=message):
        VocabMap.load(tmp_path / "vocab.safetensors")


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        VocabMap.load(tmp_path / "vocab.safetensors")
    (tmp_path / "text").write_text("not a tensor")
    with pytest.raises(UserError, match="not a safetensors file"):
        VocabMap.load(tmp_path / "text")


def test_another_map_of_the_same_size_is_refused():
    """Fault 18: order matters as much as membership."""
    vocab, swapped = VocabMap(torch.tensor([3, 5]), 8), VocabMap(torch.tensor([5, 3]), 8)
    require_same_map(vocab, VocabMap(torch.tensor([3, 5]), 8), "warm start")
    for other in (swapped, VocabMap(torch.tensor([3, 6]), 8), VocabMap(torch.tensor([3, 5]), 9)):
        with pytest.raises(UserError, match=f"{other.hash}.*{vocab.hash}"):
            require_same_map(vocab, other, "warm start")


def test_identity():
    assert VocabMap.identity(8).is_identity
    assert not VocabMap(torch.tensor([1, 0]), 2).is_identity
    assert not VocabMap(torch.tensor([0]), 2).is_identity


def test_counts_are_of_answers_only_and_coverage_is_their_share():
    ids, mask = torch.tensor([3, 3, 3, 4, 4, 5]), torch.tensor([False, False, False, True, True, True])
    counts = count_tokens([Example("a", ids, mask), Example("b", ids, mask)], 8)
    assert counts.tolist() == [0, 0, 0, 0, 4, 2, 0, 0]
    assert coverage(counts, VocabMap(torch.tensor([4, 3]), 8)) == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="got token id 5, allowed: 0 to 4"):
        count_tokens([Example("a", ids, mask)], 5)


def test_required_ids_of_a_byte_level_chat_tokenizer():
    """Fault 16: end ids, template tokens and bytes are in."""
    tokenizer = tiny_tokenizer()
    ids = required_ids(tokenizer, eos_token_ids=[0, 2])
    assert {0, 1, 2} <= set(ids)
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    assert set(header) <= set(ids)
    assert len([i for i in ids if len(tokenizer.convert_ids_to_tokens(i)) == 1]) == 256
    assert len(ids) < len(tokenizer)


def test_required_ids_of_a_byte_fallback_tokenizer_without_a_template():
    """Fault 16: SentencePiece's byte tokens are in, GPT-2's alphabet, ordinary characters there, is not; and ids that only the
    tokenizer knows are out (Gemma-3's image token has no row in a text model)."""
    table = {token: i for i, token in enumerate(["<pad>", "<eos>", "a", "Ġ", *BYTE_FALLBACK, "<image>"])}
    backend = Tokenizer(models.BPE(vocab=table, merges=[], byte_fallback=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.chat_template is None
    assert required_ids(tokenizer, [1], vocab_size=260) == [0, 1, *range(4, 260)]
    assert required_ids(tokenizer, [1])[-1] == 260


def test_required_tokens_of_a_given_map():
    """Fault 16: a map without one of the end ids is refused, by name and hash."""
    vocab = VocabMap(torch.tensor([3, 5]), 8)
    require_tokens(vocab, [3, 5], "head.vocab x")
    with pytest.raises(
        UserError, match=rf"head.vocab x: .*end-of-turn ids \[2\] are not in vocabulary map {vocab.hash}"
    ):
        require_tokens(vocab, [3, 2], "head.vocab x")


def test_a_map_and_no_map_are_different():
    """Fault 18: a full head's rows are not a trimmed head's."""
    vocab = VocabMap(torch.tensor([3, 5]), 8)
    require_same_map(None, None, "warm start")
    with pytest.raises(UserError, match=f"got vocabulary map none.*expected {vocab.hash}"):
        require_same_map(vocab, None, "warm start")
    with pytest.raises(UserError, match=f"got vocabulary map {vocab.hash}.*expected none"):
        require_same_map(None, vocab, "warm start")


def test_a_large_map_is_made_in_linear_time():
    """V = 262,144, half of it kept: one look at each token takes milliseconds, a search for each would take hours."""
    counts = torch.randint(0, 1000, (262144,), generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    vocab = VocabMap.from_counts(counts, 131072, always=range(300))
    assert VocabMap.from_tensors(vocab.tensors(), 262144) == vocab
    assert time.process_time() - start < 20
    others = vocab.target_ids[vocab.target_ids >= 300]
    keys = counts[others] * 262144 - others
    assert torch.all(keys.diff() < 0), "by falling count, then by id"
