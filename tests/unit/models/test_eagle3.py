"""The drafter's unroll and its decoding are one model; the unroll is the arithmetic of papers.md 8, written out naively."""

import pytest
import torch

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.decoding.sampling import Sampling, greedy
from specdraft.decoding.vocab_policies import FrequencyList
from specdraft.models.checkpoint import load_drafter, save_drafter
from specdraft.models.drafter import Ask, Drawn
from specdraft.models.heads import HeadConfig, LowRankHead
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.tree import Chain, Eagle2Tree, SampledTree, depths
from specdraft.testing import TINY_VOCAB, tiny_target

FLAGS = [{}, {"norm_before_residual": True}, {"norm_output": True}, {"fc_norm": True}, {"norm_before_fc": True}]
HEADS = [HeadConfig("full"), HeadConfig("lowrank", rank=8), HeadConfig("trimmed")]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", dtype=torch.float32)


def make_drafter(target, head=HEADS[0], **options):
    torch.manual_seed(0)
    vocab_map = None
    if head.kind == "trimmed":
        counts = torch.arange(TINY_VOCAB) * 7 % TINY_VOCAB  # draft ids in another order than target ids
        vocab_map = VocabMap.from_counts(counts, size=100)
    features = torch.randn(500, target.hidden_size)
    return new_drafter(target, DrafterConfig(**options), head, vocab_map, features).eval()


def chosen(drafter, head_input, choose=greedy):
    column = choose(drafter.lm_head.logits(head_input))
    ids = drafter.lm_head.target_ids()
    return column if ids is None else ids[column]


@torch.no_grad()
def naive_unroll(drafter, taps, input_ids, row, steps):
    """One row of one sequence, step by step, over explicit lists of keys and values. taps [T, A*H]; input_ids [T]."""
    fused = drafter.fuse(taps[None])
    keys, values, outputs, hidden = [], [], [], None
    for i in range(row + 1):
        x, residual = drafter.layer_input(fused[:, i : i + 1], input_ids[None, i + 1 : i + 2])
        k, v = drafter.keys_values(x, torch.tensor([[i]]))
        keys.append(k), values.append(v)
    for step in range(steps):
        position = torch.tensor([[row + step]])
        if step:
            x, residual = drafter.layer_input(hidden, input_ids[None, row + 1 + step : row + 2 + step])
            k, v = drafter.keys_values(x, position)
            keys.append(k), values.append(v)
        q = drafter.queries(x, position)
        groups = q.shape[1] // keys[0].shape[1]
        k = torch.cat(keys, 2).repeat_interleave(groups, 1)
        v = torch.cat(values, 2).repeat_interleave(groups, 1)
        weights = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1)
        hidden, normed = drafter.finish(weights @ v, residual)
        outputs.append(normed[0, 0])
    return torch.stack(outputs)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_unroll_is_the_papers_arithmetic(target, flags):
    """Faults 22, 23: positions advance with the unroll; only the causal past and a row's own steps are seen; tokens are the true ones."""
    drafter = make_drafter(target, body_init="random", **flags)
    input_ids = torch.randint(3, TINY_VOCAB, (2, 14))
    taps = torch.randn(2, 14, 3 * target.hidden_size)
    rows = torch.tensor([[3, 6, 9], [0, 5, 5]])
    with torch.no_grad():
        out = drafter.unroll(taps, input_ids, rows, 4)
    for b in range(2):
        for m in range(3):
            expected = naive_unroll(drafter, taps[b], input_ids[b], int(rows[b, m]), 4)
            torch.testing.assert_close(out[:, b, m], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
@pytest.mark.parametrize("flags", FLAGS[:3], ids=str)
def test_decoding_gives_the_unrolls_logits(target, head, flags):
    """Fault 32: what is trained is what is served. The rounds accept 2, 0 and 4 of 4 drafted tokens."""
    drafter = make_drafter(target, head=head, **flags)
    prompt = torch.randint(3, TINY_VOCAB, (1, 9))
    committed = prompt
    drafter.begin(target.features(prompt[:, :-1], torch.tensor([8])).taps, prompt.tolist(), 64)
    for accepted in (2, 0, 4):
        seen = []

        def choose(logits, seen=seen):
            seen.append(logits[0])
            return Drawn(greedy(logits), None)

        (proposal,) = drafter.draft([Ask(4, choose)], Chain())
        assert proposal.parents == [-1, 0, 1, 2]
        text = torch.cat([committed, proposal.tokens[None]], 1)
        taps = target.features(text, torch.tensor([text.shape[1]])).taps
        row = committed.shape[1] - 2
        # the unroll may read taps of committed positions alone: spoil the rest
        taps[:, row + 1 :] = 1e3
        with torch.no_grad():
            expected = drafter.lm_head.logits(drafter.unroll(taps, text, torch.tensor([[row]]), 4))[:, 0, 0]
        torch.testing.assert_close(torch.stack(seen), expected, atol=2e-4, rtol=2e-4)
        new = torch.cat([proposal.tokens[:accepted], torch.randint(3, TINY_VOCAB, (1,))])
        committed = torch.cat([committed, new[None]], 1)
        length = committed.shape[1] - 1
        taps = target.features(committed[:, :-1], torch.tensor([length])).taps
        drafter.commit([new.tolist()], taps[:, length - accepted - 1 :])


class Seen:
    """A shape that notes the logits of every node that is run, with the tokens that lead to it."""

    def __init__(self, shape):
        self.shape, self.depth, self.width = shape, shape.depth, shape.width
        self.growths = []

    def begin(self, ask, ids):
        self.growths.append(SeenGrowth(self.shape.begin(ask, ids)))
        return self.growths[-1]


class SeenGrowth:
    def __init__(self, growth):
        self.growth, self.nodes, self.logits, self.proposal = growth, [[]], {}, growth.proposal

    def grow(self, logits):
        self.logits |= {tuple(path): row for path, row in zip(self.nodes, logits, strict=True)}
        level = self.growth.grow(logits)
        if level is not None:
            self.nodes = [[*self.nodes[of], t] for t, of in zip(level[0].tolist(), level[1].tolist(), strict=True)]
        return level


@pytest.mark.parametrize("shape", [Chain(), Eagle2Tree(12, 4, 3), SampledTree(9, 4, 3)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_batches_and_trees_give_the_unrolls_logits(shape, head):
    """Fault 32, for every node: its logits are the unroll's along its own path. Rows of different lengths, budgets and
    acceptance; one leaves on the way and the last takes its place; then another round on what was committed."""
    target = tiny_target("llama", dtype=torch.float64)
    drafter = make_drafter(tiny_target("llama"), head=head).double().bind(target.embedding_weight)
    numbers = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, TINY_VOCAB, (n,), generator=numbers).tolist() for n in (9, 4, 13)]
    budgets, news = [4, 0, 2], [3, 1, 2]
    features = lambda text: target.features(torch.tensor([text]), torch.tensor([len(text)])).taps[0]  # noqa: E731
    stack = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # noqa: E731
    drafter.begin(stack([features(text[:-1]) for text in texts]), texts, 64)
    for _ in range(2):
        seen = Seen(shape)
        choose = Sampling(1.0).choose if isinstance(shape, SampledTree) else Sampling().choose
        proposals = drafter.draft([Ask(budget, choose) for budget in budgets], seen)
        growths = iter(seen.growths)
        for text, budget, proposal in zip(texts, budgets, proposals, strict=True):
            assert (1 if budget else 0) <= max(depths(proposal.parents), default=0) <= budget
            if not budget:
                continue
            found = next(growths).logits
            assert max(map(len, found)) == budget - 1
            for path, logits in found.items():
                whole = torch.tensor([[*text, *path]])
                taps = torch.full((1, whole.shape[1], 3 * target.hidden_size), 1e3, dtype=torch.float64)
                taps[0, : len(text) - 1] = features(text[:-1])  # the unroll may read taps of committed positions alone
                with torch.no_grad():
                    states = drafter.unroll(taps, whole, torch.tensor([[len(text) - 2]]), len(path) + 1)
                    expected = drafter.lm_head.logits(states[-1, 0, 0])
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)  # the unroll scores in fp32
        new = [torch.randint(3, TINY_VOCAB, (n,), generator=numbers).tolist() for n in news]
        texts = [text + more for text, more in zip(texts, new, strict=True)]
        if len(texts) == 3:
            drafter.select([2, 1])
            texts, new, budgets, news = [texts[2], texts[1]], [new[2], new[1]], [3, 1], [1, 1]
        taps = [features(text[:-1])[-len(more) :] for text, more in zip(texts, new, strict=True)]
        drafter.commit(new, stack(taps))


def test_live_rows_are_a_choice_of_columns(target):
    """A live vocabulary composes with every head: rows of W, or rows of W_up."""
    hidden = torch.randn(1, target.hidden_size)
    live = torch.tensor([5, 2, 77])
    for config in HEADS:
        head = make_drafter(target, head=config).lm_head
        torch.testing.assert_close(head.logits(hidden, live), head.logits(hidden)[:, live])


def test_target_is_neither_trained_nor_saved(target, tmp_path):
    """Fault 13: no frozen target weight among the parameters or in the checkpoint."""
    drafter = make_drafter(target)
    shapes = [tuple(p.shape) for name, p in drafter.named_parameters() if name != "lm_head.weight"]
    assert (TINY_VOCAB, target.hidden_size) not in shapes
    assert not any("embed" in name for name in drafter.state_dict())


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_checkpoint_round_trip(target, tmp_path, head):
    drafter = make_drafter(target, head=head, norm_output=True)
    save_drafter(tmp_path / "d", drafter, target, "# card", {"seed": 1}, torch.float32)
    loaded = load_drafter(tmp_path / "d", target)
    input_ids = torch.randint(3, TINY_VOCAB, (1, 10))
    taps = torch.randn(1, 10, 3 * target.hidden_size)
    rows = torch.tensor([[2, 4]])
    with torch.no_grad():
        a, b = (m.lm_head.logits(m.unroll(taps, input_ids, rows, 3)) for m in (drafter, loaded))
    assert torch.equal(a, b)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]


def test_a_checkpoint_with_nan_is_refused(target, tmp_path):
    drafter = make_drafter(target)
    drafter.fc.weight.data[0, 0] = float("nan")
    save_drafter(tmp_path / "d", drafter, target, "# card", {}, torch.float32)
    with pytest.raises(UserError, match=r"fc\.weight has NaN or infinite weights"):
        load_drafter(tmp_path / "d", target)


def test_the_low_rank_head_starts_at_the_best_factors(target):
    """Against the truncated SVD of the logits themselves; with frequencies, of the weighted and centred logits."""
    torch.manual_seed(0)
    features = torch.randn(2000, target.hidden_size) @ torch.diag(torch.logspace(0, -2, target.hidden_size))
    covariance = features.T @ features / len(features)
    frequency = torch.rand(TINY_VOCAB) ** 4 + 1e-3
    rows = target.head_weight
    wanted = features @ rows.T
    share = frequency / frequency.sum()
    centred = wanted - (wanted * share).sum(-1, keepdim=True)

    def error(frequency_, covariance_):
        head = LowRankHead(target.hidden_size, TINY_VOCAB, 8)
        head.init_from(rows, covariance_, frequency_)
        torch.testing.assert_close(head.down.square().mean(), head.weight.square().mean())  # balanced
        made = head.logits(features).detach()
        made = made - (made * share).sum(-1, keepdim=True)
        return float(((made - centred) ** 2 * share).sum() / (centred**2 * share).sum())

    singular = torch.linalg.svdvals(centred * share.sqrt())
    best = float((singular[8:] ** 2).sum() / (singular**2).sum())
    assert error(frequency, covariance) == pytest.approx(best, rel=1e-2)
    assert error(frequency, covariance) < error(None, covariance) < error(None, None)


def test_first_weights_come_from_the_target(target):
    """The body is the target's last layer; a full head is its head, a trimmed one its rows in the map's order."""
    drafter = make_drafter(target)
    last = target.model.get_decoder().layers[-1]
    assert torch.equal(drafter.midlayer.mlp["down_proj"].weight, last.mlp.down_proj.weight)
    assert torch.equal(
        drafter.midlayer.self_attn["q_proj"].weight[:, target.hidden_size :], last.self_attn.q_proj.weight
    )
    assert torch.equal(drafter.lm_head.weight, target.head_weight)
    trimmed = make_drafter(target, head=HEADS[2]).lm_head
    assert torch.equal(trimmed.weight, target.head_weight[trimmed.ids])


def test_frequent_tokens_are_kept_with_a_checkpoint(target, tmp_path):
    drafter = make_drafter(target, HEADS[1])
    drafter.frequent = VocabMap(torch.tensor([5, 3, 9]), target.vocab_size)
    save_drafter(tmp_path / "d", drafter, target, "# card", {})
    assert load_drafter(tmp_path / "d", target).frequent == drafter.frequent
    assert FrequencyList.of(drafter).live().ids.tolist() == [5, 3, 9]
    drafter.frequent = None
    with pytest.raises(UserError, match="without frequent_tokens"):
        FrequencyList.of(drafter)


@pytest.mark.parametrize("text", ["[1, 2", "{}", "[1, 1]", "[-1]", '["a"]', "[]", "[1.5]"])
def test_a_broken_list_of_frequent_tokens_is_refused(target, text, tmp_path):
    save_drafter(tmp_path / "d", make_drafter(target, HEADS[1]), target, "# card", {})
    (tmp_path / "d" / "frequent_tokens.json").write_text(text)
    with pytest.raises(UserError, match="frequent tokens"):
        load_drafter(tmp_path / "d", target)
