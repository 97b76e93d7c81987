"""The decoding forward pass: lean and generic path against a whole forward pass of the Hugging Face model, over chains,
crops, ragged batches, padded rows and trees, of which one path stays. Also the pieces: cache, packed products, norm."""

import copy

import pytest
import torch
import torch.nn.functional as F
from processors import CAN_RUN, NAMES, use
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from specdraft.models import cache as cache_module
from specdraft.models.cache import KVCache
from specdraft.models.layers import FrozenLinear, FrozenRMSNorm
from specdraft.models.lean import attend, attend_causally, is_supported
from specdraft.models.row_attention import attend_rows
from specdraft.models.target import TargetModel
from specdraft.models.thin_products import AVX2, AVX512_BF16
from specdraft.models.tree import place_trees
from specdraft.testing import FAMILIES, TINY_VOCAB, tiny_model

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PATHS = [(family, "lean") for family in LEAN_FAMILIES] + [(family, "generic") for family in FAMILIES]
PATHS += [
    (family, "compiled") for family in LEAN_FAMILIES if CAN_RUN
]  # steps of one row: weights in bf16, states in fp32
LENGTH = 32


class Case:
    """A target with the logits and hidden states of a whole forward pass to compare with."""

    def __init__(self, model, path):
        self.model = model
        self.ids = torch.randint(3, TINY_VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(2))
        self.expected = self.whole(self.ids)
        if path == "compiled":
            rounded = copy.deepcopy(model).bfloat16()
            self.model = copy.deepcopy(rounded).float()
            self.expected = self.whole(self.ids)
            self.target = TargetModel.from_model(rounded)
            assert self.target._layers.compiled is not None
        else:
            self.target = TargetModel.from_model(model, lean=path == "lean")

    @torch.no_grad()
    def whole(self, ids):
        return self.model(ids).logits


@pytest.fixture(scope="module", params=PATHS, ids=[f"{family}-{path}" for family, path in PATHS])
def case(request):
    family, path = request.param
    with pytest.MonkeyPatch.context() as patch:
        if path == "compiled":
            use(patch, AVX2)
        made = Case(tiny_model(family), path)
        assert made.target.is_lean == (path != "generic")
        yield made


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sizes", [(LENGTH,), (1,) * 10 + (22,), (20, 1, 2, 3, 4, 2)], ids=str)
def test_pieces_of_any_size(case, sizes, rows):
    ids, cache = case.ids[:rows], case.target.new_cache(rows, LENGTH)
    steps = [case.target.forward(part, cache) for part in ids.split(sizes, dim=1)]
    close(torch.cat([step.logits for step in steps], dim=1), case.expected[:rows])
    assert cache.lengths == [LENGTH] * rows
    taps = torch.cat([step.taps for step in steps], dim=1)
    close(taps, case.target.features(ids, torch.tensor([LENGTH] * rows)).taps)


def test_only_what_is_asked_for(case):
    cache = case.target.new_cache(3, LENGTH)
    step = case.target.forward(case.ids[:, :5], cache, want_taps=False, logits_for="last")
    close(step.logits, case.expected[:, 4:5])
    assert step.taps is None
    assert case.target.forward(case.ids[:, 5:6], cache, logits_for="none").logits is None


@pytest.mark.parametrize("rows", [1, 3])
def test_rejected_tokens_leave_nothing(case, rows):
    """papers.md 9.8. Longer than the sliding window (8) of the Gemma and Cohere2 models."""
    ids, cache = case.ids[:rows], case.target.new_cache(rows, LENGTH)
    case.target.forward(ids[:, :12], cache)
    for start in (12, 14, 20):
        case.target.forward(ids.flip(1)[:, :7], cache)  # a draft, all of it wrong
        cache.crop(start)
        end = {12: 14, 14: 20, 20: LENGTH}[start]
        close(case.target.forward(ids[:, start:end], cache).logits, case.expected[:rows, start:end])


@pytest.mark.parametrize("block", [4, 64])
def test_rows_of_different_lengths(case, block, monkeypatch):
    """Padded prefill, then single tokens and short chains at each row's own place; then finished rows drop out. With
    small blocks the cache grows on the way."""
    monkeypatch.setattr(cache_module, "BLOCK", block)
    target, ids, lengths = case.target, case.ids, [11, 4, 9]
    cache = target.new_cache(3, LENGTH)
    step = target.forward(ids[:, :11], cache, counts=lengths, logits_for="last")
    assert cache.lengths == lengths
    close(step.logits[:, 0], torch.stack([case.expected[b, length - 1] for b, length in enumerate(lengths)]))
    for n in (1, 3, 1):
        part = torch.stack([ids[b, length : length + n] for b, length in enumerate(cache.lengths)])
        wanted = torch.stack([case.expected[b, length : length + n] for b, length in enumerate(cache.lengths)])
        close(target.forward(part, cache).logits, wanted)
    cache.crop([16, 7, 10])
    cache.select([2, 1])
    assert (cache.batch_size, cache.lengths) == (2, [10, 7])
    part, wanted = (
        torch.stack([ids[2, 10:14], ids[1, 7:11]]),
        torch.stack([case.expected[2, 10:14], case.expected[1, 7:11]]),
    )
    close(target.forward(part, cache).logits, wanted)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_tree_of_drafts(case, rows):
    """Every node's logits are those of its path alone: explicit positions and mask, over a committed part that is longer
    than the sliding window. With two rows, of different lengths."""
    starts = [14, 11][:rows]
    nodes = torch.tensor([50, 60, 70, 80, 90])
    parents = [-1, -1, 0, 1, 3]
    paths = [[0], [1], [0, 2], [1, 3], [1, 3, 4]]
    cache = case.target.new_cache(rows, LENGTH)
    case.target.forward(case.ids[:rows, : max(starts)], cache, counts=starts)
    end = max(starts) + len(nodes)
    mask = torch.zeros(rows, 1, len(nodes), end, dtype=torch.bool)
    positions = torch.zeros(rows, len(nodes), dtype=torch.int64)
    for row, start in enumerate(starts):
        mask[row, :, :, :start] = True
        for node, path in enumerate(paths):
            mask[row, 0, node, [start + other for other in path]] = True
            positions[row, node] = start + len(path) - 1
            assert len(path) == 1 or parents[node] == path[-2]
    step = case.target.forward(nodes.expand(rows, -1), cache, positions=positions, mask=mask)
    for row, start in enumerate(starts):
        for node, path in enumerate(paths):
            alone = case.whole(torch.cat([case.ids[row, :start], nodes[path]])[None])
            close(step.logits[row, node], alone[0, -1])


@pytest.mark.parametrize("rows", [1, 2])
def test_only_the_accepted_path_stays(case, rows):
    """papers.md 9.8: after a tree the cache is that of a prefill of the accepted tokens: they are moved to their places, the rest
    is gone. Paths of different lengths, one with nothing to move; past the sliding window; twice."""
    starts, paths = [14, 11][:rows], [[[0, 2, 4, 5], [0, 1]], [[0], [0, 1, 3]]]
    parents = [-1, -1, 0, 1, 3]
    texts = [case.ids[row, :start] for row, start in enumerate(starts)]
    cache = case.target.new_cache(rows, LENGTH)
    case.target.forward(case.ids[:rows, : max(starts)], cache, counts=starts)
    for kept in paths:
        nodes = torch.randint(3, TINY_VOCAB, (rows, 6), generator=torch.Generator().manual_seed(len(texts[0])))
        lengths = cache.lengths
        positions, mask = place_trees(lengths, [parents] * rows, nodes.device)
        case.target.forward(nodes, cache, positions=positions, mask=mask)
        cache.keep(lengths, kept[:rows])
        texts = [torch.cat([text, nodes[row, kept[row]]]) for row, text in enumerate(texts)]
        assert cache.lengths == [len(text) for text in texts]
        for row, text in enumerate(texts):
            fresh = case.target.new_cache(1, LENGTH)
            case.target.forward(text[None], fresh)
            for layer in range(len(cache.keys)):
                for ours, theirs in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
                    found, wanted = ours[layer][row, :, : len(text)], theirs[layer][0, :, : len(text)]
                    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    more = torch.tensor([[50, 60]] * rows)
    step = case.target.forward(more, cache)
    for row, text in enumerate(texts):
        close(step.logits[row], case.whole(torch.cat([text, more[row]])[None])[0, -2:])


def test_rows_leave_a_batch_in_any_order():
    """From behind, without a copy of the others, or any others."""
    target = TargetModel.from_model(tiny_model())
    ids = torch.randint(3, TINY_VOCAB, (4, 9), generator=torch.Generator().manual_seed(3))
    for rows in ([0, 3], [3, 1, 2], [3, 2], [1, 2], [2, 0], [0, 1, 2, 3]):
        cache = target.new_cache(4, LENGTH)
        target.forward(ids, cache, counts=[9, 5, 7, 3])
        before = [kept.clone() for kept in cache.keys]
        cache.select(rows)
        assert cache.lengths == [[9, 5, 7, 3][row] for row in rows]
        assert all(torch.equal(new, old[rows]) for new, old in zip(cache.keys, before, strict=True))


def test_a_tree_may_have_more_nodes_than_there_are_positions():
    """At the end of the context a tree's nodes share the last positions."""
    target = TargetModel.from_model(tiny_model())
    ids = torch.randint(3, TINY_VOCAB, (1, 6), generator=torch.Generator().manual_seed(4))
    cache = target.new_cache(1, 8)
    target.forward(ids, cache)
    nodes, parents = torch.tensor([[7, *range(20, 60)]]), [-1] * 40
    positions, mask = place_trees(cache.lengths, [parents], nodes.device)
    step = target.forward(nodes, cache, positions=positions, mask=mask)
    cache.keep([6], [[0, 40]])
    assert cache.lengths == [8]
    fresh = target.forward(torch.cat([ids, nodes[:, [0, 40]]], dim=1), target.new_cache(1, 8))
    close(step.logits[0, 40], fresh.logits[0, -1])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_positions(rope):
    config = tiny_model().config
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    case = Case(AutoModelForCausalLM.from_config(config).eval(), "lean")
    assert case.target.is_lean
    cache = case.target.new_cache(3, LENGTH)
    close(
        torch.cat([case.target.forward(part, cache).logits for part in case.ids.split(11, dim=1)], dim=1), case.expected
    )


@pytest.mark.parametrize("instructions", CAN_RUN, ids=NAMES.get)
@pytest.mark.parametrize("family", LEAN_FAMILIES)
def test_a_step_of_many_tokens_is_many_steps(family, instructions, monkeypatch):
    """What is verified together is what would have been decoded alone: with bf16 instructions to the last bit."""
    use(monkeypatch, instructions)
    model = tiny_model(family)
    target, ids = TargetModel.from_model(copy.deepcopy(model).bfloat16()), Case(model, "lean").ids[:1]
    assert target._layers.compiled is not None
    logits = []
    for sizes in ((8, 1, 1, 1, 1), (8, 4)):
        cache = target.new_cache(1, LENGTH)
        steps = [target.forward(part, cache) for part in ids[:, :12].split(sizes, dim=1)]
        logits.append(torch.cat([step.logits for step in steps], dim=1))
    torch.testing.assert_close(*logits, atol=0 if instructions == AVX512_BF16 else 1e-4, rtol=0)
    expected = model(ids).logits[:, :12]
    assert (logits[0] - expected).abs().mean() < 0.03 * expected.std()


@pytest.mark.parametrize("committed", [1, 3, 32, 70])
@pytest.mark.parametrize("instructions", CAN_RUN, ids=NAMES.get)
def test_a_path_of_a_tree_is_what_it_is_alone(instructions, committed, monkeypatch):
    """Whatever its siblings are and wherever in the tree it stands: with bf16 instructions to the last bit; then the path stays."""
    use(monkeypatch, instructions)
    target = TargetModel.from_model(copy.deepcopy(tiny_model()).bfloat16())
    ids = torch.randint(3, TINY_VOCAB, (1, committed + 8), generator=torch.Generator().manual_seed(5))
    text, nodes = ids[:, :committed], ids[:, committed:]
    parents, path = [-1, -1, 0, 1, 1, 3], [1, 4]  # nodes 1 and 4 behind the first token of `nodes`
    tree, alone = target.new_cache(1, committed + 20), target.new_cache(1, committed + 20)
    for cache in (tree, alone):
        target.forward(text, cache)
    positions, mask = place_trees(tree.lengths, [parents], target.device)
    step = target.forward(nodes[:, :7], tree, positions=positions, mask=mask)
    kept = [0, *(node + 1 for node in path)]
    expected = [target.forward(nodes[:, place : place + 1], alone).logits[0, 0] for place in kept]
    tolerance = {"atol": 0 if instructions == AVX512_BF16 else 1e-4, "rtol": 0}
    torch.testing.assert_close(step.logits[0, kept], torch.stack(expected), **tolerance)
    tree.keep([committed], [kept])
    after = [target.forward(nodes[:, 7:], cache).logits for cache in (tree, alone)]
    torch.testing.assert_close(*after, **tolerance)


@pytest.mark.parametrize("path", ["lean", "compiled"] if CAN_RUN else ["lean"])
@pytest.mark.parametrize("rows", [1, 3])
def test_biases_everywhere(path, rows, monkeypatch):
    if path == "compiled":
        use(monkeypatch, AVX2)
    config = tiny_model().config
    config.attention_bias = config.mlp_bias = True
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    case = Case(model, path)
    assert case.target.is_lean
    close(case.target.forward(case.ids[:rows], case.target.new_cache(rows, LENGTH)).logits, case.expected[:rows])


SHAPE = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SHAPE, sliding_window=8),
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=4),
        LlamaConfig(**SHAPE, hidden_act="gelu"),
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    ],
    ids=["mistral-window", "qwen2-window", "gelu", "dynamic-rope"],
)
def test_what_lean_does_not_know_takes_the_generic_path(config):
    model = AutoModelForCausalLM.from_config(config).eval()
    assert not is_supported(model)
    case = Case(model, "lean")
    assert not case.target.is_lean
    cache = case.target.new_cache(3, LENGTH)
    close(
        torch.cat([case.target.forward(part, cache).logits for part in case.ids.split(13, dim=1)], dim=1), case.expected
    )


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_same_on_a_gpu(family):
    here = Case(tiny_model(family), "lean")
    there = TargetModel.from_model(tiny_model(family).to("cuda"))
    ids, lengths = here.ids.to("cuda"), [20, 11, 15]
    cache = there.new_cache(3, LENGTH)
    there.forward(ids[:, :20], cache, counts=lengths)
    part = torch.stack([ids[b, length : length + 3] for b, length in enumerate(lengths)])
    wanted = torch.stack([here.expected[b, length : length + 3] for b, length in enumerate(lengths)])
    torch.testing.assert_close(there.forward(part, cache).logits.cpu(), wanted, atol=1e-3, rtol=0)
    taps = there.features(ids, torch.tensor([LENGTH] * 3, device="cuda")).taps.cpu()
    wanted = here.target.features(here.ids, torch.tensor([LENGTH] * 3)).taps
    torch.testing.assert_close(taps, wanted, atol=1e-3, rtol=1e-3)


def test_fused_weights_are_not_held_twice():
    model = tiny_model()
    before = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
    TargetModel.from_model(model)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.k_proj.weight.untyped_storage().data_ptr()
    assert torch.equal(attention.k_proj.weight, before)


def test_hooks_do_not_stay():
    model = tiny_model()
    target = TargetModel.from_model(model, lean=False)
    target.features(torch.ones(1, 3, dtype=torch.int64), torch.tensor([3]))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_cache_refuses_to_grow_by_cropping_or_past_its_end():
    target = TargetModel.from_model(tiny_model())
    cache = target.new_cache(1, 4)
    target.forward(torch.ones(1, 3, dtype=torch.int64), cache)
    with pytest.raises(AssertionError):
        cache.crop(4)
    with pytest.raises(AssertionError):
        target.forward(torch.ones(1, 2, dtype=torch.int64), cache)
    assert isinstance(cache, KVCache)


def qkv(batch, n, length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    shapes = (batch, n, 6, 8), (batch, length, 2, 8), (batch, length, 2, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def plain_attention(q, keys, values, visible):
    """q [B,n,N,D]; keys, values [B,T,G,D]; visible, broadcastable to [B,1,n,T]: softmax, written out."""
    keys, values = (x.transpose(1, 2).repeat_interleave(3, dim=1) for x in (keys, values))
    scores = q.transpose(1, 2) @ keys.transpose(2, 3) / 8**0.5
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("n", [2, 64, 65, 130])
def test_causal_attention(batch, n):
    q, keys, values = qkv(batch, n, n)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    torch.testing.assert_close(attend_causally(q, keys, values), plain_attention(q, keys, values, visible))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("n", [1, 4, 30])
def test_attention_over_a_cache(batch, n):
    q, keys, values = qkv(batch, n, 40)
    visible = torch.rand(batch, 1, n, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[..., 0] = True
    mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    mask = mask if n == 1 else mask.repeat(1, 1, 3, 1)
    found = attend(q, keys.transpose(1, 2), values.transpose(1, 2), mask)
    torch.testing.assert_close(found, plain_attention(q, keys, values, visible))


@pytest.mark.parametrize("instructions", CAN_RUN, ids=NAMES.get)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 8), (5, 5, 20), (7, 1, 64), (8, 2, 96)])
def test_attention_of_rows_of_different_lengths(instructions, dtype, heads, kv_heads, width, monkeypatch):
    """Slots behind a row's last token hold numbers that would spoil the result, and one row has nothing but its new tokens."""
    use(monkeypatch, instructions)
    generator = torch.Generator().manual_seed(0)
    rows, n, slots, lengths = 4, 3, 90, torch.tensor([40, 0, 87, 33])
    q = torch.randn(rows, n, heads + 2, width, generator=generator).to(dtype)[:, :, :heads]
    keys, values = torch.randn(2, rows, kv_heads, slots + 6, width, generator=generator).to(dtype)[:, :, :, :slots]
    last = lengths[:, None] + torch.arange(n)
    hidden = torch.arange(slots) > last[:, -1:]
    keys, values = (x.masked_fill(hidden[:, None, :, None], 1e30) for x in (keys, values))
    visible = (torch.arange(slots) <= last[..., None])[:, None]
    own = [
        x.float().masked_fill(hidden[:, None, :, None], 0).repeat_interleave(heads // kv_heads, 1)
        for x in (keys, values)
    ]
    expected = F.scaled_dot_product_attention(q.float().transpose(1, 2), *own, attn_mask=visible)
    found = attend_rows(q, keys, values, lengths)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected.transpose(1, 2).flatten(2), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 48), (3, 48), (2, 5, 48)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_frozen_linear(dtype, shape, with_bias):
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(80, 48, generator=generator, dtype=dtype),
        torch.randn(80, generator=generator, dtype=dtype),
    )
    x = torch.randn(*shape[:-1], 96, generator=generator, dtype=dtype)[..., ::2]
    bias = bias if with_bias else None
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    options = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    torch.testing.assert_close(FrozenLinear(weight, bias)(x), F.linear(x, weight, bias), **options)
    part = weight[:40]  # as the head without its padded rows
    torch.testing.assert_close(FrozenLinear(part)(x), F.linear(x, part), **options)
    assert FrozenLinear(part)(x).dtype == dtype


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_frozen_rms_norm(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    x = (
        scale * torch.randn(2, 3, 48, generator=generator, dtype=torch.float64) + scale
    )  # not centred, as real states are
    x, weight = x.to(dtype), torch.randn(48, generator=generator, dtype=torch.float64).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(FrozenRMSNorm(weight, 1e-5)(x).double(), exact, atol=tolerance, rtol=tolerance)
