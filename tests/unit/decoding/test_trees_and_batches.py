"""Trees and batches in the decode loop, on scripted targets and drafters whose laws are known exactly."""

import itertools
import time

import pytest
import torch
from scripted import Oracle, ScriptedDrafter, ScriptedRows, ScriptedTarget, exact_law, total_variation

from specdraft.config import UserError
from specdraft.decoding import generate as module
from specdraft.decoding import sampling, verify
from specdraft.decoding.generate import speculative_generate, speculative_generate_batch
from specdraft.decoding.length_policies import Fixed, Heuristic
from specdraft.decoding.live_rows import FixedRows
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.trace import conditional_acceptance, joint_acceptance, tau
from specdraft.decoding.vocab_policies import AllTokens
from specdraft.models.drafter import Ask, Proposal
from specdraft.models.heads import FullHead
from specdraft.models.tree import Chain, Eagle2Tree, SampledTree

PROMPT = [1, 2, 0]
TREES = [Eagle2Tree(9, 3, 3), Eagle2Tree(5, 5, 1), SampledTree(9, 3, 3), SampledTree(12, 2, 10)]
SHAPES = [Chain(), *TREES]


def random_law(target):
    return ScriptedTarget(target.vocab_size, seed=99).logits


def make_rows(target, kind):
    """The target itself; another law; the target over half of the vocabulary, in an odd order."""
    if kind == "oracle":
        return ScriptedRows(target.logits)
    if kind == "random":
        return ScriptedRows(random_law(target))
    return ScriptedRows(target.logits, ids=[5, 2, 7, 0])


# --- trees: greedy ---


@pytest.mark.parametrize("kind", ["oracle", "random", "half"])
@pytest.mark.parametrize("tree", SHAPES, ids=lambda shape: type(shape).__name__)
def test_greedy_output_is_the_targets(kind, tree):
    """Faults 33, 34: with any branches, wherever the text ends. The scripted target's logits depend on all that a token sees: a
    node that sees another branch, a wrong position, or a slot that was not moved to its place changes what follows."""
    for seed, count in itertools.product(range(3), (1, 2, 3, 20)):
        target = ScriptedTarget(vocab_size=8, eos=(5, 7), seed=seed)
        output = speculative_generate(target, make_rows(target, kind), PROMPT, max_new_tokens=count, tree=tree)
        assert output.tokens == target.greedy(PROMPT, count)


@pytest.mark.parametrize("tree", TREES[:3], ids=str)
def test_a_tree_of_the_targets_own_tokens_is_accepted_to_its_depth(tree):
    """Fails on zero acceptance."""
    target = ScriptedTarget(vocab_size=8)
    depth = tree.depth
    output = speculative_generate(
        target, make_rows(target, "oracle"), PROMPT, max_new_tokens=1 + 3 * (depth + 1), tree=tree
    )
    if isinstance(tree, Eagle2Tree) and tree.top_k > 1:
        assert tau([output.trace]) > 1.5  # the likeliest nodes need not be the deepest
    else:
        assert tau([output.trace]) == depth + 1
        assert conditional_acceptance([output.trace]) == [1.0] * depth
        assert target.forwards == 1 + 3


def test_branches_pay():
    """A law that is right in its second guess: a chain gets nothing, a tree all."""
    target = ScriptedTarget(vocab_size=8)

    def second_best(prefix):
        logits = target.logits(prefix)
        best = logits.argsort(descending=True)
        return logits.index_copy(0, best[:2], logits[best[:2]].flip(0))

    taus = {}
    for tree in (Chain(), Eagle2Tree(60, 4, 8), SampledTree(60, 4, 15)):
        output = speculative_generate(target, ScriptedRows(second_best), PROMPT, max_new_tokens=16, tree=tree)
        assert output.tokens == target.greedy(PROMPT, 16)
        taus[type(tree)] = tau([output.trace])
    assert taus[Chain] == 1
    assert taus[Eagle2Tree] > 2.5
    assert taus[SampledTree] > 2


@pytest.mark.parametrize("tree", SHAPES, ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_output_ends_with_the_context(tree, room):
    target = ScriptedTarget(vocab_size=8, max_positions=len(PROMPT) + room)
    output = speculative_generate(target, make_rows(target, "oracle"), PROMPT, max_new_tokens=40, tree=tree)
    assert output.tokens == target.greedy(PROMPT, room)
    assert output.reason == "context"


def test_the_trace_of_a_tree():
    target = ScriptedTarget(vocab_size=8)
    tree = Eagle2Tree(9, 3, 3)
    output = speculative_generate(target, make_rows(target, "random"), PROMPT, max_new_tokens=40, tree=tree)
    rounds = output.trace.rounds
    assert rounds[0].drafted == 9
    assert all(r.depth <= 3 and r.accepted <= r.depth for r in rounds)
    assert output.trace.tokens == 40 == 1 + sum(r.emitted for r in rounds)
    assert len(joint_acceptance([output.trace])) == max(r.depth for r in rounds)
    assert tau([output.trace]) == pytest.approx(1 + sum(joint_acceptance([output.trace])))


def test_a_length_policy_says_how_deep_a_tree_is():
    target = ScriptedTarget(vocab_size=8)
    for most in (0, 1, 2, 9):
        output = speculative_generate(
            target,
            make_rows(target, "random"),
            PROMPT,
            max_new_tokens=12,
            tree=SampledTree(9, 3, 3),
            length_policy=Fixed(most),
        )
        assert output.tokens == target.greedy(PROMPT, 12)
        assert max(r.depth for r in output.trace.rounds) == min(most, 3)


# --- trees: sampled, by enumeration ---


def enumerate_with(monkeypatch, oracle: Oracle):
    for place in (module, sampling, verify):
        monkeypatch.setattr(place, "draw", oracle.draw)
    monkeypatch.setattr(verify, "uniform", oracle.uniform)


def law_of_texts(target, sampler, count):
    law = {(): 1.0}
    for _ in range(count):
        law = {
            (*prefix, token): probability * p
            for prefix, probability in law.items()
            for token, p in enumerate(sampler.law(target.logits(PROMPT + list(prefix))).tolist())
        }
    return {key: p for key, p in law.items() if p > 0}


@pytest.mark.parametrize("tree", [Eagle2Tree(2, 1, 2), SampledTree(2, 1, 2)], ids=str)
@pytest.mark.parametrize("sampler", [Sampling(1.0), Sampling(0.7, top_k=2)], ids=str)
def test_the_law_of_whole_outputs_is_the_targets(monkeypatch, tree, sampler):
    """Fault 33, papers 9.2: deterministic siblings and siblings without replacement, through the loop."""
    target = ScriptedTarget(vocab_size=3, seed=5)

    def program(oracle):
        enumerate_with(monkeypatch, oracle)
        output = speculative_generate(
            target,
            ScriptedRows(random_law(target)),
            PROMPT,
            max_new_tokens=3,
            temperature=sampler.temperature,
            top_k=sampler.top_k,
            tree=tree,
        )
        return tuple(output.tokens)

    assert total_variation(exact_law(program), law_of_texts(target, sampler, 3)) < 1e-9


def grown(tree, law, budget):
    """A whole tree after PROMPT; its choices are the oracle's."""
    growth, nodes = tree.begin(Ask(budget, Sampling(1.0).choose), None), [PROMPT]
    while (level := growth.grow(torch.stack([law(node) for node in nodes]))) is not None:
        nodes = [[*nodes[of], t] for t, of in zip(level[0].tolist(), level[1].tolist(), strict=True)]
    return growth.proposal()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tree", [Eagle2Tree(4, 2, 3), SampledTree(4, 2, 2), SampledTree(3, 2, 2)], ids=str)
def test_two_levels_are_lossless(monkeypatch, tree, seed):
    """The joint law of the first two tokens: how a level is spread depends on the tokens above it, and on nothing below."""
    target, drafter = ScriptedTarget(3, seed=seed), ScriptedTarget(3, seed=seed + 50)
    p = lambda prefix: Sampling(1.0).law(target.logits(prefix))  # noqa: E731

    def program(oracle):
        enumerate_with(monkeypatch, oracle)
        proposal = grown(tree, drafter.logits, 2)
        tokens, paths = proposal.tokens.tolist(), []
        for token, parent in zip(tokens, proposal.parents, strict=True):
            paths.append([*(PROMPT if parent < 0 else paths[parent]), token])
        verdict = verify.verify(lambda row: p([PROMPT, *paths][row]), tokens, proposal.parents, proposal.q)
        committed = [*(tokens[node] for node in verdict.path), verdict.token][:2]
        if len(committed) < 2:
            committed.append(int(oracle.draw(p([*PROMPT, *committed]))))
        return tuple(committed)

    assert total_variation(exact_law(program), law_of_texts(target, Sampling(1.0), 2)) < 1e-9


def test_pruning_sampled_tokens_by_their_probability_is_seen(monkeypatch):
    """papers 9.4, and why SampledTree proposes all that it draws: of two tokens only the likelier is verified."""
    p, q = torch.tensor([0.6, 0.4]).double(), torch.tensor([0.7, 0.3]).double()

    def program(oracle):
        enumerate_with(monkeypatch, oracle)
        drawn = [int(oracle.draw(q)) for _ in range(2)]
        best = max(drawn, key=lambda x: float(q[x]))
        verdict = verify.verify(lambda row: p, [best], [-1], [q])
        return best if verdict.path else verdict.token

    assert total_variation(exact_law(program), dict(enumerate(p.tolist()))) > 0.05


# --- batches ---

PROMPTS = [[1, 3, 2], [4], [0, 1, 2, 3, 4, 5, 6, 1, 1], [2, 2], [7, 1, 3]]


class Half(AllTokens):
    """A live set for one row."""

    is_per_request = True

    def __init__(self, ids):
        super().__init__()
        head = FullHead(8, 8).double()
        head.init_from(torch.eye(8))
        self.rows = FixedRows(head, ids)

    def live(self):
        return self.rows


def options_of(count, sampled, depth):
    """Per-row policies and seeds, made anew for every run."""
    policies = [Fixed(depth), Heuristic(2, 4), Fixed(0), Fixed(1), Heuristic(1, 9)][:count]
    vocabs = [AllTokens(), Half([3, 1]), AllTokens(), Half([0, 2, 4, 6]), AllTokens()][:count]
    generators = [torch.Generator().manual_seed(100 + b) for b in range(count)] if sampled else None
    return policies, vocabs, generators


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["oracle", "random"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_a_row_is_what_it_would_be_alone(shape, kind, temperature):
    """Fault 35, papers 9.8: ragged prompts, drafts, acceptance and endings (end tokens, length, context); rows leave one by
    one. Every drafter checks what it is told."""
    target = ScriptedTarget(vocab_size=8, eos=(5,), max_positions=24, seed=33)
    run = {"max_new_tokens": 16, "temperature": temperature, "tree": shape}
    policies, vocabs, generators = options_of(5, temperature > 0, shape.depth)
    together = speculative_generate_batch(
        target,
        make_rows(target, kind),
        PROMPTS,
        length_policies=policies,
        vocab_policies=vocabs,
        generators=generators,
        **run,
    )
    policies, vocabs, generators = options_of(5, temperature > 0, shape.depth)
    reasons = set()
    for b, prompt in enumerate(PROMPTS):
        alone = speculative_generate(
            target,
            make_rows(target, kind),
            prompt,
            length_policy=policies[b],
            vocab_policy=vocabs[b],
            generator=generators[b] if generators else None,
            **run,
        )
        assert together[b].tokens == alone.tokens
        assert together[b].reason == alone.reason
        counts = [(r.drafted, r.accepted, r.emitted, r.levels, r.live) for r in together[b].trace.rounds]
        assert counts == [(r.drafted, r.accepted, r.emitted, r.levels, r.live) for r in alone.trace.rounds]
        assert temperature > 0 or alone.tokens == target.greedy(prompt, 16)
        reasons.add(alone.reason)
    assert reasons == {"length", "context", "eos"} or temperature > 0


def test_the_target_alone_in_a_batch():
    target = ScriptedTarget(vocab_size=8, eos=(5,), max_positions=24, seed=33)
    outputs = speculative_generate_batch(target, None, PROMPTS, max_new_tokens=16)
    assert [output.tokens for output in outputs] == [target.greedy(prompt, 16) for prompt in PROMPTS]
    assert target.forwards == max(len(output.tokens) for output in outputs)


def test_the_seconds_of_a_batch_are_shared():
    """Sums over rows are times of the clock, so that rates of batches and of single texts are made by one rule."""
    target = ScriptedTarget(vocab_size=8)
    start = time.perf_counter()
    outputs = speculative_generate_batch(target, make_rows(target, "random"), PROMPTS, max_new_tokens=20)
    seconds = time.perf_counter() - start
    assert 0.8 * seconds < sum(output.trace.seconds for output in outputs) <= seconds
    for output in outputs:
        parts = output.trace.prefill_s + output.trace.draft_prefill_s + sum(r.seconds for r in output.trace.rounds)
        assert 0.8 * output.trace.seconds < parts <= output.trace.seconds * 1.001


def test_bad_batches_get_one_clear_line():
    target = ScriptedTarget()
    rows, one = ScriptedRows(target.logits), ScriptedDrafter(target.logits)
    shared, live = Fixed(2), Half.__new__(Half)
    for drafter, options, message in [
        (rows, {"prompts": []}, "prompts: got none"),
        (rows, {"length_policies": [shared]}, "length_policies: got 1, allowed: 2"),
        (rows, {"length_policies": [shared, shared]}, "length_policies: got the same object for two prompts"),
        (rows, {"vocab_policies": [live, live]}, "vocab_policies: got the same object for two prompts"),
        (rows, {"generators": [torch.Generator()]}, "generators: got 1, allowed: 2"),
        (rows, {"prompts": [[1], []]}, "prompt: got token ids of shape"),
        (one, {}, "drafter ScriptedDrafter: got a batch of 2 prompts, allowed: 1"),
        (
            one,
            {"prompts": [[1]], "tree": Eagle2Tree()},
            r"drafter ScriptedDrafter: got a tree \(Eagle2Tree\), allowed: chains",
        ),
    ]:
        with pytest.raises(UserError, match=message) as error:
            speculative_generate_batch(target, drafter, **{"prompts": [[1], [2]], "max_new_tokens": 4, **options})
        assert "\n" not in str(error.value)


def test_a_drafter_that_breaks_its_word_is_stopped():
    target = ScriptedTarget()
    for parents in ([-1, 1], [-1, 0, 1], [0], [-1, -1]):
        rows = ScriptedRows(target.logits)
        tokens = torch.zeros(len(parents), dtype=torch.int64)
        rows.draft = lambda asks, shape, t=tokens, p=parents: [Proposal(t, p)]
        with pytest.raises(AssertionError, match=r"not a tree|budget|not a chain"):
            speculative_generate(target, rows, PROMPT, max_new_tokens=9, length_policy=Fixed(2))
