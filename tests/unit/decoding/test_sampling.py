"""Laws equal transformers' logits processors; draws follow the law and the seed."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdraft.config import UserError
from specdraft.decoding.sampling import Sampling, draw, greedy


def logits(shape=(5, 300), seed=0, dtype=torch.float32):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_law_equals_transformers(temperature, top_k, top_p):
    scores = TemperatureLogitsWarper(temperature)(None, logits())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    law = Sampling(temperature, top_k, top_p).law(logits())
    torch.testing.assert_close(law, scores.softmax(-1), atol=1e-6, rtol=1e-5)
    assert (law.count_nonzero(-1) >= 1).all()


@pytest.mark.parametrize(("given", "law"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_law_is_made_in_fp32_or_better(given, law, temperature):
    made = Sampling(temperature).law(logits(dtype=given))
    assert made.dtype == law
    torch.testing.assert_close(made.sum(-1), torch.ones(5, dtype=law))


def test_greedy_is_a_point_mass_on_the_first_largest():
    tied = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    for dtype in (torch.bfloat16, torch.float32):
        assert greedy(tied.to(dtype)).tolist() == [1]
        assert Sampling().law(tied.to(dtype)).tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_greedy_breaks_ties_alike_for_any_number_of_rows(rows):
    """In bf16 ties are common: one row alone and k+1 rows must choose the same token."""
    coarse = logits((1, 49_152), dtype=torch.bfloat16).clamp_(max=8)
    assert (coarse == coarse.max()).sum() > 10
    assert (
        greedy(coarse.expand(rows, -1).contiguous()).tolist() == [int((coarse == coarse.max())[0].nonzero()[0])] * rows
    )


def test_choose_gives_the_law_that_was_drawn_from():
    """Fault 33: the q of the ratio is the q sampled from."""
    sampling = Sampling(0.7, top_k=5, top_p=0.9)
    column, law, _ = sampling.choose(logits((1, 300)), torch.Generator().manual_seed(3))
    assert torch.equal(law, sampling.law(logits((1, 300)))[0])
    assert torch.equal(column, draw(law, torch.Generator().manual_seed(3)))
    assert law[column] > 0


def test_choose_at_temperature_0_is_deterministic_and_makes_no_law():
    column, law, _ = Sampling().choose(logits((1, 300)))
    assert column.tolist() == logits((1, 300)).argmax(-1).tolist()
    assert law is None


def test_draws_follow_the_law():
    law = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.cat([draw(law, generator) for _ in range(4000)]), minlength=6)
    assert counts[law == 0].sum() == 0
    expected = 4000 * law[law > 0]
    chi_square = ((counts[law > 0] - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # 0.1 % of a chi-square of 2 degrees


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_draw_tokens_of_positive_probability(monkeypatch, u):
    monkeypatch.setattr("specdraft.decoding.sampling.uniform", lambda generator: u)
    law = torch.tensor([0.0, 0.1, 0.0, 0.3, 0.0])
    assert draw(law).tolist() == [1 if u == 0 else 3]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1,), "temperature"),
        ((float("nan"),), "temperature"),
        ((1, -1), "top_k"),
        ((1, 0, 0.0), "top_p"),
        ((1, 0, 1.1), "top_p"),
    ],
)
def test_values_outside_their_range_are_refused(arguments, name):
    with pytest.raises(UserError, match=f"^{name}: got .*allowed"):
        Sampling(*arguments)
