"""The decode loop on scripted targets and drafters, whose laws are known exactly, and on a tiny real pair."""

import itertools
import random

import pytest
import torch
from scripted import Oracle, ScriptedDrafter, ScriptedTarget, exact_law, total_variation

from specdraft.config import UserError
from specdraft.decoding import generate as module
from specdraft.decoding import sampling, verify
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.trace import conditional_acceptance, tau
from specdraft.models.drafter import Proposal

PROMPT = [1, 3, 2]


def oracle_drafter(target):
    """The target itself."""
    return ScriptedDrafter(target.logits)


def random_drafter(target):
    return ScriptedDrafter(ScriptedTarget(target.vocab_size, seed=99).logits)


def wrong_drafter(target):
    """Never the target's own token."""
    return ScriptedDrafter(lambda prefix: -target.logits(prefix))


def half_blind_drafter(target):
    """Right where it can be, over a part of the vocabulary in an odd order."""
    return ScriptedDrafter(target.logits, ids=[target.vocab_size - 1, 1])


def silent_drafter(target):
    drafter = ScriptedDrafter(target.logits)
    drafter.propose = lambda budget, choose, live=None: Proposal(torch.empty(0, dtype=torch.int64), [])
    return drafter


def brief_drafter(target):
    """Gives up after one token."""
    drafter = ScriptedDrafter(target.logits)
    propose = drafter.propose
    drafter.propose = lambda budget, choose, live=None: propose(1, choose, live)
    return drafter


DRAFTERS = [oracle_drafter, random_drafter, wrong_drafter, half_blind_drafter, silent_drafter, brief_drafter]


# --- greedy: identity, and where a text ends ---


@pytest.mark.parametrize("make", DRAFTERS)
@pytest.mark.parametrize("drafted", [0, 1, 3, 6])
@pytest.mark.parametrize("count", [1, 2, 5, 24])
def test_greedy_output_is_the_targets_and_of_the_asked_length(make, drafted, count):
    """Faults 33, 34: no drafter changes the output; max_new_tokens is met exactly. A key left over from a rejected
    token would change the scripted target's logits (papers 9.8)."""
    target = ScriptedTarget()
    output = speculative_generate(target, make(target), PROMPT, max_new_tokens=count, length_policy=Fixed(drafted))
    assert output.tokens == target.greedy(PROMPT, count)
    assert len(output.tokens) == output.trace.tokens == count
    assert output.reason == "length"
    assert output.tokens == autoregressive_generate(target, PROMPT, max_new_tokens=count).tokens


def test_a_drafter_that_is_the_target_is_always_accepted():
    """Lossless but never accepted is broken too: this fails on zero acceptance, and on any misplaced token."""
    target = ScriptedTarget()
    output = speculative_generate(target, oracle_drafter(target), PROMPT, max_new_tokens=41, length_policy=Fixed(4))
    assert tau([output.trace]) == 5
    assert conditional_acceptance([output.trace]) == [1, 1, 1, 1]
    assert target.forwards == 1 + 8


def test_a_wrong_drafter_is_never_accepted():
    target = ScriptedTarget()
    output = speculative_generate(target, wrong_drafter(target), PROMPT, max_new_tokens=10, length_policy=Fixed(4))
    assert tau([output.trace]) == 1
    assert conditional_acceptance([output.trace])[0] == 0


@pytest.mark.parametrize("make", DRAFTERS)
@pytest.mark.parametrize("seed", range(8))
def test_the_output_ends_at_the_first_of_several_end_tokens(make, seed):
    """Fault 34: any of several EOS ids ends the text, wherever in a round it comes; nothing stands after it."""
    target = ScriptedTarget(vocab_size=8, eos=(5, 7), seed=seed)
    expected = target.greedy(PROMPT, 60)
    assert expected[-1] in target.eos_token_ids
    output = speculative_generate(target, make(target), PROMPT, max_new_tokens=60, length_policy=Fixed(4))
    assert output.tokens == expected
    assert output.reason == "eos"
    assert output.trace.tokens == len(expected) == 1 + sum(r.emitted for r in output.trace.rounds)
    assert all(r.accepted <= r.emitted <= r.accepted + 1 for r in output.trace.rounds)


def test_stop_ids_end_the_output():
    target = ScriptedTarget(vocab_size=8)
    plain = target.greedy(PROMPT, 40)
    stop = plain[6]
    output = speculative_generate(target, oracle_drafter(target), PROMPT, max_new_tokens=40, stop_ids=[stop])
    assert output.tokens == plain[: plain.index(stop) + 1]
    assert output.reason == "stop"


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join("abcdefgh"[i] for i in ids)


@pytest.mark.parametrize("make", DRAFTERS)
@pytest.mark.parametrize("start", [0, 4, 9])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_stop_string_ends_the_output_at_the_token_that_completes_it(make, start, length):
    target = ScriptedTarget(vocab_size=8)
    target.tokenizer = Letters()
    plain = target.greedy(PROMPT, 40)
    text = target.tokenizer.decode(plain)
    stop = text[start : start + length]
    output = speculative_generate(target, make(target), PROMPT, max_new_tokens=40, stop=["nowhere", stop])
    assert output.tokens == plain[: text.index(stop) + length]
    assert output.reason == "stop"


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("make", [oracle_drafter, wrong_drafter])
def test_the_output_ends_with_the_context(make, room):
    target = ScriptedTarget(max_positions=len(PROMPT) + room)
    output = speculative_generate(target, make(target), PROMPT, max_new_tokens=40)
    assert output.tokens == target.greedy(PROMPT, room)
    assert (len(output.tokens), output.reason) == (room, "context")


def test_the_prompt_may_be_a_tensor():
    target = ScriptedTarget()
    expected = target.greedy(PROMPT, 5)
    for prompt in (torch.tensor(PROMPT), torch.tensor([PROMPT])):
        assert autoregressive_generate(target, prompt, max_new_tokens=5).tokens == expected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: got token ids of shape .0."),
        ([[1, 2], [1, 2]], {}, "prompt: got token ids of shape"),
        ([1] * 200, {}, "prompt: got 200 tokens, allowed: up to 199"),
        ([1, 4], {}, "prompt: got token ids from 1 to 4, allowed: 0 to 3"),
        ([-1, 2], {}, "prompt: got token ids from -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ([1], {"stop": ["x"]}, "no tokenizer"),
        ([1], {"temperature": -1}, "temperature: got -1"),
    ],
)
def test_bad_input_gets_one_clear_line(prompt, options, message):
    target = ScriptedTarget()
    with pytest.raises(UserError, match=message) as error:
        speculative_generate(target, oracle_drafter(target), prompt, **{"max_new_tokens": 4, **options})
    assert "\n" not in str(error.value)
    assert target.forwards == 0


def test_a_policy_that_would_bias_sampling_is_refused_above_temperature_0():
    class Peeking(Fixed):
        reads_samples = True
        bias = "it drops what it does not like"

    target = ScriptedTarget()
    speculative_generate(target, oracle_drafter(target), PROMPT, max_new_tokens=4, length_policy=Peeking(2))
    with pytest.raises(UserError, match=r"Peeking: got temperature 1.0, allowed: 0 only, .*: it drops what"):
        speculative_generate(
            target, oracle_drafter(target), PROMPT, max_new_tokens=4, temperature=1.0, length_policy=Peeking(2)
        )


def test_more_tokens_than_asked_are_not_taken_for_granted():
    target = ScriptedTarget()
    drafter = oracle_drafter(target)
    propose = drafter.propose
    drafter.propose = lambda budget, choose, live=None: propose(budget + 1, choose, live)
    with pytest.raises(AssertionError, match="budget"):
        speculative_generate(target, drafter, PROMPT, max_new_tokens=20)


# --- sampled: the law of whole outputs, by enumeration ---
# The prefill gives a text's first token, and a round at least one of the target's own: k tokens are drafted only where k + 2 are asked for.


def output_law(monkeypatch, make, sampler: Sampling, drafted, vocab=4, eos=()):
    """-> (target, law of whole outputs of `drafted` + 2 tokens), every random decision enumerated."""
    target, longest = ScriptedTarget(vocab_size=vocab, eos=eos, seed=5), []

    def program(oracle: Oracle):
        for place in (module, sampling, verify):
            monkeypatch.setattr(place, "draw", oracle.draw)
        monkeypatch.setattr(verify, "uniform", oracle.uniform)
        output = speculative_generate(
            target,
            make(target),
            prompt_of(target),
            max_new_tokens=drafted + 2,
            temperature=sampler.temperature,
            top_k=sampler.top_k,
            top_p=sampler.top_p,
            length_policy=Fixed(drafted),
        )
        longest.append(max((r.drafted for r in output.trace.rounds), default=0))
        return tuple(output.tokens)

    law = exact_law(program)
    assert max(longest) == (1 if make is brief_drafter else drafted)
    return target, law


def prompt_of(target):
    return [token % target.vocab_size for token in PROMPT]


def naive_law(target, sampler, count):
    law = {(): 1.0}
    for _ in range(count):
        longer = {}
        for prefix, probability in law.items():
            if prefix and prefix[-1] in target.eos_token_ids:
                longer[prefix] = probability
                continue
            for token, p in enumerate(sampler.law(target.logits(prompt_of(target) + list(prefix))).tolist()):
                longer[(*prefix, token)] = probability * p
        law = longer
    return {key: p for key, p in law.items() if p > 0}


@pytest.mark.parametrize("make", [oracle_drafter, random_drafter, half_blind_drafter, brief_drafter])
@pytest.mark.parametrize(("drafted", "vocab"), [(1, 4), (2, 3), (3, 3)])
@pytest.mark.parametrize("sampler", [Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.5, top_p=0.8)], ids=str)
def test_the_law_of_outputs_is_the_targets(monkeypatch, make, drafted, vocab, sampler):
    """Fault 33: drafted, corrected and bonus tokens all go through the same processor; end tokens included."""
    target, law = output_law(monkeypatch, make, sampler, drafted, vocab, eos=(vocab - 2,))
    assert total_variation(law, naive_law(target, sampler, drafted + 2)) < 1e-9


@pytest.mark.parametrize("draft_at", [0.0, 0.5, 2.0])
def test_a_drafter_may_sample_at_another_temperature(monkeypatch, draft_at):
    """At 0 its tokens are deterministic children of a sampled target."""

    def make(target):
        drafter = random_drafter(target)
        propose = drafter.propose
        drafter.propose = lambda budget, choose, live=None: propose(budget, Sampling(draft_at).choose, live)
        return drafter

    target, law = output_law(monkeypatch, make, Sampling(1.0), drafted=2, vocab=3)
    assert total_variation(law, naive_law(target, Sampling(1.0), 4)) < 1e-9


def test_the_enumeration_sees_a_bonus_token_without_the_processor(monkeypatch):
    """Fault 33, made on purpose."""
    careless = verify.verify

    def wrong(law_of, tokens, parents, q, ids, generator):
        verdict = careless(law_of, tokens, parents, q, ids, generator)
        if len(verdict.path) < len(tokens):
            return verdict
        return verify.Verdict(verdict.path, int(verify.draw(torch.full((4,), 0.25))))

    monkeypatch.setattr(module, "verify", wrong)
    sampler = Sampling(1.0, top_k=2)
    target, law = output_law(monkeypatch, oracle_drafter, sampler, drafted=1)
    assert total_variation(law, naive_law(target, sampler, 3)) > 0.1


def test_a_seed_gives_the_same_output_in_any_order():
    """Fault 35: sampling is reproducible by seed alone."""
    target = ScriptedTarget(vocab_size=50)
    prompts = [[i, 7, 2 * i] for i in range(6)]

    def run(order):
        drafter, outputs = random_drafter(target), {}
        for i in order:
            torch.rand(i)  # the global generator must not matter
            outputs[i] = speculative_generate(
                target,
                drafter,
                prompts[i],
                max_new_tokens=9,
                temperature=1.0,
                generator=torch.Generator().manual_seed(i),
            ).tokens
        return outputs

    forwards = run(range(6))
    assert forwards == run(random.Random(1).sample(range(6), 6))
    assert len({tuple(tokens) for tokens in forwards.values()}) == 6


# --- traces ---


def test_the_trace_accounts_for_all_tokens_and_all_time():
    target = ScriptedTarget()
    output = speculative_generate(target, random_drafter(target), PROMPT, max_new_tokens=30, length_policy=Fixed(3))
    trace = output.trace
    assert trace.prompt_tokens == 3
    assert trace.tokens == 30 == 1 + sum(r.emitted for r in trace.rounds)
    assert all(r.accepted <= r.drafted <= 3 for r in trace.rounds)
    assert min(itertools.chain.from_iterable((r.draft_s, r.verify_s, r.sample_s) for r in trace.rounds)) > 0
    parts = trace.prefill_s + trace.draft_prefill_s + sum(r.seconds for r in trace.rounds)
    assert 0.9 * trace.seconds < parts <= trace.seconds


def test_the_drafter_is_not_asked_when_only_one_token_is_left():
    target = ScriptedTarget()
    output = speculative_generate(target, oracle_drafter(target), PROMPT, max_new_tokens=8, length_policy=Fixed(4))
    assert [r.drafted for r in output.trace.rounds] == [4, 1]
    output = speculative_generate(target, oracle_drafter(target), PROMPT, max_new_tokens=7, length_policy=Fixed(4))
    assert [r.drafted for r in output.trace.rounds] == [4, 0]
