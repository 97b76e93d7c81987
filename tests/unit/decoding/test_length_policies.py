"""When each length policy stops, by numbers worked out apart from it; and the law of sampled outputs under all of them."""

import itertools
import math
import random

import pytest
import torch
from scripted import Oracle, ScriptedDrafter, ScriptedTarget, exact_law, scripted_head, total_variation

from specdraft.config import UserError
from specdraft.decoding import generate, sampling, verify
from specdraft.decoding.costs import CostTable
from specdraft.decoding.evospec import EvoSpecConfig, EvoSpecVocabulary
from specdraft.decoding.generate import speculative_generate
from specdraft.decoding.length_policies import (
    LENGTH_POLICIES,
    AdaEdl,
    ConfidenceThreshold,
    EntropyController,
    ExpectedSpeedup,
    Fixed,
    Heuristic,
    Svip,
)
from specdraft.decoding.length_policy import DraftLaw, LengthPolicy
from specdraft.decoding.libraspec import LibraSpec, balance, balance_from_costs, libra_length
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.vocab_policies import AllTokens, FrequencyList, NanoSpec

VOCAB = 3  # of the enumerations with live sets; 2 for those with longer drafts
PROMPT = [1, 0, 1]


def costs(lengths, step=0.1, verify=0.02):
    draft, checked = [step * k for k in range(lengths + 1)], [1 + verify * k for k in range(lengths + 1)]
    return CostTable(draft, checked, [0.0] * (lengths + 1), 1.0, "scripted", "float64", {})


def law(*probabilities, column=0):
    q = torch.tensor(probabilities, dtype=torch.float64)
    return DraftLaw(q.log()[None], q, torch.tensor([column]))


def run(policy, laws, accepted=None):
    """One round over the laws of successive tokens -> (drafted, verified)."""
    most = policy.length()
    drafted = next((k for k in range(1, most + 1) if not policy.go_on(laws[k - 1])), most)
    kept = policy.keep(drafted)
    policy.observe(kept, kept if accepted is None else accepted)
    return drafted, kept


# --- what a policy sees ---


def test_the_numbers_of_a_law():
    found = law(0.5, 0.25, 0.25, column=2)
    assert found.entropy == pytest.approx(1.5 * math.log(2))
    assert (found.confidence, found.probability) == (0.5, 0.25)
    assert law(1.0, 0.0).entropy == 0


def test_at_temperature_0_a_law_is_the_softmax_of_the_logits():
    found = DraftLaw(torch.tensor([[0.0, math.log(3.0)]]), None, None)
    assert found.confidence == pytest.approx(0.75)
    with pytest.raises(AssertionError, match="does not read sampled tokens"):
        _ = found.probability


def test_every_policy_declares_what_it_reads_and_what_it_would_bias():
    assert {name for name, policy in LENGTH_POLICIES.items() if policy.reads_samples} == {"confidence"}
    biased = {name for name, make in POLICIES.items() if make().bias}
    assert biased == {"libraspec"}
    assert not LibraSpec(retreats=False).bias
    assert not LibraSpec(is_marginal=True).bias


# --- one by one ---


def test_heuristic_is_that_of_transformers():
    policy = Heuristic(start=5, most=10)
    lengths = []
    for accepted in (5, 7, 9, 3, 0):
        lengths.append(policy.length())
        policy.observe(policy.length(), accepted)
    assert lengths == [5, 7, 9, 10, 9]
    for _ in range(20):
        policy.observe(policy.length(), 0)
    assert policy.length() == 1
    policy.begin()
    assert policy.length() == 5


def test_confidence_stops_after_the_first_token_below_the_threshold():
    laws = [law(0.9, 0.1), law(0.6, 0.4, column=1), law(0.39, 0.61), law(0.9, 0.1)]
    assert run(ConfidenceThreshold(0.4, most=4), laws) == (3, 3)
    assert run(ConfidenceThreshold(0.1, most=4), laws) == (4, 4)


def test_svip_stops_where_the_entropy_passes_its_bound():
    """sqrt(0.15 H) > 0.3 iff H > 0.6 nats."""
    below, above = law(0.7, 0.3), law(0.69, 0.31)
    assert below.entropy > 0.6  # 0.6109: the two-token law at 0.7 is over the bound already
    assert run(Svip(most=3), [law(0.72, 0.28), below, above]) == (2, 2)
    assert law(0.72, 0.28).entropy < 0.6


def test_adaedl_stops_by_its_bound_and_moves_it():
    """1 - sqrt(0.2 H) < lambda iff H > (1 - lambda)^2 / 0.2; lambda = 0.4: 1.8 nats."""
    flat = law(*[1 / 6] * 6)  # ln 6 = 1.792
    flatter = law(*[1 / 7] * 7)  # ln 7 = 1.946
    policy = AdaEdl(most=4)
    assert run(policy, [flat, flat, flatter, flat], accepted=0) == (3, 3)
    assert policy.acceptance == pytest.approx(0.45)
    assert policy.bound == pytest.approx(0.9 * 0.4 + 0.1 * 0.41)
    for _ in range(60):
        policy.observe(4, 4)
    assert policy.bound < 0.4
    policy.observe(0, 0)  # nothing was tried
    policy.begin()
    assert (policy.bound, policy.acceptance) == (0.4, 0.9)
    for _ in range(3000):
        policy.observe(4, 0)
    assert 0.99 < policy.bound <= 1


def test_the_entropy_controllers_chances_and_centres():
    policy = EntropyController(costs(8))
    assert policy.chance(0.3) == pytest.approx(math.exp(0) / (math.exp(0) + math.exp(-1.7 / 0.5)))
    assert policy.chance(1.15) == pytest.approx(0.5)
    assert policy.chance(9.0) == pytest.approx(math.exp(-8.7 / 0.5) / (math.exp(-8.7 / 0.5) + math.exp(-7.0 / 0.5)))
    policy.length()
    policy.entropies = [0.1, 0.2, 1.9, 0.5]
    policy.observe(4, 2)
    assert policy.mu_accepted == pytest.approx((0.3 * 0.9 + 0.1 * 0.1) * 0.9 + 0.1 * 0.2)
    assert policy.mu_rejected == pytest.approx(2.0 * 0.9 + 0.1 * 1.9)
    policy.begin()
    assert (policy.mu_accepted, policy.mu_rejected) == (0.3, 2.0)


@pytest.mark.parametrize("step", [0.02, 0.1, 0.3])
def test_the_entropy_controller_stops_at_the_argmax(step):
    """With chances that stay as they are, k* is the argmax of papers 5's ratio over the measured table."""
    table = costs(10, step)
    for entropy in (0.05, 0.8, 1.1, 1.3):
        policy = EntropyController(table)
        q = torch.tensor([0.5, 0.5])
        same = DraftLaw(q.log()[None], q, None)
        p = policy.chance(entropy)
        policy.chance = lambda _, p=p: p
        ratios = [(1 + sum(p**m for m in range(1, k + 1))) / table.round_seconds(k) for k in range(1, 11)]
        drafted, kept = run(policy, [same] * 10)
        assert drafted == kept == 1 + max(range(10), key=ratios.__getitem__)


# --- LibraSpec, (4.1) ---


def equation_4_1(q, a):
    d = len(q)
    return min(math.floor(a * sum(math.prod(q[i - 1 : j]) for j in range(i, d + 1)) + i) for i in range(1, d + 1))


@pytest.mark.parametrize("a", [0.3, 2.0, 2.2, 5.0])
def test_balance_is_equation_4_1(a):
    numbers = random.Random(0)
    for _ in range(300):
        q = [numbers.random() for _ in range(numbers.randint(1, 24))]
        assert balance(q, a) == equation_4_1(q, a)


def libra(q, a=2.0, block=10, most=60, **options):
    policy = LibraSpec(a, block, most, **options)
    laws = [law(p, *[(1 - p) / 64] * 64) for p in q]
    return run(policy, laws), policy


def test_certainty_drafts_all_and_none_one_token():
    """papers 4: q = 1 -> d_max; q = 0 -> 1."""
    assert libra_length([1.0] * 60, 2.0, 10) == 60
    assert libra_length([0.0] * 60, 2.0, 10) == 1
    assert libra([1.0] * 60)[0] == (60, 60)
    assert libra([1 / 65] * 60)[0] == (10, 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_grows_step_by_step_and_is_cut_back_once_at_most(seed):
    """The policy in its round, against the rule as a function; every goal lies above the one before it."""
    numbers = random.Random(seed)
    quality = numbers.random()
    q = [max(1 / 65, min(1.0, numbers.gauss(quality, 0.2))) for _ in range(24)]
    policy = LibraSpec(2.2, 4, 24)
    most, goals = policy.length(), [4]
    for k in range(1, most + 1):
        go_on = policy.go_on(law(q[k - 1], *[(1 - q[k - 1]) / 64] * 64))
        if policy.goal != goals[-1]:
            goals.append(policy.goal)
        if not go_on:
            break
    assert goals == sorted(set(goals))
    assert policy.keep(k) == libra_length(q, 2.2, 4) <= k
    assert libra(q, 2.2, 4, 24, retreats=False)[0] == (k, k)


def test_positions_without_confidence_change_nothing():
    numbers = random.Random(1)
    for _ in range(200):
        q = [numbers.random() for _ in range(numbers.randint(1, 12))]
        if balance(q, 2.0) <= len(q):
            assert balance([*q, 0.0, 0.0, 0.0], 2.0) == balance(q, 2.0)


def test_a_from_the_costs_stays_near_the_oracle():
    """papers 4: with a tuned to the cost the rule keeps 98.5 to 99.3 % of the exact argmax; a = 5 keeps less."""
    for step, checked in [(0.0, 0.02), (0.0, 0.05), (0.0, 0.15)]:  # block drafters: verifying is what costs
        table = costs(24, step, checked)
        tuned = balance_from_costs(table, block=8)
        kept = {a: [] for a in (tuned, 20.0)}
        numbers = random.Random(3)
        for _ in range(100):
            level = numbers.uniform(0.4, 0.97)
            q = [min(1.0, max(0.02, numbers.gauss(level, 0.1))) for _ in range(24)]
            best = max(table.expected_speedup(k, q) for k in range(1, 25))
            for a, found in kept.items():
                found.append(table.expected_speedup(max(1, libra_length(q, a, 8)), q) / best)
        mean = {a: sum(found) / len(found) for a, found in kept.items()}
        assert mean[tuned] > 0.97
        assert mean[20.0] < mean[tuned]


def test_a_round_that_drafts_nothing_costs_what_the_drafter_does_in_it():
    """It is no round of the target alone: where following the text costs a sixth, drafting a token is worth more than not to."""
    table = CostTable([0.10, 0.15], [1.05, 1.10], [0.0, 0.0], 1.0, "", "", {})
    assert table.expected_speedup(0, [0.15]) < table.expected_speedup(1, [0.15]) < 1
    assert ExpectedSpeedup(table, [0.15]).length() == 1
    assert table.best_length([0.15]) == 0, "the target alone is better than both"


@pytest.mark.parametrize("make", [lambda: LibraSpec(a=-1), lambda: LibraSpec(block=0), lambda: Svip(most=0)])
def test_bad_settings_are_refused(make):
    with pytest.raises(UserError, match="allowed"):
        make()


# --- losslessness ---

TABLE = costs(3)
POLICIES = {
    "fixed": lambda: Fixed(2),
    "heuristic": lambda: Heuristic(start=1, most=3),
    "confidence": lambda: ConfidenceThreshold(0.5, most=3),
    "svip": lambda: Svip(threshold=0.38, most=3),
    "adaedl": lambda: AdaEdl(start=0.6, most=3),
    "entropy": lambda: EntropyController(TABLE),
    "expected_speedup": lambda: ExpectedSpeedup(TABLE, [0.6, 0.5, 0.4]),
    "libraspec": lambda: LibraSpec(1.0, block=2, most=3),
}
UNBIASED = {**POLICIES, "libraspec": lambda: LibraSpec(1.0, block=2, most=3, retreats=False)}
VOCABULARIES = {
    "all": AllTokens,
    "frequency": lambda: FrequencyList(scripted_head(VOCAB), [2, 1], 2),
    "nanospec": lambda: NanoSpec(scripted_head(VOCAB), capacity=2, kind="ring", top=1),
    "evospec": lambda: EvoSpecVocabulary(
        scripted_head(VOCAB),
        [0, 1, 2],
        torch.eye(VOCAB),
        lambda last: last,
        EvoSpecConfig(core=1, tail=1, top=1, residency=0, refresh_every=1),
    ),
}


def output_law(monkeypatch, length, vocabulary=AllTokens, sampler=None, count=4, drafter=None, vocab=VOCAB):
    """-> (target, law of whole outputs), every random decision enumerated."""
    target, sampler = ScriptedTarget(vocab, seed=5), sampler or Sampling(1.0)
    drafter = drafter or ScriptedDrafter(ScriptedTarget(vocab, seed=99).logits)
    policy, length = vocabulary(), length()

    def program(oracle: Oracle):
        for place in (generate, sampling, verify):
            monkeypatch.setattr(place, "draw", oracle.draw)
        monkeypatch.setattr(verify, "uniform", oracle.uniform)
        output = speculative_generate(
            target,
            drafter,
            PROMPT,
            max_new_tokens=count,
            temperature=sampler.temperature,
            top_k=sampler.top_k,
            length_policy=length,
            vocab_policy=policy,
        )
        return tuple(output.tokens)

    return target, exact_law(program)


def naive_law(target, count, sampler=None):
    found = {(): 1.0}
    for _ in range(count):
        found = {
            (*prefix, token): probability * p
            for prefix, probability in found.items()
            for token, p in enumerate((sampler or Sampling(1.0)).law(target.logits(PROMPT + list(prefix))).tolist())
        }
    return {key: p for key, p in found.items() if p > 0}


@pytest.mark.parametrize("name", LENGTH_POLICIES)
def test_no_length_policy_changes_the_law_of_outputs(monkeypatch, name):
    """papers 9.4, by enumeration of all outputs of five tokens."""
    target, found = output_law(monkeypatch, UNBIASED[name], count=5, vocab=2)
    assert total_variation(found, naive_law(target, 5)) < 1e-9


@pytest.mark.parametrize("name", VOCABULARIES)
def test_no_vocabulary_policy_changes_the_law_of_outputs(monkeypatch, name):
    """papers 9.1: the live set depends on the past only; the residual is over the full vocabulary."""
    sampler = Sampling(0.8, top_k=2)
    target, found = output_law(monkeypatch, lambda: Fixed(2), VOCABULARIES[name], sampler)
    assert total_variation(found, naive_law(target, 4, sampler)) < 1e-9


@pytest.mark.parametrize(
    "pair", list(itertools.product(["confidence", "adaedl", "libraspec"], ["nanospec", "evospec"]))
)
def test_both_together_leave_the_law_alone(monkeypatch, pair):
    """Texts long enough that a draft goes on or stops, and that what a round made live is drafted from."""
    target, found = output_law(monkeypatch, UNBIASED[pair[0]], VOCABULARIES[pair[1]])
    assert total_variation(found, naive_law(target, 4)) < 1e-9


class Dropping(LengthPolicy):
    """papers 9.4's counter-example: verify a token only if the drafter liked what it drew."""

    watches = reads_samples = True

    def length(self):
        self.liked = True
        return 1

    def go_on(self, law):
        self.liked = law.probability > 0.5
        return False

    def keep(self, drafted):
        return drafted if self.liked else 0


def test_dropping_what_was_drawn_gives_the_papers_wrong_law(monkeypatch):
    """p = (.5, .5), q = (.9, .1): verifying only what has q(x) > .5 puts out (.55, .45)."""

    class Coin(ScriptedTarget):
        def logits(self, prefix):
            return torch.tensor([0.5, 0.5], dtype=torch.float64).log()

    drafter = ScriptedDrafter(lambda prefix: torch.tensor([0.9, 0.1], dtype=torch.float64).log())
    target = Coin(2)
    policy = Dropping()
    with pytest.raises(
        UserError, match=r"Dropping: got temperature 1.0, allowed: 0 only.*reads which tokens were drawn"
    ):
        speculative_generate(target, drafter, [1], max_new_tokens=3, temperature=1.0, length_policy=policy)
    monkeypatch.setattr(generate, "_check_bias", lambda *_: None)  # let it through

    def program(oracle):
        for place in (generate, sampling, verify):
            monkeypatch.setattr(place, "draw", oracle.draw)
        monkeypatch.setattr(verify, "uniform", oracle.uniform)
        output = speculative_generate(target, drafter, [1], max_new_tokens=3, temperature=1.0, length_policy=policy)
        return output.tokens[1]  # the prefill gives the first one

    found = exact_law(program)
    assert found[0] == pytest.approx(0.55)
    assert found[1] == pytest.approx(0.45)


class Depth(LengthPolicy):
    """Two tokens or none, by the first one's largest probability, or by the probability of what was drawn."""

    watches = True

    def __init__(self, reads_samples):
        self.reads_samples = reads_samples

    def length(self):
        self.seen = []
        return 2

    def go_on(self, law):
        self.seen.append(law.probability if self.reads_samples else law.confidence)
        return True

    def keep(self, drafted):
        return drafted if self.seen[0] > 0.5 else 0


@pytest.mark.parametrize(("reads_samples", "variation"), [(False, 0.0), (True, 0.06)])
def test_the_papers_two_positions(monkeypatch, reads_samples, variation):
    """p1 = (.6, .4), p2|0 = (.7, .3), p2|1 = (.2, .8), q1 = (.9, .1), q2 = (.5, .5)."""
    table = {0: (0.6, 0.4), 1: {0: (0.7, 0.3), 1: (0.2, 0.8)}}

    class Pair(ScriptedTarget):
        def logits(self, prefix):
            step = len(prefix) - 2  # behind the prompt and the prefill's token
            p = (1.0, 0.0) if step < 0 else table[0] if step == 0 else table[1][prefix[2]] if step == 1 else (0.5, 0.5)
            return torch.tensor(p, dtype=torch.float64).log()

    drafter = ScriptedDrafter(
        lambda prefix: torch.tensor((0.9, 0.1) if len(prefix) == 2 else (0.5, 0.5), dtype=torch.float64).log()
    )
    target, policy = Pair(2), Depth(reads_samples)
    monkeypatch.setattr(generate, "_check_bias", lambda *_: None)  # which refuses the second

    def program(oracle):
        for place in (generate, sampling, verify):
            monkeypatch.setattr(place, "draw", oracle.draw)
        monkeypatch.setattr(verify, "uniform", oracle.uniform)
        output = speculative_generate(target, drafter, [1], max_new_tokens=4, temperature=1.0, length_policy=policy)
        return tuple(output.tokens[1:3])

    true = {(a, b): table[0][a] * table[1][a][b] for a in (0, 1) for b in (0, 1)}
    assert total_variation(exact_law(program), true) == pytest.approx(variation, abs=1e-9)


def retreating(monkeypatch, is_marginal, drafter=None):
    def length():
        policy = LibraSpec(0.385, block=3, most=3, is_marginal=is_marginal)
        policy.bias = ""  # let it through
        return policy

    target, found = output_law(monkeypatch, length, count=5, drafter=drafter, vocab=2)
    return total_variation(found, naive_law(target, 5))


def test_libraspec_behind_a_chain_is_refused_at_t_above_0_and_would_be_biased(monkeypatch):
    target = ScriptedTarget(VOCAB)
    drafter = ScriptedDrafter(target.logits)
    with pytest.raises(
        UserError, match=r"LibraSpec: got temperature 1.0, allowed: 0 only.*use retreats=False"
    ) as error:
        speculative_generate(target, drafter, PROMPT, max_new_tokens=4, temperature=1.0, length_policy=LibraSpec())
    assert "\n" not in str(error.value)
    assert target.forwards == 0
    speculative_generate(target, drafter, PROMPT, max_new_tokens=4, length_policy=LibraSpec())
    assert retreating(monkeypatch, is_marginal=False) > 1e-4


def test_libraspec_with_marginal_laws_is_lossless(monkeypatch):
    """A block drafter's laws depend on the position alone, not on what was drawn before it."""
    laws = {i: ScriptedTarget(2, seed=40 + i).logits([i]) for i in range(12)}
    state = {}

    class Block(ScriptedDrafter):
        def propose(self, budget, choose, live=None):
            state["base"] = len(self.committed)
            return super().propose(budget, choose, live)

    drafter = Block(lambda prefix: laws[len(prefix) - state["base"]])
    assert retreating(monkeypatch, is_marginal=True, drafter=drafter) < 1e-9
