"""The target drafting for itself on a sparse cache (papers 5): what it attends to, that it stays lossless whatever that is, and
that its weights and laws are those of transformers' own eager attention."""

import functools

import pytest
import torch
from test_lossless import chi_square, law_of_three
from transformers import AttentionInterface

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policies import EntropyController, Fixed, Svip
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.trace import conditional_acceptance, tau
from specdraft.decoding.vocab_policies import FrequencyList
from specdraft.models import sparse_self
from specdraft.models.sparse_self import Importance, SparseSelfConfig, SparseSelfDrafter, choose_positions
from specdraft.models.target import TargetModel
from specdraft.provenance import machine
from specdraft.testing import tiny_model, tiny_target

PATHS = [("llama", True), ("llama", False), ("qwen3", False), ("gemma3", False), ("gemma2", False)]
NAMES = [f"{family}-{'lean' if lean else 'generic'}" for family, lean in PATHS]
PROMPT = torch.randint(3, 300, (45,), generator=torch.Generator().manual_seed(0)).tolist()
SMALL = SparseSelfConfig(budget=0.13, sinks=2, recent=2, queries=5, longest=6)  # 6 of 45; of 7 that a window shows
WIDE = SparseSelfConfig(budget=0.3, sinks=2, recent=4, queries=5, longest=6)


@functools.cache
def target_of(family: str, lean: bool) -> TargetModel:
    """fp64: sums in another order never change an argmax. Gemma's sliding windows are 8 positions; the last layer sees all."""
    return tiny_target(
        family, layers={"gemma3": 6, "gemma2": 2}.get(family, 3), dtype=torch.float64, lean=lean, tap_layers=(0, 1)
    )


@pytest.fixture(params=PATHS, ids=NAMES)
def target(request):
    return target_of(*request.param)


def started(target, config=SMALL, prompt=PROMPT):
    """A drafter after its prefill, as the decode loop does it: the drafter, the target's cache, the committed tokens."""
    drafter = SparseSelfDrafter(target, config)
    cache = target.new_cache(1, 200)
    step = target.forward(torch.tensor([prompt]), cache, logits_for="last")
    tokens = [*prompt, int(step.logits[0, 0].argmax())]
    drafter.prefill(step.taps, torch.tensor([tokens]))
    return drafter, cache, tokens


def verify(target, drafter, cache, tokens, drafted, accepted):
    """One verification of `drafted`, of which the first `accepted` are kept whatever the target says."""
    logits = target.forward(torch.tensor([[tokens[-1], *drafted]]), cache).logits[0]
    new = [*drafted[:accepted], int(logits[accepted].argmax())]
    cache.crop(len(tokens) + accepted)
    drafter.observe(torch.tensor(new), torch.empty(1, len(new), 0))
    tokens += new


# --- lossless, whatever the index ---


@pytest.mark.parametrize("drafted", [1, 6])
def test_on_all_positions_everything_is_accepted(target, drafted):
    drafter = SparseSelfDrafter(target, SparseSelfConfig(budget=1.0, longest=6))
    output = speculative_generate(target, drafter, PROMPT, max_new_tokens=29, length_policy=Fixed(drafted))
    assert output.tokens == autoregressive_generate(target, PROMPT, max_new_tokens=29).tokens
    assert set(conditional_acceptance([output.trace])) == {1.0}
    if len(output.tokens) == 29:
        assert tau([output.trace]) == drafted + 1


def test_on_all_positions_every_sample_is_accepted():
    """T = 1: p and q are one law, up to rounding."""
    target = target_of("llama", True)
    output = speculative_generate(
        target,
        SparseSelfDrafter(target, SparseSelfConfig(budget=1.0)),
        PROMPT,
        max_new_tokens=40,
        temperature=1.0,
        generator=torch.Generator().manual_seed(3),
    )
    assert set(conditional_acceptance([output.trace])) == {1.0}


def nothing(mass, count, sinks, tail, first=0):
    return torch.empty(len(mass), 0, dtype=torch.int64)


def least_attended(mass, count, sinks, tail, first=0):
    seen = mass[:, first:]
    return seen.topk(min(count, seen.shape[1]), largest=False).indices + first


def the_same_one_many_times(mass, count, sinks, tail, first=0):
    return torch.full((len(mass), min(count, mass.shape[1] - first)), first)


@pytest.mark.parametrize("choice", [choose_positions, nothing, least_attended, the_same_one_many_times])
@pytest.mark.parametrize("drafted", [1, 6])
def test_any_index_gives_the_same_output(target, choice, drafted, monkeypatch):
    monkeypatch.setattr(sparse_self, "choose_positions", choice)
    drafter = SparseSelfDrafter(target, SMALL)
    output = speculative_generate(target, drafter, PROMPT, max_new_tokens=18, length_policy=Fixed(drafted))
    assert output.tokens == autoregressive_generate(target, PROMPT, max_new_tokens=18).tokens
    if choice is nothing:
        assert tau([output.trace]) < drafted + 1  # the index matters


def test_short_prompts_and_long_drafts():
    """Fewer tokens than sinks, recent ones and queries; drafts longer than the buffers are made for."""
    target = target_of("gemma3", False)
    nearly_none = SparseSelfConfig(budget=0, sinks=0, recent=0, longest=3)
    for prompt, config in (([7], nearly_none), ([5, 9, 200], SMALL)):
        drafter = SparseSelfDrafter(target, config)
        output = speculative_generate(target, drafter, prompt, max_new_tokens=20, length_policy=Fixed(9))
        assert output.tokens == autoregressive_generate(target, prompt, max_new_tokens=20).tokens
        assert max(r.drafted for r in output.trace.rounds) == config.longest


def test_the_law_of_sampled_outputs():
    """Chi-square over outputs of three tokens, the first of four, so that two are drafted at once; the index leaves most of the
    prompt out."""
    target = tiny_target(vocab=6, hidden=16, layers=3, tap_layers=(0, 1, 2))
    target.eos_token_ids = ()
    prompt, sampling, total = [3, 1, 4, 1, 5, 0, 2, 4, 3, 3, 5, 1], Sampling(1.0), 300
    drafter = SparseSelfDrafter(target, SparseSelfConfig(budget=0.3, sinks=1, recent=1, queries=2, longest=2))
    law = law_of_three(target, prompt, sampling)
    generator, counts, traces = torch.Generator().manual_seed(0), {}, []
    for _ in range(total):
        output = speculative_generate(
            target,
            drafter,
            prompt,
            max_new_tokens=4,
            temperature=1.0,
            length_policy=Fixed(2),
            generator=generator,
        )
        key = tuple(output.tokens[:3])
        counts[key] = counts.get(key, 0) + 1
        traces.append(output.trace)
    statistic, degrees = chi_square(counts, law, total)
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5 + 4
    assert all(0.05 < alpha < 0.98 for alpha in conditional_acceptance(traces))
    assert len(conditional_acceptance(traces)) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_length_policies_and_all_that_was_drafted_is_verified(temperature):
    """The controller of the paper, and one that stops early: what stands in a round is what the drafter gave."""
    target = target_of("llama", True)
    costs = CostTable([0.01 * k for k in range(7)], [1.0] * 7, [0.0] * 7, 1.0, "tiny", "float64", machine())
    for policy in (EntropyController(costs), Svip(threshold=0.7)):
        drafter, proposed, verified = SparseSelfDrafter(target, SMALL), [], []
        propose, forward = drafter.propose, target.forward

        def counted(*args, propose=propose, proposed=proposed):
            proposal = propose(*args)
            proposed.append(len(proposal.parents))
            return proposal

        def watched(ids, cache, forward=forward, drafter=drafter, verified=verified, **options):
            if drafter.sequence is not None and cache is drafter.sequence.dense:
                verified.append(ids.shape[1] - 1)
            return forward(ids, cache, **options)

        drafter.propose, target.forward = counted, watched
        try:
            output = speculative_generate(
                target,
                drafter,
                PROMPT,
                max_new_tokens=24,
                temperature=temperature,
                length_policy=policy,
                generator=torch.Generator().manual_seed(1),
            )
        finally:
            del target.forward
        rounds = [r.drafted for r in output.trace.rounds]
        assert [n for n in rounds if n] == [n for n in verified if n] == proposed
        if temperature == 0:
            assert output.tokens == autoregressive_generate(target, PROMPT, max_new_tokens=24).tokens


def test_with_a_live_vocabulary():
    target = target_of("gemma2", False)  # its logits are capped
    drafter = SparseSelfDrafter(target, SparseSelfConfig(budget=1.0))
    expected = autoregressive_generate(target, PROMPT, max_new_tokens=20).tokens
    few = sorted(set(expected[::2]))
    policy = FrequencyList(drafter.lm_head, few, len(few))
    output = speculative_generate(target, drafter, PROMPT, max_new_tokens=20, vocab_policy=policy)
    assert output.tokens == expected
    assert conditional_acceptance([output.trace])[0] > 0
    drafter, _, _ = started(target, SparseSelfConfig(budget=1.0))
    whole = drafter.propose(1, Sampling(1.0).choose).q[0]
    part = drafter.propose(1, Sampling(1.0).choose, policy.live()).q[0]
    torch.testing.assert_close(part, (whole[few] / whole[few].sum()))


# --- what it attends to ---


def eager_weights(target, tokens):
    """Of every layer, [N, T, T], by transformers."""
    usual = target.hf_config._attn_implementation
    target.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return [w[0] for w in target.model(torch.tensor([tokens]), output_attentions=True).attentions]
    finally:
        target.model.set_attn_implementation(usual)


def test_the_importance_is_the_weights_of_the_last_committed_queries(target):
    """Against eager attention over the whole text; rejected queries leave nothing, heads that share keys add up, and the ring
    goes round."""
    drafter, cache, tokens = started(target)
    for drafted, accepted in (
        ((), 0),
        ((9, 8, 7, 6, 5, 4), 2),
        ((11, 12), 0),
        ((40,) * 6, 6),
        ((50, 51), 2),
        ((9,), 0),
    ):
        length = len(tokens) - 1
        weights = eager_weights(target, tokens[:length])
        for layer, expected in enumerate(weights):
            expected = expected[:, -SMALL.queries :].sum(1).unflatten(0, (2, -1)).sum(1)
            found = drafter.sequence.importance.mass(layer, length)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # transformers' softmax is in fp32
        verify(target, drafter, cache, tokens, drafted, accepted)


def test_the_draft_law_is_that_of_the_sparse_attention(target):
    """Against one eager pass in which the drafted tokens see the index and each other only, by layer and key head. It is not
    the dense law: the q of the ratio must be the one that was drawn from."""
    drafter, cache, tokens = started(target)
    verify(target, drafter, cache, tokens, [9, 8, 7], 1)
    proposal = drafter.propose(4, Sampling(1.0).choose)
    length, text = len(tokens) - 1, torch.tensor([[*tokens, *proposal.tokens.tolist()]])[:, :-1]
    packed = drafter.sequence.packed

    def attention(module, query, key, value, mask, scaling=None, softcap=None, **_):
        total, window = text.shape[1], sparse_self.layer_windows(target)[module.layer_idx]
        ahead = torch.arange(total) - torch.arange(total)[:, None]
        visible = ((ahead <= 0) & (ahead > -(window or total))).repeat(2, 1, 1)
        index = packed.positions[module.layer_idx][: packed.chosen[module.layer_idx]]
        for head in range(2):
            outside = torch.ones(total, dtype=torch.bool)
            outside[index[:, head]] = outside[length:] = False
            visible[head, length:] &= ~outside
        key, value, visible = (x.repeat_interleave(2, -3) for x in (key, value, visible))
        scores = query @ key.transpose(2, 3) * scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("reference", attention)
    usual = target.hf_config._attn_implementation
    target.hf_config._attn_implementation = "reference"
    try:
        with torch.no_grad():
            sparse = target.model(text).logits[0, length:].softmax(-1)
    finally:
        target.hf_config._attn_implementation = usual
    torch.testing.assert_close(proposal.q, sparse, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        dense = target.model(text).logits[0, length:].softmax(-1)
    assert (proposal.q - dense).abs().max() > 1e-3


@torch.inference_mode()
def test_a_needle_comes_in_after_the_verification_that_attends_to_it(target):
    """Planted in one layer and key head, outside the index. It goes when nobody attends to it any more, and comes back."""
    drafter, cache, tokens = started(target, WIDE)
    sequence, head = drafter.sequence, 1
    layer = sparse_self.layer_windows(target).index(None)
    attend, score = sequence.attend_to_all, 100.0

    def planted(inputs):
        if inputs.layer == layer:  # the key that both query heads of this key head give that score
            key = torch.linalg.pinv(inputs.q[0, 2:, 0]) @ torch.full((2,), score, dtype=torch.float64)
            inputs.keys[0, head, place] = key / inputs.scale
        return attend(inputs)

    def is_chosen(head):
        return place in sequence.packed.positions[layer][: sequence.packed.chosen[layer], head].tolist()

    place = 0
    while is_chosen(head):
        place += 1
    sequence.attend_to_all = planted
    for wanted, rounds, expected in ((100.0, 1, True), (-100.0, WIDE.queries, False), (100.0, 1, True)):
        score = wanted
        for _ in range(rounds):
            assert is_chosen(head) != expected
            verify(target, drafter, cache, tokens, [9], 0)
        assert is_chosen(head) == expected


def test_all_needles_are_recalled():
    """The index holds as many of the most attended positions as there is room for: recall 1 against eager attention."""
    target = target_of("qwen3", False)
    drafter, cache, tokens = started(target, WIDE)
    for drafted, accepted in (((9, 8, 7), 2), ((5,), 1)):
        verify(target, drafter, cache, tokens, drafted, accepted)
        length = len(tokens) - 1
        room = WIDE.size(length, accepted + 1) - WIDE.sinks - WIDE.recent
        assert room > 4
        for layer, weights in enumerate(eager_weights(target, tokens[:length])):
            mass = weights[:, -WIDE.queries :].sum(1).unflatten(0, (2, -1)).sum(1)
            best = mass[:, WIDE.sinks : -WIDE.recent].topk(room).indices + WIDE.sinks
            held = drafter.sequence.packed.positions[layer][: drafter.sequence.packed.chosen[layer]]
            for head in range(2):
                assert set(best[head].tolist()) <= set(held[:, head].tolist())


def test_drafting_changes_no_byte_of_the_dense_cache_and_makes_no_buffers(target):
    drafter, cache, tokens = started(target)
    packed = drafter.sequence.packed
    places = [buffer.data_ptr() for buffer in packed.buffers]
    assert len(places) == target.num_layers
    for drafted, accepted in (((9, 8, 7), 1), ((), 0), ((5, 6, 7, 8, 9, 10), 6)):
        before = [stored.clone() for stored in (*cache.keys, *cache.values)]
        drafter.propose(6, Sampling(1.0).choose)
        assert all(torch.equal(old, new) for old, new in zip(before, (*cache.keys, *cache.values), strict=True))
        assert cache.lengths == [len(tokens) - 1]
        verify(target, drafter, cache, tokens, drafted, accepted)
    assert [buffer.data_ptr() for buffer in packed.buffers] == places
    assert drafter.sequence.packed is packed


def test_what_the_last_verification_wrote_is_in_the_index():
    """Even with no recent positions of their own."""
    target = target_of("llama", True)
    drafter, cache, tokens = started(target, SparseSelfConfig(budget=0.1, sinks=1, recent=0, longest=6))
    verify(target, drafter, cache, tokens, [9, 8, 7, 6, 5, 4], 5)
    packed, length = drafter.sequence.packed, len(tokens) - 1
    for layer in range(target.num_layers):
        held = packed.positions[layer][: packed.chosen[layer]]
        assert packed.chosen[layer] == 7
        for head in range(2):
            assert {0, *range(length - 6, length)} == set(held[:, head].tolist())


# --- the pieces ---


def test_choose_positions():
    mass = torch.rand(3, 50, generator=torch.Generator().manual_seed(0))
    for count, sinks, tail, first in ((20, 4, 6, 0), (10, 4, 6, 0), (12, 4, 6, 10), (9, 4, 6, 2), (25, 0, 0, 25)):
        index = choose_positions(mass, count, sinks, tail, first)
        assert index.shape == (3, count)
        for head in range(3):
            ends = {*range(first, sinks), *range(50 - tail, 50)}
            middle = range(max(first, sinks), 50 - tail)
            best = sorted(middle, key=lambda i: -mass[head, i])[: count - len(ends)]
            assert set(index[head].tolist()) == ends | set(best)
    assert choose_positions(mass, 60, 4, 6).tolist() == [list(range(50))] * 3
    assert choose_positions(mass, 60, 4, 6, 45).tolist() == [list(range(45, 50))] * 3


def test_the_ring_of_weights_is_a_list_that_forgets():
    """Random rounds, rejected rows that saw further than those that took their place."""

    class Dense:
        keys = (torch.empty(1, 2, 300, 4),)

    config = SparseSelfConfig(queries=5, longest=4)
    importance, generator, kept, length = Importance(Dense, config), torch.Generator().manual_seed(0), [], 10
    for _ in range(40):
        n = int(torch.randint(1, 6, (), generator=generator))
        weights = torch.rand(2, 3, n, length + n, generator=generator)
        importance.note(0, weights)
        accepted = int(torch.randint(1, n + 1, (), generator=generator))
        importance.commit(accepted)
        kept += [weights[:, :, i].sum(1) for i in range(accepted)]
        length += accepted
        expected = torch.zeros(2, length)
        for row in kept[-5:]:
            expected[:, : min(length, row.shape[1])] += row[:, :length]
        # a query sees the places of rejected tokens behind it; masks give them no weight in a real pass
        torch.testing.assert_close(importance.mass(0, length)[:, : length - n], expected[:, : length - n])


@pytest.mark.parametrize(
    "values", [{"budget": -0.1}, {"budget": 1.5}, {"sinks": -1}, {"recent": -1}, {"queries": 0}, {"longest": 0}]
)
def test_bad_settings_are_refused(values):
    (name,) = values
    with pytest.raises(UserError, match=f"{name}: got {values[name]}, allowed"):
        SparseSelfConfig(**values)


def test_the_size_of_an_index():
    config = SparseSelfConfig(budget=0.1)
    assert [config.size(t) for t in (10, 68, 100, 680, 1000, 8000)] == [10, 68, 68, 68, 100, 800]
    assert config.size(200, written=80) == 84


def test_a_target_with_another_attention_is_refused(monkeypatch):
    """What a family does besides softmax, scale, cap and window would be lost: its logits tell."""
    target = TargetModel.from_model(tiny_model("qwen3", layers=3), tap_layers=(0, 1, 2), lean=False)
    exact = sparse_self.attend_with_weights

    def with_another_scale(inputs):
        return exact(sparse_self.replace(inputs, scale=0.5 * inputs.scale))

    monkeypatch.setattr(sparse_self, "attend_with_weights", with_another_scale)
    with pytest.raises(UserError, match=r"cannot draft for itself.*logits differ"):
        SparseSelfDrafter(target)
    assert target.watcher is None
    monkeypatch.setattr(sparse_self.Recorder, "_keep_queries", lambda self, inputs: None)
    with pytest.raises(UserError, match="AttentionInterface"):
        SparseSelfDrafter(target)


def test_other_decodes_on_the_same_target_are_left_alone():
    """Two budgets and the target alone in turn, as in a benchmark; only the passes of its own sequence are a drafter's."""
    target = target_of("llama", True)
    one, two = SparseSelfDrafter(target, SMALL), SparseSelfDrafter(target, SparseSelfConfig(budget=1.0))
    expected = autoregressive_generate(target, PROMPT, max_new_tokens=12).tokens
    recorder, asked = target.watcher, []
    attention = recorder.attention
    recorder.attention = lambda cache, append: asked.append(attention(cache, append)) or asked[-1]
    try:
        for drafter in (one, two, one):
            assert speculative_generate(target, drafter, PROMPT, max_new_tokens=12).tokens == expected
            asked.clear()
            assert autoregressive_generate(target, PROMPT, max_new_tokens=12).tokens == expected
            assert len(asked) == 12
            assert asked[1:] == [None] * 11
    finally:
        del recorder.attention


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [0.3, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_a_gpu(family, budget):
    target = TargetModel.from_model(tiny_model(family, layers=3, dtype=torch.float64).cuda(), tap_layers=(0, 1, 2))
    drafter = SparseSelfDrafter(target, SparseSelfConfig(budget, sinks=2, recent=4))
    output = speculative_generate(target, drafter, PROMPT, max_new_tokens=22)
    assert output.tokens == autoregressive_generate(target, PROMPT, max_new_tokens=22).tokens
    if budget == 1:
        assert set(conditional_acceptance([output.trace])) == {1.0}
