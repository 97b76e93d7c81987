"""Online alignment in the decoder: what an observer is told, that nothing but the draft changes, topic switches, sessions."""

import itertools
import json
import random
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripted import ScriptedTarget
from test_lossless import PROMPTS, chi_square, law_of_three, make_drafter

from specdraft.config import UserError
from specdraft.decoding.evospec import EvoSpecConfig, EvoSpecVocabulary
from specdraft.decoding.generate import autoregressive_generate, speculative_generate, speculative_generate_batch
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.vocab_policies import FrequencyList, NanoSpec
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.eagle3_layer import Eagle3Config
from specdraft.models.heads import HeadConfig
from specdraft.models.tree import Eagle2Tree
from specdraft.testing import TINY_VOCAB, tiny_target
from specdraft.training.online import OnlineAlignment, OnlineConfig
from specdraft.training.sessions import load_session, save_session

ONLINE = OnlineConfig(every=4, windows=2, window=16, capacity=400, context=16, lr=1e-2, across_requests=True)


class Ear:
    """Keeps what it is told."""

    def __init__(self):
        self.begun, self.rounds = [], []

    def begin(self, texts):
        self.begun.append(texts)

    def observe(self, rounds):
        self.rounds.append(rounds)


class Adversary(Ear):
    """Other weights after every round."""

    def __init__(self, drafter):
        super().__init__()
        self.drafter = drafter

    def observe(self, rounds):
        super().observe(rounds)
        with torch.no_grad():
            for parameter in self.drafter.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        self.drafter.refresh()


# --- what an observer is told


@pytest.mark.parametrize("shape", [None, Eagle2Tree(6, 3, 2)], ids=["chain", "tree"])
def test_an_observer_is_told_the_text_and_the_targets_laws(shape):
    target = tiny_target()
    drafter, ear = make_drafter(target, "full"), Ear()
    policy = NanoSpec(drafter.lm_head, capacity=40)
    for prompt in PROMPTS:
        ear.begun.clear(), ear.rounds.clear()
        output = speculative_generate(
            target, drafter, prompt, max_new_tokens=20, tree=shape, vocab_policy=policy, observer=ear
        )
        text = prompt + output.tokens
        features = target.features(torch.tensor([text]), torch.tensor([len(text)]))
        logits = target.teacher_logits(features.last[0])
        ((begun,),) = ear.begun
        assert begun.tokens == prompt
        torch.testing.assert_close(begun.taps, features.taps[0, : len(prompt)], atol=1e-4, rtol=1e-4)
        place, hits, drafted = len(prompt), [], 0
        assert len(ear.rounds) == len(output.trace.rounds)
        for (seen,), done in zip(ear.rounds, output.trace.rounds, strict=True):
            n = len(seen.tokens)
            assert n == done.emitted == len(seen.alpha) == len(seen.hits)
            assert seen.tokens == text[place : place + n]
            torch.testing.assert_close(seen.taps, features.taps[0, place : place + n], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(seen.logits, logits[place : place + n], atol=1e-3, rtol=1e-3)
            p = logits[place : place + n].softmax(-1)
            for j in range(min(done.accepted, n)):  # the token was drafted: at least its own probability
                assert seen.alpha[j] >= float(p[j, text[place + j + 1]]) - 1e-4
            drafted += sum(alpha == alpha for alpha in seen.alpha)
            hits += seen.hits
            place += n
        assert place == len(text) - 1
        assert drafted > 0
        assert 0 < sum(hits) < len(hits)


def test_alpha_is_the_overlap_of_the_laws_when_sampling():
    target = tiny_target(vocab=6, hidden=16, layers=3, tap_layers=(0, 1, 2))
    drafter, ear = make_drafter(target, "trimmed"), Ear()
    accepted = tried = expected = 0.0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        options = {"max_new_tokens": 12, "temperature": 1.0, "length_policy": Fixed(1), "generator": generator}
        trace = speculative_generate(target, drafter, [3, 1, 4], observer=ear, **options).trace
        accepted += sum(r.accepted for r in trace.rounds if r.drafted)
        tried += sum(r.drafted for r in trace.rounds)
    firsts = [seen.alpha[0] for (seen,) in ear.rounds if seen.alpha[0] == seen.alpha[0]]
    expected = sum(firsts)
    assert len(firsts) == tried
    assert abs(accepted - expected) < 4 * (tried * 0.25) ** 0.5
    assert 0 < expected < tried


def test_rows_of_a_batch_are_told_as_they_would_be_alone():
    target = tiny_target()
    drafter = make_drafter(target, "full")

    def told(prompts):
        ear = Ear()
        speculative_generate_batch(target, drafter, prompts, max_new_tokens=15, observer=ear)
        (texts,) = ear.begun
        by_row = {text.row: (text.tokens, []) for text in texts}
        for rounds in ear.rounds:
            for seen in rounds:
                by_row[seen.row][1].append((seen.tokens, seen.alpha))
        return by_row

    together = told(PROMPTS)
    assert len(together) == 3
    for row, prompt in enumerate(PROMPTS):
        begun, alone = told([prompt])[0]
        assert together[row][0] == begun == prompt
        assert len(together[row][1]) == len(alone) > 5
        for (tokens, alpha), (same_tokens, same_alpha) in zip(together[row][1], alone, strict=True):
            assert tokens == same_tokens
            assert alpha == pytest.approx(same_alpha, abs=1e-7, rel=1e-3, nan_ok=True)


# --- losslessness


@pytest.mark.parametrize("kind", ["full", "trimmed", "lowrank"])
@pytest.mark.parametrize("learner", ["off", "lora", "full", "adversary"])
@pytest.mark.parametrize("vocabulary", [None, "frequency"])
def test_greedy_output_is_identical_with_adaptation_on_off_and_adversarial(kind, learner, vocabulary):
    target = tiny_target()
    drafter = make_drafter(target, kind)
    before = drafter.fc.weight.clone()
    if learner == "off":
        observer = None
    elif learner == "adversary":
        observer = Adversary(drafter)
    else:
        config = replace(ONLINE, method=learner, head=learner == "full" or kind == "lowrank", guard_share=0.0)
        observer = OnlineAlignment(drafter, TINY_VOCAB, config)
    policy = FrequencyList(drafter.lm_head, range(TINY_VOCAB), size=60) if vocabulary else None
    for prompt in PROMPTS:
        expected = autoregressive_generate(target, prompt, max_new_tokens=30).tokens
        output = speculative_generate(
            target, drafter, prompt, max_new_tokens=30, vocab_policy=policy, observer=observer
        )
        assert output.tokens == expected
    assert torch.equal(drafter.fc.weight, before) == (learner == "off")


def test_adaptation_makes_more_of_the_draft_stand_and_the_output_stays():
    """It fails on an adaptation that does nothing (papers 9.6)."""
    target = tiny_target()
    expected = autoregressive_generate(target, PROMPTS[1], max_new_tokens=200).tokens

    def rounds(observer_of):
        drafter = make_drafter(target, "full")
        observer = observer_of(drafter)
        outputs = [
            speculative_generate(target, drafter, PROMPTS[1], max_new_tokens=200, observer=observer) for _ in range(6)
        ]
        assert all(output.tokens == expected for output in outputs)
        return len(outputs[-1].trace.rounds)

    frozen = rounds(lambda drafter: None)
    config = replace(ONLINE, method="full", head=True, lr=3e-3, windows=4, window=32)
    adapted = rounds(lambda drafter: OnlineAlignment(drafter, TINY_VOCAB, config))
    assert adapted < 0.8 * frozen


@pytest.mark.slow
def test_sampled_outputs_follow_the_targets_law_under_an_adversary():
    """Weights that change between rounds in the middle of a text. Chi-square over outputs of three tokens."""
    target = tiny_target(vocab=6, hidden=16, layers=3, tap_layers=(0, 1, 2))
    drafter, total, counts = make_drafter(target, "full"), 800, {}
    law = law_of_three(target, [3, 1, 4], Sampling(1.0))
    adversary, generator = Adversary(drafter), torch.Generator().manual_seed(0)
    options = {"max_new_tokens": 3, "temperature": 1.0, "length_policy": Fixed(1), "generator": generator}
    for _ in range(total):
        tokens = tuple(speculative_generate(target, drafter, [3, 1, 4], observer=adversary, **options).tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    statistic, degrees = chi_square(counts, law, total)
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5 + 4


def test_weights_change_only_between_rounds():
    target = tiny_target()
    drafter = make_drafter(target, "full")
    alignment = OnlineAlignment(drafter, TINY_VOCAB, ONLINE)
    seen, draft, commit, observe = [], drafter.draft, drafter.commit, alignment.observe

    def noting(what, call):
        def noted(*args):
            seen.append((what, drafter.fc.weight._version))
            result = call(*args)
            seen.append((what, drafter.fc.weight._version))
            return result

        return noted

    drafter.draft, drafter.commit = noting("draft", draft), noting("commit", commit)
    alignment.observe = noting("observe", observe)
    for prompt in PROMPTS:
        speculative_generate(target, drafter, prompt, max_new_tokens=30, observer=alignment)
    changes = [after[0] for before, after in itertools.pairwise(seen) if before[1] != after[1]]
    assert len(changes) >= 4
    assert set(changes) == {"observe"}


@pytest.mark.parametrize("vocabulary", [None, "frequency", "nanospec", "evospec"])
def test_by_default_a_request_leaves_nothing_behind(vocabulary):
    """Fault 35: a sampled output depends on its seed alone; nor may the keys of the prompt be made with old weights, or the live rows
    be those of the last request's head."""
    target = tiny_target()
    drafter = make_drafter(target, "lowrank" if vocabulary else "full")
    head = drafter.lm_head
    online = replace(ONLINE, across_requests=False, head=vocabulary is not None, guard_share=0.0)
    alignment = OnlineAlignment(drafter, TINY_VOCAB, online)
    policies = {
        "frequency": lambda: FrequencyList(head, range(TINY_VOCAB), TINY_VOCAB),
        "nanospec": lambda: NanoSpec(head, capacity=60),
        "evospec": lambda: EvoSpecVocabulary(
            head, range(TINY_VOCAB), target.head_weight, target.norm, EvoSpecConfig(core=40, tail=20)
        ),
    }
    policy = policies[vocabulary]() if vocabulary else None

    def run(prompt):
        output = speculative_generate(
            target,
            drafter,
            prompt,
            max_new_tokens=40,
            temperature=1.0,
            generator=torch.Generator().manual_seed(1),
            observer=alignment,
            vocab_policy=policy,
        )
        return output.tokens, [(r.drafted, r.accepted) for r in output.trace.rounds]

    first = run(PROMPTS[1])
    assert alignment.updates > 2
    run(PROMPTS[0])
    assert alignment.updates > 2
    assert run(PROMPTS[1]) == first


# --- a change of topic

VOCAB, CORE = 200, 20


class TopicTarget(ScriptedTarget):
    """Goes round a cycle of 40 tokens, core and rare ones, which the first token of the prompt chooses; taps are vectors of the
    tokens, so that there is something to learn."""

    def __init__(self):
        super().__init__(VOCAB, max_positions=400)
        torch.manual_seed(0)
        self.table = torch.randn(VOCAB, 16)
        self.cycles = {}
        for topic, rare in enumerate((range(60, 88), range(120, 148))):
            cycle = [*rare, *range(2 + 5 * topic, 14 + 5 * topic)][:40]
            random.Random(topic).shuffle(cycle)
            self.cycles[topic] = cycle

    def logits(self, prefix):
        cycle = self.cycles[prefix[0]]
        place = cycle.index(prefix[-1]) if prefix[-1] in cycle else -1
        return torch.nn.functional.one_hot(torch.tensor(cycle[(place + 1) % 40]), VOCAB).double() * 9

    def forward(self, input_ids, cache, **options):
        step = super().forward(input_ids, cache, **options)
        if step.taps is not None:
            step.taps = self.table[input_ids]
        return step


def topic_drafter(target):
    torch.manual_seed(1)
    config = Eagle3Config(
        hidden_size=16,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=400,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tap_layers=(0,),
        head=HeadConfig("full", init="random"),
    )
    return Eagle3Drafter(config).eval().requires_grad_(False).bind(target.table)


def stream(target, drafter, policy, observer, topics):
    """[(topic, accepted tokens a round, share of committed tokens that were not live)], one for each request; |A| must not change."""
    found = []
    for topic in topics:
        prompt = [topic, target.cycles[topic][0]]
        output = speculative_generate(
            target, drafter, prompt, max_new_tokens=60, vocab_policy=policy, observer=observer, length_policy=Fixed(3)
        )
        assert output.tokens == target.greedy(prompt, 60)
        rounds = output.trace.rounds
        assert {r.live for r in rounds if r.drafted} == {60}
        misses = sum(not r.is_covered for r in rounds if r.emitted > r.accepted)
        found.append((topic, sum(r.accepted for r in rounds) / len(rounds), misses / sum(r.emitted for r in rounds)))
    return found


def test_after_a_change_of_topic_both_recover_and_a_static_core_does_not():
    """papers 3: the miss rate comes back to within 10 % of its old value within N rounds (of three requests here: the tail holds the old
    topic too until its counts have decayed), the static core's does not; weights learn each topic, and |A| is constant."""
    topics = [0] * 8 + [1] * 8
    torch.manual_seed(2)
    rows = torch.randn(VOCAB, VOCAB, dtype=torch.float64)
    config = EvoSpecConfig(core=CORE, tail=40, residency=2, across_requests=True)
    found = {}
    for name in ("static", "vocabulary", "both"):
        target = TopicTarget()
        drafter = topic_drafter(target)
        policy = FrequencyList(drafter.lm_head, range(VOCAB), CORE + 40)
        if name != "static":
            policy = EvoSpecVocabulary(drafter.lm_head, range(VOCAB), rows, lambda state: state, config)
        observer = None
        if name == "both":
            online = replace(ONLINE, method="full", head=True, lr=5e-3, windows=4, window=32, guard_rounds=32)
            observer = OnlineAlignment(drafter, VOCAB, online)
        found[name] = stream(target, drafter, policy, observer, topics)
    misses = {name: [miss for _, _, miss in lines] for name, lines in found.items()}
    static = sum(misses["static"]) / 16
    assert static > 0.5
    assert misses["static"][-1] > 0.5
    for name in ("vocabulary", "both"):
        before, after = (sum(misses[name][i : i + 4]) / 4 for i in (4, 11))
        assert misses[name][8] > before + 0.1  # the change is felt
        assert after <= before + 0.1 * static
    accepted = {name: [value for _, value, _ in lines] for name, lines in found.items()}
    assert accepted["both"][7] > accepted["vocabulary"][7] + 0.5
    assert accepted["both"][15] > accepted["vocabulary"][15] + 0.5


# --- sessions


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_session_that_is_saved_and_restored_goes_on_exactly(method, tmp_path):
    target = tiny_target()
    config = replace(ONLINE, method=method, guard_rounds=8)

    def make():
        drafter = make_drafter(target, "full")
        return drafter, OnlineAlignment(drafter, TINY_VOCAB, config)

    def run(drafter, alignment, prompts):
        outputs = [
            speculative_generate(target, drafter, prompt, max_new_tokens=40, observer=alignment) for prompt in prompts
        ]
        return [(r.drafted, r.accepted) for output in outputs for r in output.trace.rounds]

    drafter, alignment = make()
    run(drafter, alignment, PROMPTS)
    assert alignment.updates > 3
    save_session(alignment, tmp_path / "session")
    rounds = run(drafter, alignment, PROMPTS)
    again, restored = make()
    load_session(restored, tmp_path / "session")
    assert restored.updates > 3
    assert run(again, restored, PROMPTS) == rounds
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
    assert restored.counts() | {"spent": 0} == alignment.counts() | {"spent": 0}
    fields = zip(restored.positions.fields.values(), alignment.positions.fields.values(), strict=True)
    assert all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in fields)


def test_a_session_of_another_drafter_or_with_other_settings_is_refused(tmp_path):
    target = tiny_target()
    save_session(OnlineAlignment(make_drafter(target, "full"), TINY_VOCAB, ONLINE), tmp_path / "session")
    with pytest.raises(UserError, match=r"of the drafter .* give the drafter that it began with"):
        load_session(OnlineAlignment(make_drafter(target, "full", seed=1), TINY_VOCAB, ONLINE), tmp_path / "session")
    other = OnlineAlignment(make_drafter(target, "full"), TINY_VOCAB, replace(ONLINE, lr=1e-3, time_share=0.5))
    with pytest.raises(UserError, match=r"online.lr was 0.01, got 0.001"):
        load_session(other, tmp_path / "session")
    with pytest.raises(UserError, match="cannot be read"):
        load_session(other, tmp_path / "nothing")


def test_a_broken_session_is_one_line_and_changes_nothing(tmp_path):
    """Written by other hands, or by another version: never a traceback, never half a session."""
    drafter = make_drafter(tiny_target(), "full")
    alignment, folder = OnlineAlignment(drafter, TINY_VOCAB, ONLINE), tmp_path / "session"
    save_session(alignment, folder)
    known, tensors = json.loads((folder / "session.json").read_text()), load_file(folder / "session.safetensors")
    before = {name: weight.clone() for name, weight in alignment.trained.named.items()}
    name = next(key for key in tensors if key.startswith("weights."))
    for broken, of, message in [
        ([], tensors, "holds no session"),
        ({key: value for key, value in known.items() if key != "guard"}, tensors, "guard is missing"),
        (known, {key: value for key, value in tensors.items() if key != "generator"}, "generator is missing"),
        (known, tensors | {name: tensors[name][..., :-1].contiguous()}, f"{name} is missing or of another shape"),
    ]:
        (folder / "session.json").write_text(json.dumps(broken))
        save_file(of, folder / "session.safetensors")
        with pytest.raises(UserError, match=re.escape(message)):
            load_session(alignment, folder)
    assert all(torch.equal(weight, before[name]) for name, weight in alignment.trained.named.items())


def test_packed_rows_follow_a_head_that_is_trained():
    target = tiny_target()
    drafter = make_drafter(target, "lowrank")
    nano, fixed = NanoSpec(drafter.lm_head, capacity=50), FrequencyList(drafter.lm_head, range(TINY_VOCAB), 30)
    alignment = OnlineAlignment(drafter, TINY_VOCAB, replace(ONLINE, head=True, guard_share=0.0))
    before = drafter.lm_head.weight.clone()
    for policy in (nano, fixed):
        speculative_generate(target, drafter, PROMPTS[1], max_new_tokens=30, vocab_policy=policy, observer=alignment)
        live = policy.live()
        projected = torch.randn(3, drafter.lm_head.weight.shape[1])
        expected = projected @ drafter.lm_head.weight[live.ids].T
        torch.testing.assert_close(live.logits(projected), expected, atol=1e-5, rtol=1e-5)
        assert not torch.equal(drafter.lm_head.weight, before)
