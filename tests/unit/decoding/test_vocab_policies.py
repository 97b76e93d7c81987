"""Live vocabularies: which rows are live when, packed copies of them, and that no policy changes the target's output."""

import itertools
import random
from collections import deque

import pytest
import torch
from scripted import ScriptedDrafter, ScriptedTarget, scripted_head
from torch.utils._python_dispatch import TorchDispatchMode

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.decoding.evospec import EvoSpecConfig, EvoSpecVocabulary
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.live_rows import RowBuffer, Verified
from specdraft.decoding.trace import conditional_acceptance
from specdraft.decoding.vocab_policies import VOCAB_POLICIES, AllTokens, FrequencyList, NanoSpec
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.tree import Chain, Eagle2Tree, SampledTree
from specdraft.testing import tiny_target

KINDS = ["full", "trimmed", "lowrank"]
TREES = [Chain(), Eagle2Tree(8, 3, 3), SampledTree(8, 3, 3)]
PROMPTS = [[5, 80, 33], list(range(40, 61))]


def make_drafter(target, kind):
    torch.manual_seed(0)
    counts = torch.arange(target.vocab_size) * 7 % target.vocab_size  # draft ids in another order than target ids
    vocab_map = VocabMap.from_counts(counts, size=target.vocab_size // 2) if kind == "trimmed" else None
    head = HeadConfig(kind, rank=8, init="random")
    return new_drafter(target, DrafterConfig(), head, vocab_map).to(target.dtype).eval().requires_grad_(False)


def make_policy(name, head, target):
    ids = range(target.vocab_size)
    if name == "evospec":
        return EvoSpecVocabulary(
            head, ids, target.head_weight, target.norm, EvoSpecConfig(core=20, tail=10, residency=1)
        )
    return {
        "all": lambda: AllTokens(head),
        "frequency": lambda: FrequencyList(head, ids, 40),
        "nanospec": lambda: NanoSpec(head, capacity=40, kind="ring"),
    }[name]()


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
@pytest.mark.parametrize("name", VOCAB_POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_vocabulary_policy_changes_a_greedy_output(name, kind, tree):
    """Every policy on every head in every shape, in fp32, over two requests in a row."""
    target = tiny_target()
    drafter = make_drafter(target, kind)
    policy = make_policy(name, drafter.lm_head, target)
    for prompt in PROMPTS:
        expected = autoregressive_generate(target, prompt, max_new_tokens=15).tokens
        output = speculative_generate(target, drafter, prompt, max_new_tokens=15, vocab_policy=policy, tree=tree)
        assert output.tokens == expected
        assert max(r.drafted > r.depth for r in output.trace.rounds) == (tree.width > 1)


@pytest.mark.parametrize("name", VOCAB_POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_live_logits_are_those_columns_of_the_head(name, kind):
    """Softmax over the live rows alone; columns go back through their ids."""
    target = tiny_target()
    head = make_drafter(target, kind).lm_head
    policy = make_policy(name, head, target)
    hidden = torch.randn(2, target.hidden_size)
    with torch.inference_mode():
        policy.begin(PROMPTS[0], torch.randn(3, target.hidden_size), target.teacher_logits)
        live = policy.live()
        if name == "all":
            assert live is None
            return
        logits = live.logits(head.project(hidden))
        ids = torch.arange(target.vocab_size) if head.target_ids() is None else head.target_ids()
        columns = [ids.tolist().index(token) for token in live.ids.tolist()]
        torch.testing.assert_close(logits, head.logits(hidden)[:, columns])
    assert all(policy.covers(token) == (token in live.ids.tolist()) for token in range(target.vocab_size))


# --- NanoSpec, as published ---


class Told(NanoSpec):
    """Notes what it was told of every round."""

    def begin(self, prompt, last, logits_of):
        super().begin(prompt, last, logits_of)
        self.told = []

    def observe(self, seen):
        self.told.append((seen.drafted, seen.logits.clone()))
        super().observe(seen)


class Watched(Told):
    """Notes the live set of every round, too."""

    def begin(self, prompt, last, logits_of):
        super().begin(prompt, last, logits_of)
        self.lives = []

    def live(self):
        live = super().live()
        self.lives.append(None if live is None else live.ids.tolist())
        return live


def top3(logits):
    return {token for row in logits for token in row.topk(3).indices.tolist()}


def run_watched(capacity=3072, kind="grow", count=30, ids=None, vocab_size=60):
    target = ScriptedTarget(vocab_size)
    policy = Watched(scripted_head(vocab_size, ids), capacity, kind)
    drafter = ScriptedDrafter(ScriptedTarget(vocab_size, seed=9).logits, ids)
    output = speculative_generate(
        target, drafter, [1, 3, 2], max_new_tokens=count, length_policy=Fixed(4), vocab_policy=policy
    )
    assert output.tokens == target.greedy([1, 3, 2], count)
    return target, policy, output


def test_nanospec_is_the_papers_set_with_one_round_of_lag():
    """Papers 2: prompt ids and the top 3 at EVERY prompt position; then drafts and the top 3 at EVERY node, rejected ones too."""
    target, policy, output = run_watched()
    live = {1, 3, 2} | top3([target.logits([1, 3, 2][: i + 1]) for i in range(3)])
    assert len(policy.told) >= len(policy.lives) - 1 >= 9
    for ids, (drafted, logits) in zip(policy.lives, [*policy.told, ([], [])], strict=False):
        assert len(ids) == len(set(ids))
        assert set(ids) == live
        live |= set(drafted) | top3(logits)
    assert any(
        len(logits) == 5 and r.accepted < 4 for (_, logits), r in zip(policy.told, output.trace.rounds, strict=False)
    )
    assert [r.live for r in output.trace.rounds if r.drafted] == [len(ids) for ids in policy.lives]


def stream(target, policy):
    """What was offered to A, in order."""
    yield from [1, 3, 2]
    yield from (t for i in range(3) for t in target.logits([1, 3, 2][: i + 1]).topk(3).indices.tolist())
    for drafted, logits in policy.told:
        yield from drafted
        yield from (t for row in logits for t in row.topk(3).indices.tolist())


def test_grow_admits_no_more_when_it_is_full():
    target, policy, _ = run_watched(capacity=20)
    kept = list(dict.fromkeys(stream(target, policy)))[:20]
    assert policy.lives[-1] == kept


@pytest.mark.parametrize("capacity", [1, 7, 20])
def test_ring_is_first_in_first_out(capacity):
    target, policy, _ = run_watched(capacity=capacity, kind="ring")
    ring = deque(maxlen=capacity)
    for token in stream(target, policy):
        if token not in ring:
            ring.append(token)
    assert set(policy.live().ids.tolist()) == set(ring)
    assert len(policy.live().ids) == capacity
    hidden = torch.randn(1, 60, dtype=torch.float64)
    assert torch.equal(policy.live().logits(hidden), hidden[:, policy.live().ids])


def test_a_request_starts_from_nothing():
    """A belongs to one request."""
    _, policy, _ = run_watched()
    first = policy.lives[0]
    assert len(policy.live().ids) > len(first)
    target = ScriptedTarget(60)
    drafter = ScriptedDrafter(ScriptedTarget(60, seed=9).logits)
    speculative_generate(target, drafter, [1, 3, 2], max_new_tokens=3, vocab_policy=policy)
    assert policy.lives[0] == first


def test_an_empty_live_set_falls_back_to_the_whole_head():
    """A trimmed head that has a row for nothing that was seen."""
    target = ScriptedTarget(60)
    seen = {1, 3, 2} | top3([target.logits([1, 3, 2][: i + 1]) for i in range(3)])
    ids = [token for token in range(60) if token not in seen][:8]
    policy = Watched(scripted_head(60, ids))
    drafter = ScriptedDrafter(target.logits, ids)
    speculative_generate(target, drafter, [1, 3, 2], max_new_tokens=12, vocab_policy=policy)
    assert policy.lives[0] is None
    assert policy.lives[1] is not None
    assert set(policy.lives[-1]) <= set(ids)


def test_a_target_that_repeats_itself_is_drafted_from_few_rows():
    """Coverage is what makes it pay: a perfect drafter keeps nearly all of its acceptance on a part of the rows."""
    target = ScriptedTarget(60)
    text = list(range(10, 22))
    target.logits = lambda prefix: torch.nn.functional.one_hot(torch.tensor(text[len(prefix) % 12]), 60).double() * 9
    policy = NanoSpec(scripted_head(60), kind="ring", capacity=16)
    output = speculative_generate(
        target, ScriptedDrafter(target.logits), [*text, *text], max_new_tokens=41, vocab_policy=policy
    )
    assert conditional_acceptance([output.trace]) == [1, 1, 1, 1]
    assert all(r.live <= 16 and r.is_covered for r in output.trace.rounds)


class Allocations(TorchDispatchMode):
    """Operators whose result is in memory that no argument was in."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))

        def places(value):
            if isinstance(value, torch.Tensor):
                return {value.untyped_storage().data_ptr()}
            return set().union(*map(places, value)) if isinstance(value, list | tuple) else set()

        if not places(result) <= places([*args, *(kwargs or {}).values()]):
            self.found.append(str(operator))
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["grow", "ring"])
def test_nothing_is_allocated_in_the_loop(kind, dtype):
    policy = NanoSpec(scripted_head(60), capacity=30, kind=kind)
    target = ScriptedTarget(60)
    states = torch.stack([target.logits([1, i]) for i in range(5)]).to(dtype)
    policy.begin([1, 2, 3], states[:3], target.teacher_logits)
    with Allocations() as allocations:
        torch.zeros(1).add(1)
        assert len(allocations.found) == 2  # it can see one
        allocations.found.clear()
        for i in range(12):
            logits = states.roll(i, dims=1)
            allocations.found.clear()
            policy.observe(Verified([i, i + 9, i + 20, 59 - i], [i], 0, logits, states, [0]))
            assert allocations.found == []
    assert len(policy.live().ids) == 30


@pytest.mark.parametrize("options", [{"capacity": 0}, {"top": 0}, {"kind": "heap"}])
def test_bad_settings_are_refused(options):
    with pytest.raises(UserError, match=r"NanoSpec: got .* allowed"):
        NanoSpec(scripted_head(10), **options)


# --- packed rows ---


def test_a_row_buffer_holds_the_rows_it_was_given():
    head = scripted_head(50, random.Random(0).sample(range(50), 30))
    buffer, expected = RowBuffer(head, 12), [None] * 12
    place = buffer._rows.data_ptr()
    numbers = random.Random(1)
    for start, count in [(0, 4), (4, 3), (2, 5), (7, 5), (0, 12), (11, 1)]:
        rows = numbers.sample(range(30), count)
        buffer.write(start, rows)
        expected[start : start + count] = rows
    buffer.replace([9, 3], [17, 18])
    expected[9], expected[3] = 17, 18
    assert buffer.ids.tolist() == head.ids[expected].tolist()
    hidden = torch.randn(1, 50, dtype=torch.float64)
    assert torch.equal(buffer.logits(hidden), head.logits(hidden)[:, expected])
    assert buffer._rows.data_ptr() == place
    buffer.clear()
    assert len(buffer.ids) == 0


@pytest.mark.parametrize(("start", "count"), [(1, 1), (0, 13)])
def test_a_row_buffer_refuses_gaps_and_overflow(start, count):
    with pytest.raises(AssertionError):
        RowBuffer(scripted_head(50), 12).write(start, list(range(count)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [8, 3072])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_the_asynchronous_gather_gives_what_the_synchronous_one_does(kind, capacity, tree):
    """Outputs, drafts and sizes of the live set in every round, on both devices; fp64, so that both say the same. Nothing but the
    draft looks at the rows, as that could wait for them."""
    seen = []
    for device in ("cpu", "cuda"):
        target = tiny_target(dtype=torch.float64)
        target = type(target).from_model(target.model.to(device), tap_layers=target.tap_layers)
        drafter = make_drafter(target, kind).to(device)
        policy = Told(drafter.lm_head, capacity, "ring")
        seen.append([])
        for prompt in PROMPTS:
            output = speculative_generate(target, drafter, prompt, max_new_tokens=25, vocab_policy=policy, tree=tree)
            drafts, rounds = [drafted for drafted, _ in policy.told], output.trace.rounds
            seen[-1].append((output.tokens, drafts, [(r.accepted, r.live) for r in rounds]))
    assert seen[0] == seen[1]


def test_every_policy_says_whether_its_rows_belong_to_a_request():
    assert {name: policy.is_per_request for name, policy in VOCAB_POLICIES.items()} == {
        "all": False,
        "frequency": False,
        "nanospec": True,
        "evospec": True,
    }


def test_the_account_of_a_round_knows_what_could_have_been_drafted():
    """Fault 29: a token outside the live rows is a miss."""
    target = ScriptedTarget(8)
    policy = FrequencyList(scripted_head(8), [0, 1, 2, 3], 4)
    output = speculative_generate(
        target, ScriptedDrafter(target.logits), [1, 2], max_new_tokens=40, vocab_policy=policy, length_policy=Fixed(2)
    )
    tokens = iter(output.tokens[1:])
    for r in output.trace.rounds:
        new = list(itertools.islice(tokens, r.emitted))
        assert all(token < 4 for token in new[: r.accepted])
        if r.emitted > r.accepted:
            assert r.is_covered == (new[-1] < 4)
        assert r.live == (4 if r.drafted else 0)
    assert {r.is_covered for r in output.trace.rounds} == {True, False}
