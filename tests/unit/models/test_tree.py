"""The shapes of drafts against naive versions of them, and where a tree's nodes stand."""

import itertools
import math

import pytest
import torch

from specdraft.config import UserError
from specdraft.decoding.sampling import Sampling
from specdraft.models.drafter import Ask
from specdraft.models.tree import Chain, Eagle2Tree, SampledTree, depths, is_chain, place_trees


def random_law(columns, seed=0, dtype=torch.float64, scale=1.5):
    """path -> logits [columns]"""

    def law(path):
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        return torch.randn(columns, generator=generator, dtype=torch.float64).mul(scale).to(dtype)

    return law


def run(shape, law, budget, choose=None, ids=None):
    """Drive a growth. Returns the proposal, its nodes' paths (in columns where ids is None), and the nodes run by level."""
    growth, nodes, ran = shape.begin(Ask(budget, choose or Sampling().choose), ids), [()], []
    while True:
        ran.append(nodes)
        level = growth.grow(torch.stack([law(path) for path in nodes]))
        if level is None:
            break
        nodes = [(*nodes[of], t) for t, of in zip(level[0].tolist(), level[1].tolist(), strict=True)]
    proposal, paths = growth.proposal(), []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), token))
    return proposal, paths, ran


def naive_eagle2(law, total, depth, top_k):
    """papers.md 7, with dictionaries: {path: log-probability} of what is proposed."""
    pool, level = {}, {(): 0.0}
    for _ in range(depth):
        children = {}
        for path, score in level.items():
            logs = law(path).log_softmax(-1)
            for column in logs.argsort(descending=True)[:top_k].tolist():
                children[(*path, column)] = score + float(logs[column])
        pool |= children
        level = dict(sorted(children.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(pool.items(), key=lambda item: -item[1])[:total])


@pytest.mark.parametrize(
    ("total", "depth", "top_k"), [(60, 7, 10), (12, 3, 4), (5, 4, 1), (1, 1, 1), (3, 6, 5), (500, 3, 3)]
)
def test_eagle2_is_the_papers_tree(total, depth, top_k):
    law = random_law(30, seed=total)
    proposal, paths, ran = run(Eagle2Tree(total, depth, top_k), law, budget=99)
    expected = naive_eagle2(law, total, depth, top_k)
    assert len(paths) == len(set(paths))
    assert set(paths) == set(expected)
    assert proposal.q is None
    assert len(ran) == depth
    assert all(len(level) <= top_k for level in ran)
    for one, other in itertools.pairwise([i for i, parent in enumerate(proposal.parents) if parent == -1]):
        assert expected[paths[one]] >= expected[paths[other]], "siblings stand most likely first"


@pytest.mark.parametrize("columns", [1, 3, 40])
@pytest.mark.parametrize("shape", [Eagle2Tree(20, 5, 4), SampledTree(20, 5, 4)], ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("certain", [False, True])
def test_trees_hold_together(columns, shape, certain):
    """Parents come first; no sibling twice; the budget is a depth. With certain tokens (log-probability 0) a child is as likely
    as its parent, and must not be kept without it."""
    law = random_law(columns, scale=1e4 if certain else 1.5, dtype=torch.float32)
    for budget in (1, 2, 5, 9):
        proposal, paths, _ = run(shape, law, budget)
        assert 0 < len(paths) == len(set(paths)) <= 20
        assert all(-1 <= parent < i for i, parent in enumerate(proposal.parents))
        levels = depths(proposal.parents)
        assert levels == [len(path) for path in paths]
        assert max(levels) <= min(budget, 5)
        assert not certain or max(levels) == min(budget, 5)


@pytest.mark.parametrize(
    "shape", [Chain(), Eagle2Tree(9, 3, 3), SampledTree(9, 3, 3)], ids=lambda shape: type(shape).__name__
)
def test_columns_become_target_ids(shape):
    """Over a sub-vocabulary in an odd order; the drafter is given target ids to run."""
    ids = torch.tensor([70, 3, 41, 5])
    column_of = {token: column for column, token in enumerate(ids.tolist())}
    law = random_law(4)
    proposal, paths, _ = run(shape, lambda path: law(tuple(column_of[t] for t in path)), 3, ids=ids)
    plain, expected, _ = run(shape, law, 3)
    assert paths == [tuple(ids[list(path)].tolist()) for path in expected]
    assert proposal.ids is ids
    assert plain.parents == proposal.parents


def test_sampled_siblings_are_drawn_without_replacement():
    """Every token's law is the processor's law without its elder siblings, and what the processor drew from."""
    law, generator, temperature = random_law(8), torch.Generator().manual_seed(3), 0.7
    asked = []

    def choose(logits):
        drawn = Sampling(temperature).choose(logits, generator)
        asked.append(drawn.law)
        return drawn

    proposal, paths, _ = run(SampledTree(12, 3, 4), law, 3, choose)
    assert len(paths) == 12
    assert max(depths(proposal.parents)) == 3
    for i, (parent, path) in enumerate(zip(proposal.parents, paths, strict=True)):
        elder = [paths[j][-1] for j in range(i) if proposal.parents[j] == parent]
        expected = (law(path[:-1]) / temperature).softmax(-1)
        expected[elder] = 0
        torch.testing.assert_close(proposal.q[i], expected / expected.sum())
        assert torch.equal(proposal.q[i], asked[i])


def test_how_many_children_are_drawn_does_not_depend_on_them():
    """papers 9.4: on the first level the numbers are settled by the law alone; later ones by tokens above."""
    law = random_law(20)
    shapes = set()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        proposal, paths, _ = run(SampledTree(12, 2, 6), law, 2, lambda x, g=generator: Sampling(1.0).choose(x, g))
        shapes.add(sum(parent == -1 for parent in proposal.parents))
        assert len(paths) == 12, "all that is drawn is proposed"
    assert shapes == {6}


def test_places_go_where_acceptance_is_likely():
    """A certain node gets one child, an uncertain one several."""
    laws = {(): [5.0, 5.0, -50, -50], (0,): [50.0, 0, 0, 0], (1,): [1.0, 1.0, 1.0, 1.0]}
    law = lambda path: torch.tensor(laws.get(path, [0.0] * 4))  # noqa: E731
    proposal, paths, _ = run(SampledTree(6, 2, 4), law, 2)
    first = {path[0] for path in paths if len(path) == 1}
    assert {0, 1} <= first
    children = {token: sum(len(path) == 2 and path[0] == token for path in paths) for token in (0, 1)}
    assert children[0] == 1
    assert children[1] == 2
    assert proposal.q is None, "at T = 0 children are deterministic"


def test_a_chain_stops_where_its_sampling_says_so():
    law = random_law(6)

    def stop_at_second(logits, count=itertools.count(1)):  # noqa: B008
        return Sampling().choose(logits)._replace(is_last=next(count) == 2)

    proposal, paths, _ = run(Chain(), law, 5, stop_at_second)
    assert is_chain(proposal.parents)
    assert len(paths) == 2


@pytest.mark.parametrize("shape", [Chain(), Eagle2Tree(9, 3, 3), SampledTree(9, 3, 3)], ids=lambda s: type(s).__name__)
def test_ids_are_read_after_the_product(shape):
    """On a GPU live rows are still being gathered when a draft begins; the product waits for them."""

    class Gathered(torch.Tensor):
        is_there = False

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert cls.is_there, "read too early"
            return super().__torch_function__(function, types, args, kwargs)

    ids = torch.arange(10, 20).as_subclass(Gathered)
    growth = shape.begin(Ask(3, Sampling().choose), ids)
    Gathered.is_there = True
    law = random_law(10)
    growth.grow(law(())[None])
    assert growth.proposal().tokens[0] == 10 + law(()).argmax()


@pytest.mark.parametrize("kind", [Eagle2Tree, SampledTree])
@pytest.mark.parametrize("options", [{"total_tokens": 0}, {"depth": 0}, {"top_k": -1}], ids=str)
def test_bad_trees_are_refused(kind, options):
    with pytest.raises(UserError, match="allowed: 1 or more"):
        kind(**options)


def test_where_the_nodes_stand():
    """Against a walk up from every node. Rows of different lengths and sizes; padding sees the root and nothing else new."""
    starts = [5, 2, 9]
    parents = [[-1, -1, 0, 2, 0], [], [-1, 0, 0, -1]]
    positions, mask = place_trees(starts, parents, torch.device("cpu"))
    n, end = 6, 9 + 6
    assert positions.shape == (3, n)
    assert mask.shape == (3, 1, n, end)
    for b, (start, row) in enumerate(zip(starts, parents, strict=True)):
        for i in range(n):
            seen, node, levels = set(range(start + 1)), i - 1, 0
            while 0 <= node < len(row):
                seen.add(start + 1 + node)
                node, levels = row[node], levels + 1
            assert set(mask[b, 0, i].nonzero().flatten().tolist()) == seen
            assert int(positions[b, i]) == start + levels


def test_log_probabilities_are_those_of_the_law():
    """A child's score is the sum along its path: with one token kept, it is the most likely path of that depth's prefix."""
    law = random_law(5)
    _, paths, _ = run(Eagle2Tree(1, 3, 5), law, 3)
    best = max(range(5), key=lambda column: float(law(())[column]))
    assert paths == [(best,)]
    assert math.isclose(naive_eagle2(law, 1, 3, 5)[(best,)], float(law(()).log_softmax(-1).max()))
