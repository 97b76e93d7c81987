"""The verifier's output law, by exact enumeration (papers 9): ours has none of the error that wrong variants have."""

import random

import pytest
import torch
from scripted import exact_law, total_variation

from specdraft.decoding import verify as module
from specdraft.decoding.verify import verify, verify_greedy


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


P = doubles([0.35, 0.25, 0.10, 0.30])
A = torch.tensor([0, 1, 2])
Q = doubles([5, 2, 2]) / 9  # normalised on A
ROUGH = doubles([0.5, 0.2, 0.2])  # the same law, not normalised
TARGET = dict(enumerate(P.tolist()))


def run(oracle, monkeypatch, tokens, q, ids, parents=None, law_of=None):
    """One verification with enumerated randomness -> (committed tokens)."""
    monkeypatch.setattr(module, "uniform", oracle.uniform)
    monkeypatch.setattr(module, "draw", oracle.draw)
    verdict = verify(law_of or (lambda row: P), tokens, parents or [-1] * len(tokens), q, ids)
    return (*(tokens[i] for i in verdict.path), verdict.token)


def first(committed):
    return committed[0]


def without(q, tokens):
    q = q.clone()
    q[tokens] = 0
    return q / q.sum() if q.sum() > 0 else q


# --- ours: no error ---


def test_chain_over_a_sub_vocabulary(monkeypatch):
    """Fault 33: the residual is taken over the full vocabulary."""

    def program(oracle):
        x = int(oracle.draw(Q))
        return first(run(oracle, monkeypatch, [x], Q[None], A))

    assert total_variation(exact_law(program), TARGET) < 1e-12


def test_acceptance_is_the_overlap_of_the_laws(monkeypatch):
    def program(oracle):
        x = int(oracle.draw(Q))
        return len(run(oracle, monkeypatch, [x], Q[None], A)) - 1

    assert exact_law(program)[1] == pytest.approx(0.6722, abs=5e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_independent_siblings(monkeypatch, count):
    def program(oracle):
        tokens = [int(oracle.draw(Q)) for _ in range(count)]
        return first(run(oracle, monkeypatch, tokens, Q.expand(count, -1), A))

    assert total_variation(exact_law(program), TARGET) < 1e-12


@pytest.mark.parametrize("count", [2, 3])
def test_siblings_without_replacement(monkeypatch, count):
    def program(oracle):
        tokens, laws = [], []
        for _ in range(count):
            laws.append(without(Q, tokens))
            tokens.append(int(oracle.draw(laws[-1])))
        return first(run(oracle, monkeypatch, tokens, torch.stack(laws), A))

    assert total_variation(exact_law(program), TARGET) < 1e-12


@pytest.mark.parametrize("children", [[0, 1], [3], [2, 3, 0, 1]])
def test_deterministic_children(monkeypatch, children):
    law = exact_law(lambda oracle: first(run(oracle, monkeypatch, children, None, None)))
    assert total_variation(law, TARGET) < 1e-12


@pytest.mark.parametrize("kind", ["independent", "without replacement", "deterministic"])
@pytest.mark.parametrize("parents", [[-1, 0], [-1, -1, 0], [-1, 0, 0], [-1, -1, 1, 1]])
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_two_tokens_deep(monkeypatch, kind, parents, seed):
    """The joint law of the first two tokens; a tree that ends early goes on with the target's own law."""
    generator = torch.Generator().manual_seed(seed)
    p1, q1 = torch.rand(2, 3, generator=generator, dtype=torch.float64).softmax(-1)
    p2, q2 = (3 * torch.rand(2, 3, 3, generator=generator, dtype=torch.float64)).softmax(-1)
    fixed = random.Random(seed).sample(range(3), 3)

    def program(oracle):
        tokens, laws = [], []
        for i, parent in enumerate(parents):
            siblings = [tokens[j] for j in range(i) if parents[j] == parent]
            law = q1 if parent == -1 else q2[tokens[parent]]
            laws.append(without(law, siblings) if kind == "without replacement" else law)
            tokens.append(fixed[len(siblings)] if kind == "deterministic" else int(oracle.draw(laws[-1])))
        q = None if kind == "deterministic" else torch.stack(laws)

        def law_of(row):
            if row == 0:
                return p1
            return p2[tokens[row - 1]] if parents[row - 1] == -1 else torch.full((3,), 1 / 3, dtype=torch.float64)

        committed = run(oracle, monkeypatch, tokens, q, None, parents, law_of)
        return committed[:2] if len(committed) > 1 else (*committed, int(oracle.draw(p2[committed[0]])))

    expected = {(x, y): float(p1[x] * p2[x, y]) for x in range(3) for y in range(3)}
    assert total_variation(exact_law(program), expected) < 1e-12


# --- wrong variants: the enumeration sees them, with the errors of papers 9.3 ---


def residual(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum()


def full(q):
    return torch.cat([q, q.new_zeros(1)])


def restricted_residual(oracle):
    x = int(oracle.draw(Q))
    if oracle.uniform() * float(Q[x]) < float(P[x]):
        return x
    return int(oracle.draw(residual(P[A], Q)))


def unnormalised_q(oracle):
    x = int(oracle.draw(Q))
    if oracle.uniform() * float(ROUGH[x]) < float(P[x]):
        return x
    return int(oracle.draw(residual(P, full(ROUGH))))


def stale_q(draws):
    def program(oracle):
        p, tokens = P, []
        for _ in range(draws):
            x = int(oracle.draw(without(Q, tokens)))
            tokens.append(x)
            if oracle.uniform() * float(Q[x]) < float(p[x]):
                return x
            p = residual(p, full(Q))
        return int(oracle.draw(p))

    return program


def sampled_rule_on_deterministic_children(zero_only):
    def program(oracle):
        p = P
        for x in (0, 1):
            if oracle.uniform() * float(Q[x]) < float(p[x]):
                return x
            p = without(p, [x]) if zero_only else residual(p, full(Q))
        return int(oracle.draw(p))

    return program


@pytest.mark.parametrize(
    ("variant", "error"),
    [
        (restricted_residual, 0.300),
        (unnormalised_q, 0.0619),
        (stale_q(2), 0.0247),
        (stale_q(3), 0.0247),
        (sampled_rule_on_deterministic_children(zero_only=False), 0.280),
        (sampled_rule_on_deterministic_children(zero_only=True), 0.400),
    ],
)
def test_wrong_variants_are_seen(variant, error):
    """Fault 33: restricted residual, and a q of the ratio that is not the q sampled from."""
    assert total_variation(exact_law(variant), TARGET) == pytest.approx(error, abs=5e-4 if error > 0.1 else 5e-5)


# --- whether a token is verified must not depend on it (papers 9.4) ---


def test_verifying_only_likely_tokens_biases_the_output(monkeypatch):
    p, q = doubles([0.5, 0.5]), doubles([0.9, 0.1])

    def program(oracle):
        x = int(oracle.draw(q))
        if q[x] <= 0.5:
            return int(oracle.draw(p))
        return first(run(oracle, monkeypatch, [x], q[None], None, law_of=lambda row: p))

    law = exact_law(program)
    assert [law[0], law[1]] == pytest.approx([0.55, 0.45])


@pytest.mark.parametrize(("from_sample", "error"), [(False, 0.0), (True, 0.06)])
def test_depth_from_a_law_is_lossless_and_from_a_sample_is_not(monkeypatch, from_sample, error):
    p1, p2 = doubles([0.6, 0.4]), doubles([[0.7, 0.3], [0.2, 0.8]])
    q1, q2 = doubles([0.9, 0.1]), doubles([0.5, 0.5])

    def program(oracle):
        x, y = int(oracle.draw(q1)), int(oracle.draw(q2))
        confidence = q1[x] if from_sample else q1.max()
        depth = 2 if confidence > 0.5 else 0
        tokens, parents, q = [x, y][:depth], [-1, 0][:depth], torch.stack([q1, q2])[:depth]
        committed = run(oracle, monkeypatch, tokens, q, None, parents, lambda row: [p1, p2[x], p1][row])
        return committed[:2] if len(committed) > 1 else (*committed, int(oracle.draw(p2[committed[0]])))

    expected = {(x, y): float(p1[x] * p2[x, y]) for x in range(2) for y in range(2)}
    assert total_variation(exact_law(program), expected) == pytest.approx(error, abs=1e-9)


# --- greedy ---


@pytest.mark.parametrize("seed", range(30))
def test_greedy_is_the_same_rule(seed):
    numbers = random.Random(seed)
    count = numbers.randint(0, 8)
    parents = [numbers.randint(-1, i - 1) for i in range(count)]
    tokens = [numbers.randrange(3) for _ in range(count)]
    best = [numbers.randrange(3) for _ in range(count + 1)]
    laws = torch.nn.functional.one_hot(torch.tensor(best), 3).double()
    q = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)
    expected = verify_greedy(best, tokens, parents)
    assert verify(laws.__getitem__, tokens, parents) == expected
    assert verify(laws.__getitem__, tokens, parents, q) == expected


def test_greedy_takes_the_matching_branch():
    verdict = verify_greedy(best=[5, 0, 7, 9, 1], tokens=[4, 5, 6, 7], parents=[-1, -1, 0, 1])
    assert verdict.path == [1, 3]
    assert verdict.token == 1


def test_equal_laws_accept_always():
    """Rounding must not reject where p = q in fp32, nor leave an empty residual."""
    law = torch.rand(50_000, generator=torch.Generator().manual_seed(0)).mul(8).softmax(-1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        x = int(torch.multinomial(law, 1, generator=generator))
        assert verify(lambda row: law, [x], [-1], law[None], None, generator).path == [0]


def test_laws_of_rejected_branches_are_never_made():
    asked = []

    def law_of(row):
        asked.append(row)
        return torch.tensor([1.0, 0.0])

    verify(law_of, [1, 0, 0], [-1, 0, 1])
    assert asked == [0]
