"""Trees and batches of real tiny targets with real drafters: greedy identity, rows as they would be alone, and the law of
sampled outputs."""

import pytest
import torch
from test_lossless import KINDS, PROMPTS, chi_square, law_of_three, make_drafter

from specdraft.data.chat import render_prompt
from specdraft.decoding.evospec import EvoSpecConfig, EvoSpecVocabulary
from specdraft.decoding.generate import autoregressive_generate, speculative_generate, speculative_generate_batch
from specdraft.decoding.length_policies import Fixed, Heuristic
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.trace import joint_acceptance, tau
from specdraft.decoding.vocab_policies import AllTokens, FrequencyList, NanoSpec
from specdraft.models.target import TargetModel
from specdraft.models.tree import Chain, Eagle2Tree, SampledTree
from specdraft.testing import tiny_model, tiny_target

TREES = [Eagle2Tree(14, 4, 4), SampledTree(12, 4, 4)]
SHAPES = [Chain(), *TREES]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request):
    """Both paths of the target; gemma3 has sliding windows (8), shorter than the texts."""
    return tiny_target(request.param, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_identity_in_fp32(family, tree, kind):
    """Every head, alone and in a batch."""
    target = tiny_target(family)
    drafter = make_drafter(target, kind)
    expected = [autoregressive_generate(target, prompt, max_new_tokens=12).tokens for prompt in PROMPTS]
    alone = speculative_generate(target, drafter, PROMPTS[1], max_new_tokens=12, tree=tree)
    assert alone.tokens == expected[1]
    outputs = speculative_generate_batch(target, drafter, PROMPTS, max_new_tokens=12, tree=tree)
    assert [output.tokens for output in outputs] == expected


class Guided:
    """A shape that grows by the target's own logits, whatever the drafter says."""

    def __init__(self, tree, target, prompt):
        self.tree, self.target, self.text = tree, target, list(prompt)
        self.depth, self.width = tree.depth, tree.width
        self.growths = []

    def begin(self, ask, ids):
        self.growths.append(GuidedGrowth(self, self.tree.begin(ask, ids)))
        return self.growths[-1]


class GuidedGrowth:
    def __init__(self, shape, growth):
        self.shape, self.growth, self.nodes, self.proposal = shape, growth, [[]], growth.proposal

    def grow(self, logits):
        texts = torch.tensor([[*self.shape.text, *node] for node in self.nodes])
        last = self.shape.target.features(texts, torch.full((len(texts),), texts.shape[1])).last[:, -1]
        level = self.growth.grow(self.shape.target.teacher_logits(last))
        if level is not None:
            self.nodes = [[*self.nodes[of], t] for t, of in zip(level[0].tolist(), level[1].tolist(), strict=True)]
        return level


def test_the_targets_own_tree_is_accepted(target):
    """As far as it holds the target's tokens. Fails on zero acceptance, and on any key, position or mask out of place."""
    prompt = PROMPTS[1]
    text = autoregressive_generate(target, prompt, max_new_tokens=12).tokens
    drafter = make_drafter(target, "full")
    for tree in (Eagle2Tree(30, 3, 4), SampledTree(12, 3, 4)):
        guided = Guided(tree, target, [*prompt, text[0]])
        output = speculative_generate(target, drafter, prompt, max_new_tokens=5, tree=guided)
        assert output.tokens == text[:5]
        proposal, paths = guided.growths[0].proposal(), []
        for token, parent in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
            paths.append([*([] if parent < 0 else paths[parent]), token])
        held = sum(text[1 : 1 + length] in paths for length in (1, 2, 3))
        assert output.trace.rounds[0].accepted == held >= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_a_row_is_what_it_would_be_alone(target, shape, temperature):
    """Fault 35, in fp64: other rows change nothing. Per-row live sets (NanoSpec) and seeds."""
    drafter = make_drafter(target, "full")
    run = {"max_new_tokens": 7, "temperature": temperature, "tree": shape}
    generators = lambda: [torch.Generator().manual_seed(b) for b in range(3)]  # noqa: E731
    vocabs = lambda: [NanoSpec(drafter.lm_head, 100) for _ in range(3)]  # noqa: E731
    outputs = speculative_generate_batch(
        target, drafter, PROMPTS, generators=generators(), vocab_policies=vocabs(), **run
    )
    for prompt, output, generator, vocab in zip(PROMPTS, outputs, generators(), vocabs(), strict=True):
        alone = speculative_generate(target, drafter, prompt, generator=generator, vocab_policy=vocab, **run)
        assert output.tokens == alone.tokens
        assert [r.accepted for r in output.trace.rounds] == [r.accepted for r in alone.trace.rounds]
        assert [r.live for r in output.trace.rounds] == [r.live for r in alone.trace.rounds]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_a_row_is_what_it_would_be_alone_with_an_int8_head(shape):
    """Fault 35: states that are quantised together share a scale, so rows of a batch must not be, nor padding with them."""
    target = tiny_target(dtype=torch.float64)
    drafter = make_drafter(target, "full int8")
    run = {"max_new_tokens": 7, "temperature": 1.0, "tree": shape}
    generators = [torch.Generator().manual_seed(b) for b in range(3)]
    outputs = speculative_generate_batch(target, drafter, PROMPTS, generators=generators, **run)
    for b, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        alone = speculative_generate(target, drafter, prompt, generator=torch.Generator().manual_seed(b), **run)
        assert output.tokens == alone.tokens
        assert [r.accepted for r in output.trace.rounds] == [r.accepted for r in alone.trace.rounds]


def test_rows_of_an_int8_head_do_not_share_a_scale():
    """One row's states are a hundred times another's: in one product the small ones would be rounded away."""
    target = tiny_target()
    drafter = make_drafter(target, "full int8")
    drafter.begin(target.features(torch.tensor([[1, 2, 3]] * 2), torch.tensor([3, 3])).taps, [[1, 2, 3, 4]] * 2, 20)
    normed = torch.randn(2, 3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    normed[1] *= 100
    together = drafter._sequences._logits(normed, {0: 2, 1: 3}, {0: None, 1: None})
    for b, count in ((0, 2), (1, 3)):
        assert torch.equal(together[b], drafter._sequences.weights.logits(normed[b, :count], None))


@pytest.mark.parametrize("kind", ["trimmed", "lowrank"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_a_length_policy_limits_the_depth_of_a_tree(kind, tree):
    """The output is the target's all the same, beside a live vocabulary."""
    target = tiny_target()
    drafter = make_drafter(target, kind)
    expected = autoregressive_generate(target, PROMPTS[1], max_new_tokens=20).tokens
    for length, most in ((Fixed(1), 1), (Heuristic(2, 2), 2)):
        policies = {"length_policy": length, "vocab_policy": NanoSpec(drafter.lm_head, 40, "ring")}
        output = speculative_generate(target, drafter, PROMPTS[1], max_new_tokens=20, tree=tree, **policies)
        assert output.tokens == expected
        assert {r.depth for r in output.trace.rounds} == set(range(most + 1)), "0 at the end, where one token is left"


def small_vocabulary(name, head, target):
    """Three of six tokens live."""
    if name == "evospec":
        return EvoSpecVocabulary(head, range(6), target.head_weight, target.norm, EvoSpecConfig(2, 1, residency=0))
    return {
        "all": lambda: AllTokens(head),
        "frequency": lambda: FrequencyList(head, range(6), 3),
        "nanospec": lambda: NanoSpec(head, 3, "ring", top=1),
    }[name]()


@pytest.mark.parametrize(
    ("tree", "kind", "vocab", "length"),
    [
        (Eagle2Tree(4, 2, 2), "full", "all", None),
        (Eagle2Tree(4, 2, 2), "trimmed", "all", None),
        (SampledTree(4, 2, 2), "full", "all", None),
        (SampledTree(4, 2, 2), "trimmed", "all", None),
        (Eagle2Tree(4, 2, 2), "full", "nanospec", None),
        (SampledTree(4, 2, 2), "lowrank", "nanospec", None),
        (Eagle2Tree(4, 2, 2), "lowrank", "frequency", None),
        (SampledTree(4, 2, 2), "full", "evospec", None),
        (SampledTree(6, 3, 2), "trimmed", "frequency", Heuristic),
    ],
    ids=str,
)
def test_sampled_outputs_follow_the_targets_law(tree, kind, vocab, length):
    """Fault 33. Chi-square over outputs of three tokens of a random pair, 250 texts at a time. (After the first token of a text
    of three a draft is one level deep: so the texts are of four tokens, and the first three are counted.) Live vocabularies, and depths
    that follow what was accepted (1 level, then 1 or 2; texts of six tokens), change nothing."""
    target = tiny_target(vocab=6, hidden=16, layers=3, tap_layers=(0, 1, 2))
    target.eos_token_ids = ()
    drafter, prompt, total, at_once = make_drafter(target, kind), [3, 1, 4], 1000, 250
    law = law_of_three(target, prompt, Sampling(1.0))
    counts, traces = {}, []
    vocabs = [small_vocabulary(vocab, drafter.lm_head, target) for _ in range(at_once)]
    for start in range(0, total, at_once):
        outputs = speculative_generate_batch(
            target,
            drafter,
            [prompt] * at_once,
            max_new_tokens=4 if length is None else 6,
            temperature=1.0,
            tree=tree,
            vocab_policies=vocabs,
            length_policies=length and [length(1, 3) for _ in range(at_once)],
            generators=[torch.Generator().manual_seed(start + i) for i in range(at_once)],
        )
        for output in outputs:
            key = tuple(output.tokens[:3])
            counts[key] = counts.get(key, 0) + 1
            traces.append(output.trace)
    statistic, degrees = chi_square(counts, law, total)
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5 + 4  # about 0.1 %
    assert 0.05 < joint_acceptance(traces)[0] < 0.95
    assert joint_acceptance(traces)[1] > 0
    assert {r.live for trace in traces for r in trace.rounds if r.drafted} == {0 if vocab == "all" else 3}


@pytest.mark.real
def test_the_default_target_with_a_tree():
    """One short run of the real model, its own tokens, alone and in a ragged batch."""
    target = TargetModel.load("default", dtype=torch.float32)
    drafter = make_drafter(target, "lowrank")
    questions = ["Name three colours.", "What is the capital of France? Answer in one word.", "Hi!"]
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": text}]) for text in questions]
    expected = [autoregressive_generate(target, prompt, max_new_tokens=12).tokens for prompt in prompts]
    assert speculative_generate(target, drafter, prompts[0], max_new_tokens=12, tree=Eagle2Tree()).tokens == expected[0]
    outputs = speculative_generate_batch(target, drafter, prompts, max_new_tokens=12, tree=Eagle2Tree())
    assert [output.tokens for output in outputs] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("tree", SHAPES, ids=lambda shape: type(shape).__name__)
def test_on_a_gpu(tree):
    """Greedy identity in fp32, alone and in a batch, and one sampled output per seed."""
    target = TargetModel.from_model(tiny_model().cuda(), tap_layers=(2, 4, 5))
    drafter = make_drafter(target, "lowrank").cuda()
    expected = [autoregressive_generate(target, prompt, max_new_tokens=20).tokens for prompt in PROMPTS]
    outputs = speculative_generate_batch(target, drafter, PROMPTS, max_new_tokens=20, tree=tree, synchronize=True)
    assert [output.tokens for output in outputs] == expected
    assert tau([output.trace for output in outputs]) >= 1
    sampled = [
        speculative_generate_batch(
            target,
            drafter,
            PROMPTS,
            max_new_tokens=20,
            temperature=1.0,
            tree=tree,
            length_policies=[Fixed(3), Fixed(1), Fixed(2)],
            generators=[torch.Generator().manual_seed(seed + b) for b in range(3)],
        )
        for seed in (1, 1, 7)
    ]
    tokens = [[output.tokens for output in outputs] for outputs in sampled]
    assert tokens[0] == tokens[1] != tokens[2]
