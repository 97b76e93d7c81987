from dataclasses import dataclass

import pytest
import torch

from specdraft.config import UserError
from specdraft.data.chat import Example
from specdraft.data.source import Online, Slabs, plan_batches, plan_rounds, run_padded, run_target
from specdraft.testing import tiny_target


@dataclass
class Features:
    taps: torch.Tensor
    last: torch.Tensor


class CountingTarget:
    """States are a function of token and position, so that a misplaced row shows; padding gets rubbish."""

    device, hidden_size, tap_layers = torch.device("cpu"), 2, (1, 2, 3)
    dtype = compute_dtype = torch.float32

    def __init__(self):
        self.sequences = 0

    def features(self, input_ids, lengths):
        self.sequences += len(input_ids)
        batch, tokens = input_ids.shape
        states = 1000.0 * input_ids + torch.arange(tokens)
        states = torch.where(torch.arange(tokens) < lengths[:, None], states, float("nan"))[..., None]
        return Features(states.expand(batch, tokens, 6), -states.expand(batch, tokens, 2))


def example(id_, length, start=3):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[start:] = True
    return Example(id_, torch.arange(length) + 10 * (ord(id_) - ord("a")), mask)


EXAMPLES = [example("a", 5), example("b", 9), example("c", 4)]


@pytest.mark.parametrize("cache_bytes", [0, 10**6])
def test_online_batch_has_each_example_and_zero_padding(cache_bytes):
    online = Online(CountingTarget(), cache_bytes)
    for order in ([0, 1, 2], [2, 0], [1]):
        examples = [EXAMPLES[i] for i in order]
        batch = online.batch(examples)
        assert batch.lengths.tolist() == [len(e.input_ids) for e in examples]
        for b, e in enumerate(examples):
            n = len(e.input_ids)
            expected = 1000.0 * e.input_ids + torch.arange(n)
            assert torch.equal(batch.input_ids[b, :n], e.input_ids)
            assert torch.equal(batch.loss_mask[b, :n], e.loss_mask)
            assert torch.equal(batch.taps[b, :n], expected[:, None].expand(n, 6))
            assert torch.equal(batch.last[b, :n], -expected[:, None].expand(n, 2))
            padding = [batch.input_ids[b, n:], batch.loss_mask[b, n:], batch.taps[b, n:], batch.last[b, n:]]
            assert not any(part.any() for part in padding)


def test_cache_saves_the_forward_and_respects_its_limit():
    rows = 8 * 4  # bytes of one position: 6 + 2 floats
    target = CountingTarget()
    online = Online(target, cache_bytes=9 * rows)  # a and c fit, b does not fit beside a
    for _ in range(3):
        online.batch(EXAMPLES)
    assert target.sequences == 3 + 1 + 1
    assert online.used_bytes == 9 * rows


def test_slabs_hold_many_tensors_each(monkeypatch):
    monkeypatch.setattr("specdraft.data.source.SLAB_BYTES", 40)
    slabs = Slabs()
    tensors = [torch.randn(shape) for shape in ((2, 3), (1, 4), (5, 5), (1, 2))] + [torch.arange(3)]
    copies = [slabs.copy(tensor) for tensor in tensors]
    assert all(torch.equal(one, other) for one, other in zip(copies, tensors, strict=True))
    blocks = [copy.untyped_storage().data_ptr() for copy in copies]
    assert blocks[0] == blocks[1] != blocks[2] != blocks[3]


def test_a_cache_that_is_forgotten_fills_again():
    target = CountingTarget()
    online = Online(target, cache_bytes=10**6)
    before = online.batch(EXAMPLES)
    online.forget()
    assert online.used_bytes == 0
    assert torch.equal(online.batch(EXAMPLES).taps, before.taps)
    assert target.sequences == 2 * len(EXAMPLES)


def test_cache_key_is_the_content_not_the_name():
    """Fault 5."""
    target = CountingTarget()
    online = Online(target, cache_bytes=10**6)
    online.batch([EXAMPLES[0]])
    other = Example("a", EXAMPLES[0].input_ids + 1, EXAMPLES[0].loss_mask)
    assert online.batch([other]).taps[0, 0, 0] == 1000.0
    assert target.sequences == 2


def test_cached_states_do_not_alias_the_batch():
    online = Online(CountingTarget(), cache_bytes=10**6)
    first = online.batch(EXAMPLES[:1])
    first.taps.zero_()
    assert online.batch(EXAMPLES[:1]).taps.any()


def test_padded_run_equals_each_example_alone():
    """Fault 6: padding never enters an example's states."""
    alone, padded = run_target(CountingTarget(), EXAMPLES), run_padded(CountingTarget(), EXAMPLES)
    for a, b in zip(alone, padded, strict=True):
        assert torch.equal(a.taps, b.taps)
        assert torch.equal(a.last, b.last)


def test_states_do_not_depend_on_the_company():
    """Interrupted = uninterrupted: a cache that is lost changes no bit."""
    target = tiny_target(dtype=torch.bfloat16)
    cached = Online(target, cache_bytes=10**6)
    cached.batch(EXAMPLES)
    for order in ([2, 1], [0, 2, 1], [2]):
        examples = [EXAMPLES[i] for i in order]
        first, second = cached.batch(examples), Online(target).batch(examples)
        assert torch.equal(first.taps, second.taps)
        assert torch.equal(first.last, second.last)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_masked_counted_and_stop_the_run(value):
    """Fault 7."""

    class BadTarget(CountingTarget):
        def features(self, input_ids, lengths):
            features = super().features(input_ids, lengths)
            bad = (input_ids[:, 1] == EXAMPLES[1].input_ids[1])[:, None, None]
            return Features(features.taps, torch.where(bad, value, features.last))

    for cache_bytes in (0, 10**6):
        online = Online(BadTarget(), cache_bytes, max_bad=1)
        for _ in range(2):
            batch = online.batch(EXAMPLES)
        assert len(online.bad) == 1
        assert batch.taps.isfinite().all()
        assert batch.last.isfinite().all()
        assert batch.loss_mask.any(dim=1).tolist() == [True, False, True]
    with pytest.raises(UserError, match="1 examples have NaN or infinite states, allowed: 0"):
        Online(BadTarget(), max_bad=0).batch(EXAMPLES)


LENGTHS = [5 + (i * 37) % 95 for i in range(211)]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_plan_gives_every_example_once_and_equal_batches_per_rank(world):
    """Faults 6 and 28: nothing dropped, no rank without a batch."""
    plans = [plan_batches(LENGTHS, 256, seed=1, epoch=2, rank=rank, world=world) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(len(LENGTHS)))
    assert [list(together) for together in zip(*plans, strict=True)] == plan_rounds(LENGTHS, 256, 1, 2, world)
    for plan in plans:
        assert all(batch and len(batch) * max(LENGTHS[i] for i in batch) <= 256 for batch in plan)


@pytest.mark.parametrize(("count", "world"), [(3, 2), (5, 4), (4, 4), (7, 2)])
def test_plan_of_few_long_examples(count, world):
    """Fault 28: all batches hold one example, so there is nothing to split."""
    plans = [plan_batches([100] * count, 100, seed=0, epoch=0, rank=rank, world=world) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(count))
    assert all(batch for plan in plans for batch in plan)


def test_plan_depends_on_seed_and_epoch_only():
    plan = plan_batches(LENGTHS, 256, seed=1, epoch=0)
    assert plan == plan_batches(LENGTHS, 256, seed=1, epoch=0)
    others = [plan_batches(LENGTHS, 256, seed=1, epoch=1), plan_batches(LENGTHS, 256, seed=2, epoch=0)]
    for other in others:
        assert other != plan
        assert {frozenset(batch) for batch in other} != {frozenset(batch) for batch in plan}


def test_plan_pads_little():
    plan = plan_batches(LENGTHS, 1024, seed=0, epoch=0)
    padded = sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in plan)
    assert padded < 1.1 * sum(LENGTHS)


def test_a_longer_example_is_a_batch_of_its_own():
    plan = plan_batches(LENGTHS, 64, seed=0, epoch=0)
    assert sorted(i for batch in plan for i in batch) == list(range(len(LENGTHS)))
    assert max(LENGTHS) > 64
    assert all(len(batch) == 1 or len(batch) * max(LENGTHS[i] for i in batch) <= 64 for batch in plan)


def test_plan_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match="1 examples for 2 processes"):
        plan_batches([4], 64, seed=0, epoch=0, rank=0, world=2)
