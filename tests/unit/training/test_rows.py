"""Which rows are supervised, against a literal reading of the rule in O(T * K)."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from specdraft.training.objective import Rows, denominators, row_shares, supervised_counts, supervised_steps


def literal_rule(mask: list[bool], steps: int) -> set[tuple[int, int]]:
    """(i, k): label x[i+2+k] in an answer, and every token x[i+1..i+1+k] too, all of them existing."""
    found = set()
    for i in range(len(mask)):
        for k in range(steps):
            label = i + 2 + k
            if label < len(mask) and mask[label] and all(mask[t] for t in range(i + 1, label)):
                found.add((i, k))
    return found


MASKS = {
    "one answer": "..aaaa",
    "two turns": "...aaaa..aaa.",
    "cut before its end": "..aaa.....aaaaaaa",
    "one token answers": "..a..a.aa",
    "answer from the start": "aaaa..aa",
    "nothing": "......",
    "everything": "aaaaaaa",
    "single token": "a",
}


def as_mask(text: str) -> torch.Tensor:
    return torch.tensor([c == "a" for c in text])


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
@pytest.mark.parametrize("name", MASKS)
def test_rule(name, steps):
    """Fault 20."""
    mask = as_mask(MASKS[name])
    depth = supervised_steps(mask[None], steps)[0]
    got = {(i, k) for i, n in enumerate(depth.tolist()) for k in range(n)}
    assert got == literal_rule(mask.tolist(), steps)


def test_first_drafted_token_is_trained():
    """Fault 20: the row of the prompt's last token drafts the answer's second token; no row predicts the first, which the
    target's prefill gives; and none reads a prompt token."""
    rows = Rows.from_masks([as_mask("...aaa.")], 2)
    assert rows.index.tolist() == [[2, 3]]
    assert rows.label_at.tolist() == [4, 5]
    assert rows.teacher_at.tolist() == [3, 4]
    assert rows.valid.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_packed_rows_of_a_batch(steps):
    """Every supervised (sequence, i, k) once, with its own label and teacher place; padding is never supervised."""
    masks = [as_mask(text) for text in MASKS.values()]
    rows = Rows.from_masks(masks, steps)
    length = max(map(len, masks))
    got = set()
    for n in range(rows.valid.shape[1]):
        b, m = divmod(int(rows.slot[n]), rows.index.shape[1])
        assert b == rows.sequence[n]
        i = int(rows.index[b, m])
        for k in range(steps):
            if rows.valid[k, n]:
                got.add((b, i, k))
                assert rows.shifted(rows.label_at)[k, n] == b * length + i + 2 + k
                assert rows.shifted(rows.teacher_at)[k, n] == b * length + i + 1 + k
    assert got == {(b, i, k) for b, mask in enumerate(masks) for i, k in literal_rule(mask.tolist(), steps)}


def test_random_masks():
    """Fault 20, on masks that nobody chose."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(length, generator=generator) < 0.7 for length in range(1, 40)]
    depth = supervised_steps(pad_sequence(masks, batch_first=True), 4)
    for b, mask in enumerate(masks):
        got = {(i, k) for i, n in enumerate(depth[b].tolist()) for k in range(n)}
        assert got == literal_rule(mask.tolist(), 4)
    counts = supervised_counts(masks, 4)
    expected = [[sum(k == step for _, k in literal_rule(mask.tolist(), 4)) for step in range(4)] for mask in masks]
    assert counts.tolist() == expected


def test_shares_sum_to_one_over_micro_batches():
    """Fault 21: over all micro-batches each step's shares sum to 1, whatever way the sequences are split."""
    masks = [as_mask(text) for text in ("..aaaa", "..aa......", "aaaaaaaaa..aa", ".aaa", ".aaaaaaaaaaaa")]
    counts = supervised_counts(masks, 3)
    for mean in ("rows", "sequences"):
        share = denominators(counts, mean)
        for split in ([masks], [masks[:1], masks[1:]], [masks[:2], masks[2:4], masks[4:]]):
            total = sum(row_shares(Rows.from_masks(part, 3), share, mean).sum(1) for part in split)
            torch.testing.assert_close(total, torch.ones(3))


def test_sequence_mean_weighs_sequences_alike():
    masks = [as_mask("..aaaa"), as_mask("aaaaaaaaaaaaaaa")]
    rows = Rows.from_masks(masks, 1)
    shares = row_shares(rows, denominators(supervised_counts(masks, 1), "sequences"), "sequences")
    for b in range(2):
        assert shares[0, rows.sequence == b].sum() == pytest.approx(0.5)
