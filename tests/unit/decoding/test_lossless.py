"""Real tiny targets with real drafters: greedy identity, acceptance, and the law of sampled outputs."""

import itertools

import pytest
import torch

from specdraft.data.chat import render_prompt
from specdraft.data.vocab import VocabMap
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.sampling import Sampling, greedy
from specdraft.decoding.trace import conditional_acceptance, tau
from specdraft.decoding.vocab_policies import FrequencyList
from specdraft.models.drafter import Proposal
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import TINY_VOCAB, tiny_model, tiny_target

PROMPTS = [[5, 80, 33], list(range(40, 61)), [7]]
KINDS = ["full", "trimmed", "lowrank"]
INT8 = ["full int8", "lowrank int8"]


def make_drafter(target, kind, seed=0):
    torch.manual_seed(seed)
    counts = torch.arange(target.vocab_size) * 7 % target.vocab_size  # draft ids in another order than target ids
    vocab_map = VocabMap.from_counts(counts, size=target.vocab_size // 2) if kind == "trimmed" else None
    head = HeadConfig(kind.removesuffix(" int8"), rank=8, init="random")
    drafter = new_drafter(target, DrafterConfig(), head, vocab_map).to(target.dtype).eval().requires_grad_(False)
    drafter.head_dtype = "int8" if kind.endswith("int8") else "own"
    return drafter


class SelfDrafter:
    """The target drafting for itself on a cache of its own."""

    def __init__(self, target):
        self.target = target

    def prefill(self, taps, input_ids):
        self.cache, self.cached = self.target.new_cache(1, self.target.max_positions), []
        self.committed = input_ids[0].tolist()

    def observe(self, tokens, taps):
        self.committed += tokens.tolist()

    def propose(self, budget, choose, live=None):
        pairs = zip(self.cached, self.committed[:-1], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.cache.crop(common)
        tokens, waiting = [], self.committed[common:]
        for _ in range(budget):
            step = self.target.forward(torch.tensor([waiting]), self.cache, want_taps=False, logits_for="last")
            waiting = [int(choose(step.logits[0])[0])]
            tokens += waiting
        self.cached = self.committed + tokens[:-1]
        return Proposal(torch.tensor(tokens), list(range(-1, budget - 1)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", KINDS + INT8)
@pytest.mark.parametrize("drafted", [1, 4])
def test_greedy_identity_in_fp32(family, kind, drafted):
    target = tiny_target(family)
    drafter = make_drafter(target, kind)
    for prompt in PROMPTS:
        expected = autoregressive_generate(target, prompt, max_new_tokens=25)
        output = speculative_generate(target, drafter, prompt, max_new_tokens=25, length_policy=Fixed(drafted))
        assert output.tokens == expected.tokens
        assert output.reason == expected.reason


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_identity_with_a_live_vocabulary(kind):
    target = tiny_target()
    drafter = make_drafter(target, kind)
    policy = FrequencyList(drafter.lm_head, range(TINY_VOCAB), size=30)
    for prompt in PROMPTS:
        expected = autoregressive_generate(target, prompt, max_new_tokens=25).tokens
        output = speculative_generate(target, drafter, prompt, max_new_tokens=25, vocab_policy=policy)
        assert output.tokens == expected


def test_the_loop_alone_is_the_targets_own_greedy_decoding():
    target = tiny_target()
    ids = list(PROMPTS[1])
    for token in autoregressive_generate(target, PROMPTS[1], max_new_tokens=12).tokens:
        features = target.features(torch.tensor([ids]), torch.tensor([len(ids)]))
        assert token == int(greedy(target.teacher_logits(features.last[0, -1])))
        ids.append(token)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_target_drafting_for_itself_is_always_accepted(family):
    """A broken decoder can be lossless too: this one fails on zero acceptance, and on any key that was not dropped."""
    target = tiny_target(family)
    for prompt in PROMPTS:
        output = speculative_generate(target, SelfDrafter(target), prompt, max_new_tokens=26, length_policy=Fixed(4))
        assert output.tokens == autoregressive_generate(target, prompt, max_new_tokens=26).tokens
        assert set(conditional_acceptance([output.trace])) <= {1.0}
        if len(output.tokens) == 26:
            assert tau([output.trace]) == 5


@pytest.mark.real
def test_the_default_target_drafting_for_itself():
    """One short run of the real model: its own tokens, and nearly all drafts accepted (rounding may break a tie)."""
    target = TargetModel.load("default", dtype=torch.float32)
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": "Name three colours."}])
    expected = autoregressive_generate(target, prompt, max_new_tokens=16)
    output = speculative_generate(target, SelfDrafter(target), prompt, max_new_tokens=16, length_policy=Fixed(4))
    assert output.tokens == expected.tokens
    assert len(output.tokens) > 5
    assert conditional_acceptance([output.trace])[0] > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind):
    """Greedy identity in fp32, and one sampled output per seed, clocks read after the device."""
    target = TargetModel.from_model(tiny_model().cuda(), tap_layers=(2, 4, 5))
    drafter = make_drafter(target, kind).cuda()
    for prompt in PROMPTS:
        expected = autoregressive_generate(target, prompt, max_new_tokens=25).tokens
        assert speculative_generate(target, drafter, prompt, max_new_tokens=25, synchronize=True).tokens == expected
        sampled = [
            speculative_generate(
                target,
                drafter,
                prompt,
                max_new_tokens=25,
                temperature=1.0,
                generator=torch.Generator().manual_seed(seed),
            ).tokens
            for seed in (1, 1, 2)
        ]
        assert sampled[0] == sampled[1] != sampled[2]


def law_of_three(target, prompt, sampling):
    """Every output of three tokens, cut at the end token, with its probability."""
    law = {}
    for tokens in itertools.product(range(target.vocab_size), repeat=3):
        ids = torch.tensor([[*prompt, *tokens]])
        logits = target.teacher_logits(target.features(ids, torch.tensor([ids.shape[1]])).last[0])
        probabilities = sampling.law(logits[len(prompt) - 1 : -1])
        cut = next((i + 1 for i, token in enumerate(tokens) if token in target.eos_token_ids), 3)
        law[tokens[:cut]] = float(torch.stack([probabilities[i, tokens[i]] for i in range(cut)]).prod())
    return law


def chi_square(counts, law, total):
    """Statistic and degrees of freedom; outcomes expected fewer than 5 times are taken together."""
    rare = [key for key, p in law.items() if p * total < 5]
    cells = [(counts.get(key, 0), p * total) for key, p in law.items() if p * total >= 5]
    cells.append((sum(counts.get(key, 0) for key in rare), sum(law[key] for key in rare) * total))
    cells = [(seen, expected) for seen, expected in cells if expected > 0]
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1


@pytest.mark.parametrize("kind", ["full", "trimmed", "lowrank int8"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=4, top_p=0.95)], ids=str)
def test_sampled_outputs_follow_the_targets_law(kind, sampling):
    """Fault 33. Chi-square over outputs of three tokens of a random pair: the first three of four, so that two are drafted at once."""
    target = tiny_target(vocab=6, hidden=16, layers=3, tap_layers=(0, 1, 2))
    target.eos_token_ids = ()
    drafter, prompt, total = make_drafter(target, kind), [3, 1, 4], 1000
    law = law_of_three(target, prompt, sampling)
    assert sum(law.values()) == pytest.approx(1)
    counts, traces = {}, []
    generator = torch.Generator().manual_seed(0)
    for _ in range(total):
        output = speculative_generate(
            target,
            drafter,
            prompt,
            max_new_tokens=4,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            length_policy=Fixed(2),
            generator=generator,
        )
        key = tuple(output.tokens[:3])
        counts[key] = counts.get(key, 0) + 1
        traces.append(output.trace)
    assert set(counts) <= {key for key, p in law.items() if p > 0}
    statistic, degrees = chi_square(counts, law, total)
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5 + 4  # about 0.1 %
    assert all(0.05 < alpha < 0.95 for alpha in conditional_acceptance(traces)[:2])
    assert len(conditional_acceptance(traces)) == 2
