"""EvoSpec's vocabulary: its indexes against naive counts, its size, its hysteresis, and what a change of topic does to it."""

import builtins
import math
import random

import pytest
import torch
from scripted import ScriptedDrafter, ScriptedTarget, scripted_head

from specdraft.config import UserError
from specdraft.decoding.evospec import (
    WINDOW,
    EvoSpecConfig,
    EvoSpecVocabulary,
    Pairs,
    SemanticIndex,
    count_pairs,
    standardise,
)
from specdraft.decoding.generate import speculative_generate
from specdraft.decoding.live_rows import Verified

VOCAB = 200
SMALL = EvoSpecConfig(core=20, tail=10, residency=2, refresh_every=4)


def identity(state):
    return state


def logits_of(last):
    return last


def make(config=SMALL, ids=None, pairs=None, vocab=VOCAB, trimmed=None):
    torch.manual_seed(0)
    rows = torch.randn(vocab, 16)
    head = scripted_head(vocab, trimmed)
    return EvoSpecVocabulary(head, range(vocab) if ids is None else ids, rows, identity, config, pairs), rows


def told(policy, committed, best=(), state=None):
    """A round in which nothing was drafted. best: the target's top 3."""
    logits = torch.zeros(1, VOCAB)
    logits[0, list(best) or [0, 1, 2]] = torch.tensor([3.0, 2.0, 1.0])
    state = torch.ones(1, 16) if state is None else state
    policy.observe(Verified([], list(committed), 0, logits, state, [0]))


def test_core_and_tail_fill_the_live_set():
    policy, _ = make()
    assert policy.live().ids.tolist() == list(range(30))
    assert all(policy.covers(token) for token in range(30))
    assert not policy.covers(30)


def test_the_size_never_changes_and_the_core_stays():
    policy, _ = make()
    numbers, seen = random.Random(0), set()
    policy.begin([5, 150, 7], torch.ones(3, 16), logits_of)
    for _ in range(60):
        told(policy, numbers.sample(range(VOCAB), 3), numbers.sample(range(VOCAB), 3), torch.randn(1, 16))
        ids = policy.live().ids.tolist()
        assert len(ids) == len(set(ids)) == 30
        assert ids[:20] == list(range(20))
        assert {token for token in range(VOCAB) if policy.covers(token)} == set(ids)
        seen |= set(ids)
    assert len(seen) > 60
    hidden = torch.randn(1, VOCAB, dtype=torch.float64)
    assert torch.equal(policy.live().logits(hidden), hidden[:, policy.live().ids])


def test_scores_are_those_of_the_specification():
    """papers 3.2 to 3.4, written out."""
    numbers = random.Random(0)
    texts = [[numbers.randrange(VOCAB) for _ in range(60)] for _ in range(30)]
    pairs = count_pairs(texts, VOCAB, range(20, VOCAB))
    config = EvoSpecConfig(core=20, tail=10, beta=0.3, mu=0.7)
    policy, rows = make(config, pairs=pairs)
    text, counts, misses = [3, 40, 41], dict.fromkeys(range(VOCAB), 0.0), dict.fromkeys(range(VOCAB), 0.0)
    policy.begin(text, torch.ones(3, 16), logits_of)
    for token in text:
        counts[token] += 1
    for committed, best in [([50, 51], [60, 61, 62]), ([70], [70, 61, 5])]:
        missed = [token for token in committed if not policy.covers(token)]
        told(policy, committed, best)
        for token in range(VOCAB):
            counts[token] = 0.99 * counts[token] + (token in committed or token in best)
            misses[token] = 0.99 * misses[token] + missed.count(token)
        text += committed
    state = torch.randn(16)
    cosine = torch.nn.functional.cosine_similarity(rows, state[None])
    table = {(u, int(v)): float(w) for u in range(VOCAB) for v, w in zip(*pairs.of([u], 1.0), strict=True)}
    assert any((u, v) in table for u in text for v in range(VOCAB))
    statistical = [
        math.log(1 + counts[v])
        + sum(0.99 ** (len(text) - 1 - i) * table.get((u, v), 0.0) for i, u in list(enumerate(text))[-WINDOW:])
        for v in range(20, VOCAB)
    ]
    # fewer candidates than the semantic top: every one has its cosine
    policy.semantic._index.nprobe = 1000
    z_semantic, z_statistical = standardise(cosine[20:]), standardise(torch.tensor(statistical))
    expected = 0.3 * z_semantic + 0.7 * z_statistical + 0.7 * torch.tensor([misses[v] for v in range(20, VOCAB)])
    torch.testing.assert_close(policy.scores(state), expected, atol=1e-4, rtol=1e-4)


def naive_pairs(texts, tail):
    both, first, second, total = {}, {}, {}, 0
    for text in texts:
        for i, u in enumerate(text):
            for v in text[i + 1 : i + 1 + WINDOW]:
                both[u, v] = both.get((u, v), 0) + 1
                first[u], second[v] = first.get(u, 0) + 1, second.get(v, 0) + 1
                total += 1
    found = {key: math.log(n * total / (first[key[0]] * second[key[1]])) for key, n in both.items()}
    return {key: value for key, value in found.items() if value > 0 and key[1] in tail}


@pytest.mark.parametrize("most", [3, 1000])
def test_pairs_are_the_ppmi_of_a_window(most):
    numbers = random.Random(3)
    texts = [[numbers.randrange(12) for _ in range(n)] for n in (1, 2, 40, 90, 5)]
    tail = {2, 3, 7, 11}
    expected = naive_pairs(texts, tail)
    pairs = count_pairs(texts, 12, tail, most)
    for u in range(12):
        partners, weights = pairs.of([u], 1.0)
        best = sorted((w for (first, _), w in expected.items() if first == u), reverse=True)[:most]
        assert weights.tolist() == pytest.approx(best, abs=1e-5)
        for v, w in zip(partners.tolist(), weights.tolist(), strict=True):
            assert w == pytest.approx(expected[u, v], abs=1e-5)


def test_context_that_is_older_counts_less():
    pairs = Pairs(torch.tensor([0, 1, 2]), torch.tensor([7, 8]), torch.tensor([1.0, 2.0]))
    partners, weights = pairs.of([0, 1, 0], 0.5)
    assert partners.tolist() == [7, 8, 7]
    assert weights.tolist() == [0.25, 1.0, 1.0]
    assert [len(part) for part in pairs.of([], 0.5)] == [0, 0]


def test_the_semantic_index_finds_the_nearest_rows():
    torch.manual_seed(1)
    centres = torch.randn(30, 24) * 3
    rows = (centres[:, None] + torch.randn(30, 100, 24)).flatten(0, 1) * torch.rand(3000, 1)  # lengths must not matter
    index = SemanticIndex(rows)
    units = torch.nn.functional.normalize(rows, dim=-1)
    hits = 0
    for query in rows[::100] + 0.1:
        places, cosines = index.search(query, 20)
        true = units @ torch.nn.functional.normalize(query, dim=-1)
        torch.testing.assert_close(cosines, true[places], atol=1e-5, rtol=1e-5)
        assert cosines.tolist() == sorted(cosines.tolist(), reverse=True)
        hits += len(set(places.tolist()) & set(true.topk(20).indices.tolist()))
    assert hits / 600 > 0.95


def test_without_faiss_one_clear_line(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "faiss":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"faiss is not installed; pip install 'specdraft\[evospec\]'"):
        make()


@pytest.mark.parametrize(("ids", "config"), [(range(20), SMALL), (range(200), EvoSpecConfig(core=20, tail=0))])
def test_sizes_that_cannot_be_filled_are_refused(ids, config):
    with pytest.raises(UserError, match="usable ids, asked for a core of 20"):
        make(config, ids)


def test_a_trimmed_head_is_a_smaller_world():
    """Fault 29: tokens without a row are nobody's candidates, and no reason to refresh."""
    rows = list(range(0, VOCAB, 2))
    policy, _ = make(trimmed=rows)
    policy.begin([1, 3, 5], torch.ones(3, 16), logits_of)
    for token in range(1, 100, 2):
        told(policy, [token])
    assert policy.miss_rate == 0
    assert set(policy.live().ids.tolist()) <= set(rows)
    assert not policy.covers(1)


def test_the_tail_is_refreshed_every_fourth_round_or_when_too_much_is_missed():
    policy, _ = make(EvoSpecConfig(core=20, tail=10, residency=0, miss_threshold=1.0))
    policy.begin([1], torch.ones(1, 16), logits_of)
    changed = []
    for i in range(12):
        before = policy.live().ids.tolist()
        told(policy, [100 + i] * 3, [120 + i, 140 + i, 160 + i])
        changed.append(policy.live().ids.tolist() != before)
    assert [i for i, change in enumerate(changed, 1) if change] == [4, 8, 12]
    policy, _ = make(EvoSpecConfig(core=20, tail=10, residency=0, miss_threshold=0.15, miss_rate=0.1))
    policy.begin([1], torch.ones(1, 16), logits_of)
    told(policy, [100])
    assert not policy.covers(100)
    told(policy, [101])
    assert policy.miss_rate == pytest.approx(0.19)
    assert policy.covers(101)


def test_a_token_stays_for_its_residency():
    policy, _ = make(EvoSpecConfig(core=20, tail=10, residency=8, refresh_every=1))
    policy.begin([100], torch.ones(1, 16), logits_of)
    assert policy.covers(100)
    numbers = random.Random(0)
    admitted = {}
    for i in range(40):
        before = set(policy.live().ids.tolist())
        told(policy, numbers.sample(range(20, VOCAB), 4), numbers.sample(range(20, VOCAB), 3), torch.randn(1, 16))
        after = set(policy.live().ids.tolist())
        for token in after - before:
            admitted[token] = i
        assert all(i - admitted[token] >= 8 for token in before - after if token in admitted)
    assert len(admitted) > 20


def test_after_a_change_of_topic_the_misses_come_back_down_and_a_static_cores_do_not():
    """papers 3: to within 10 % of the old rate within N rounds."""
    policy, rows = make(EvoSpecConfig(core=20, tail=40, residency=8))
    static = set(range(60))
    topics = {"law": list(range(60, 85)), "medicine": list(range(120, 145))}
    numbers = random.Random(2)

    def rates(topic, rounds):
        own, fixed = [], []
        for _ in range(rounds):
            committed = [
                numbers.choice(topics[topic]) if numbers.random() < 0.4 else numbers.randrange(20) for _ in range(3)
            ]
            own.append(sum(not policy.covers(token) for token in committed) / 3)
            fixed.append(sum(token not in static for token in committed) / 3)
            told(policy, committed, numbers.sample(topics[topic], 3), rows[committed[-1]][None])
        return own, fixed

    policy.begin([1, 2, 3], torch.ones(3, 16), logits_of)
    before, before_fixed = rates("law", 120)
    settled = sum(before[60:]) / 60
    after, after_fixed = rates("medicine", 120)
    assert sum(after[:3]) / 3 > settled + 0.1
    assert sum(after[60:]) / 60 <= 1.1 * settled
    assert min(sum(rates[60:]) / 60 for rates in (before_fixed, after_fixed)) > 0.25
    assert settled < 0.1


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_request_leaves_behind(keeps):
    """Fault 35: by default an output depends on its seed alone."""
    policy, _ = make(EvoSpecConfig(core=20, tail=10, residency=0, across_requests=keeps))

    def first_live(prompt):
        policy.begin(prompt, torch.ones(len(prompt), 16), logits_of)
        return policy.live().ids.tolist()

    fresh = first_live([1, 2])
    for token in range(100, 140):
        told(policy, [token], [token, token + 1, token + 2])
    assert (first_live([1, 2]) == fresh) == (not keeps)


def test_in_the_decoder_it_learns_what_is_said():
    target = ScriptedTarget(VOCAB)
    text = list(range(100, 112))
    target.logits = lambda prefix: torch.nn.functional.one_hot(torch.tensor(text[len(prefix) % 12]), VOCAB).double() * 9
    rows = torch.randn(VOCAB, VOCAB, dtype=torch.float64)
    policy = EvoSpecVocabulary(
        scripted_head(VOCAB), range(VOCAB), rows, identity, EvoSpecConfig(core=20, tail=20, residency=2)
    )
    output = speculative_generate(
        target, ScriptedDrafter(target.logits), [1, 2, 3], max_new_tokens=80, vocab_policy=policy
    )
    assert output.tokens == target.greedy([1, 2, 3], 80)
    assert [r.accepted for r in output.trace.rounds[-3:-1]] == [4, 4]
    assert output.trace.rounds[0].accepted == 0
