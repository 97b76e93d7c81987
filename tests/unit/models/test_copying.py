"""A new drafter copies: what followed a token last time gets the largest logit, before any training."""

import math

import pytest
import torch

from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts, split_held_out
from specdraft.data.vocab import VocabMap
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.trace import conditional_acceptance
from specdraft.models import copying
from specdraft.models.copying import canonical, covariance, init_copying, slow_dims
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import TINY_VOCAB, tiny_target

VOCAB = TINY_VOCAB
KEPT = torch.arange(0, VOCAB, 2)  # of a trimmed head


@pytest.fixture(scope="module")
def target():
    return tiny_target(hidden=256, layers=8, tap_layers=(0, 4, 5))


def states(target, ids):
    """ids [B, T] -> taps [B, T, A*H], last states [B, T, H]"""
    features = target.features(ids, torch.full((len(ids),), ids.shape[1]))
    return features.taps.float(), features.last.float()


def new(target, kind, *, is_copying, **flags):
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (128, 64))
    taps, last = states(target, ids)
    vocab = VocabMap(KEPT, VOCAB) if kind == "trimmed" else None
    rank = 64 if kind == "lowrank" else None
    drafter = new_drafter(target, DrafterConfig(**flags), HeadConfig(kind, rank), vocab, last.flatten(0, 1))
    if is_copying:
        init_copying(drafter, taps.flatten(0, 1), ids.flatten())
    return drafter


def copied(target, drafter, steps=2):
    """Of random tokens that come twice, the shares whose follower is drafted at their second coming, by step of the unroll; tokens that a
    trimmed head has not are left out."""
    half = torch.stack([torch.randperm(VOCAB - 3)[:40] + 3 for _ in range(8)])
    ids = torch.cat([half, half], dim=1)
    taps, _ = states(target, ids)
    rows = torch.arange(42, 76).expand(8, -1)
    with torch.no_grad():
        logits = drafter.lm_head.logits(drafter.unroll(taps, ids, rows, steps))
    drafted = logits.argmax(-1) if drafter.lm_head.vocab_map is None else drafter.lm_head.ids[logits.argmax(-1)]
    truth = torch.stack([ids.gather(1, rows + 2 + step) for step in range(steps)])
    counts = (
        torch.isin(truth, KEPT) if drafter.lm_head.vocab_map is not None else torch.ones_like(truth, dtype=torch.bool)
    )
    return [float((drafted == truth)[k][counts[k]].float().mean()) for k in range(steps)]


@pytest.mark.parametrize("kind", ["full", "trimmed", "lowrank"])
def test_a_new_drafter_copies(target, kind):
    before = copied(target, new(target, kind, is_copying=False))
    after = copied(target, new(target, kind, is_copying=True))
    assert max(before) < 0.1
    assert after[0] > 0.9
    assert after[1] > 0.3


@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc", "norm_before_residual"])
def test_whatever_is_normed(target, flag):
    """Beside random weights: the target's last layer makes states of the size of its own, which the normed ones have not."""
    flags = {"body_init": "random", flag: True}
    assert copied(target, new(target, "lowrank", is_copying=True, **flags))[0] > 0.9


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("tokens", [[5] * 9, [5], list(range(3, 40))])
def test_little_text_and_few_numbers_make_finite_weights(family, tokens):
    """Heads of 8 numbers, one or two of whose pairs turn slowly; text of one token, and of one row."""
    small = tiny_target(family)
    torch.manual_seed(0)
    drafter = new_drafter(small, DrafterConfig(), HeadConfig("full"))
    ids = torch.tensor([tokens])
    init_copying(drafter, states(small, ids)[0][0], ids[0])
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())


def test_the_other_heads_stay(target):
    """And the MLP, the norms and the draft head."""
    old, changed = new(target, "lowrank", is_copying=False), new(target, "lowrank", is_copying=True)
    d, group = old.config.head_dim, old.config.num_attention_heads // old.config.num_key_value_heads
    first = {"q_proj": (0, group * d), "k_proj": (0, d), "v_proj": (0, d), "o_proj": (1, group * d)}
    for (name, before), after in zip(old.state_dict().items(), changed.state_dict().values(), strict=True):
        part = next((part for part in first if part in name), None)
        if name == "fc.weight":
            assert torch.equal(before[:, old.config.hidden_size :], after[:, old.config.hidden_size :])
        elif part is None:
            assert torch.equal(before, after), name
        else:
            axis, count = first[part]
            rest = before.shape[axis] - count
            assert torch.equal(before.narrow(axis, count, rest), after.narrow(axis, count, rest)), name
            assert not torch.equal(before.narrow(axis, 0, count), after.narrow(axis, 0, count)), name


def test_canonical_directions():
    """Two views of three shared causes: three correlations are large; all columns are white, and correlated in pairs alone."""
    torch.manual_seed(0)
    cause = torch.randn(4000, 3)
    left, right = (
        torch.cat([cause, torch.randn(4000, 5)], 1) @ torch.linalg.qr(torch.randn(8, 8))[0] + 3 for _ in range(2)
    )
    weights = torch.rand(4000) + 0.1
    a, b, c = canonical(left, right, weights)
    assert c[2] > 0.8
    assert c[3] < 0.2
    weights = weights / weights.sum()
    x, y = ((part - weights @ part) @ by for part, by in ((left, a), (right, b)))
    torch.testing.assert_close(covariance(x, x, weights), torch.eye(8).double(), atol=0.2, rtol=0)  # but for the ridge
    torch.testing.assert_close(covariance(x, y, weights), torch.diag(c).double(), atol=0.01, rtol=0)


def test_slow_pairs(target):
    """Their angle at REACH is below 1 radian, slowest first, both numbers of a pair."""
    drafter = new(target, "full", is_copying=False)
    theta, d = drafter.config.rope_parameters["rope_theta"], drafter.config.head_dim
    expected = [i for i in range(d // 2) if copying.REACH * theta ** (-2 * i / d) < 1]
    assert slow_dims(drafter).tolist() == [dim for i in reversed(expected) for dim in (i, i + d // 2)]
    assert math.isclose(len(expected), d / 4, abs_tol=d / 8)


@pytest.mark.real
def test_a_new_drafter_of_the_default_target_is_accepted():
    """Before any training, with a low-rank head fitted on nothing but prompts: a tenth of its first drafts, and the target's own output."""
    target = TargetModel.load("default", dtype=torch.float32)
    train, held_out = split_held_out(builtin_prompts())
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in (*train[:96:2], *held_out[:4])]
    *texts, a, b, c, d = (torch.tensor([render_prompt(target.tokenizer, chat)]) for chat in chats)
    read = [states(target, text) for text in texts]
    torch.manual_seed(0)
    drafter = new_drafter(
        target, DrafterConfig(), HeadConfig("lowrank"), None, torch.cat([last[0] for _, last in read])
    )
    init_copying(drafter, torch.cat([taps[0] for taps, _ in read]), torch.cat([text[0] for text in texts]))
    traces = []
    for prompt in (a, b, c, d):
        output = speculative_generate(target, drafter.eval(), prompt, max_new_tokens=48, length_policy=Fixed(2))
        assert output.tokens == autoregressive_generate(target, prompt, max_new_tokens=48).tokens
        traces.append(output.trace)
    assert conditional_acceptance(traces)[0] > 0.1
