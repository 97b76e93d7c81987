"""Products with bf16 weights and fp32 states equal fp32 ones, on every processor that can run them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from processors import CAN_RUN, NAMES, as_read, use

from specdraft.models import thin_products
from specdraft.models.thin_products import AVX2, AVX512_BF16, thin_linear


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=CAN_RUN, ids=NAMES.get)
def instructions(request, monkeypatch):
    use(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 64])
@pytest.mark.parametrize(
    ("outputs", "width"), [(50, 64), (1, 16), (24, 2), (25, 72), (96, 78), (7, 130), (49, 576), (5, 1), (9, 49)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_equal_to_fp32(instructions, rows, outputs, width, with_bias):
    x, weight = randn(rows, width), randn(outputs, width, seed=1).bfloat16()
    bias = randn(outputs, seed=2).bfloat16() if with_bias else None
    expected = F.linear(as_read(x, instructions), weight.float(), None if bias is None else bias.float())
    found = thin_linear(x, weight, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_shapes_and_strides(instructions):
    weight = randn(40, 32).bfloat16()
    x = randn(2, 3, 64, seed=1)[..., ::2]
    read = as_read(x, instructions)
    torch.testing.assert_close(thin_linear(x, weight), F.linear(read, weight.float()))
    torch.testing.assert_close(thin_linear(x.bfloat16(), weight), F.linear(x.bfloat16().float(), weight.float()))
    torch.testing.assert_close(thin_linear(x, weight[8:20]), F.linear(read, weight[8:20].float()))


@pytest.mark.parametrize("width", [576, 600])
def test_a_product_of_one_row_is_that_row_of_a_product_of_more(instructions, width):
    """To fp32 rounding, or exactly: greedy outputs then hardly ever, or never, depend on how many tokens a pass verifies."""
    x, weight = randn(9, width), randn(300, width, seed=1).bfloat16()
    tolerance = 0 if instructions == AVX512_BF16 else 1e-4
    torch.testing.assert_close(
        thin_linear(x, weight)[3:4], thin_linear(x[3:4], weight), atol=tolerance, rtol=tolerance / 10
    )
    torch.testing.assert_close(
        thin_linear(x, weight)[8:], thin_linear(x[8:], weight), atol=tolerance, rtol=tolerance / 10
    )


def test_numbers_that_are_not_finite_stay_so(instructions):
    x, weight = randn(3, 32), randn(5, 32).bfloat16()
    x[1, 7] = float("nan")
    found = thin_linear(x, weight)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_it_compiles_wherever_it_can_run():
    """Else all of the above is torch's."""
    assert (thin_products.library() is not None) == torch.backends.cpu.get_cpu_capability().startswith("AVX")
    assert all(thin_products.compile_for(instructions) is not None for instructions in CAN_RUN)


@pytest.mark.parametrize("cache", ["cache", "file"])
def test_without_a_compiler_torch_multiplies(monkeypatch, tmp_path, caplog, cache):
    """And says so, once: it is several times slower. So it is where there is no place for what is compiled."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CXX", "/nonexistent --fast")
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / cache))
    monkeypatch.setattr(thin_products, "compile_for", functools.cache(thin_products.compile_for.__wrapped__))
    monkeypatch.setattr(thin_products, "instructions", lambda: AVX2)
    assert thin_products.library() is thin_products.library() is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "/nonexistent --fast" in warning
    assert ("No such file" if cache == "cache" else "Not a directory") in warning
    assert "install g++, or set CXX" in warning
    assert not thin_products.available.__wrapped__()
    x, weight = randn(3, 32), randn(5, 32).bfloat16()
    assert torch.equal(thin_linear(x, weight), F.linear(x, weight.float()))


@pytest.mark.parametrize("source", ["this is no C++", '#error "no"'])
def test_what_does_not_compile_leaves_nothing(monkeypatch, tmp_path, caplog, source):
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path))
    broken = tmp_path / "broken.cpp"
    broken.write_text(source)
    monkeypatch.setattr(thin_products, "SOURCES", [broken])
    assert thin_products.compile_for.__wrapped__(AVX2) is None
    assert not list((tmp_path / "kernels").iterdir())
    assert "broken.cpp" in caplog.text, "what the compiler said"


@pytest.mark.parametrize("instructions", [None, *CAN_RUN], ids=lambda value: NAMES.get(value, "torch"))
@pytest.mark.parametrize("columns", [5, 511, 1_030, 49_152])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_largest_and_the_sum(instructions, columns, count, monkeypatch):
    """Two rows of logits, one of them with equal entries, at the ends of a piece and beyond, and with some that are minus infinity."""
    monkeypatch.setattr(thin_products, "library", lambda: instructions and thin_products.compile_for(instructions))
    logits = torch.randn(2, columns, generator=torch.Generator().manual_seed(0)) * 4
    logits[1] = float("-inf")
    logits[1, [0, columns - 1, columns // 2]] = torch.tensor([7.0, 7.0, 2.0])
    values, places, log_total = thin_products.largest(logits, count)
    torch.testing.assert_close(values, logits.topk(count).values, atol=0, rtol=0)
    torch.testing.assert_close(logits.gather(1, places), values, atol=0, rtol=0)
    assert all(len(set(row)) == count for row in places.tolist())
    torch.testing.assert_close(log_total, logits.double().logsumexp(-1, keepdim=True).float(), atol=1e-5, rtol=1e-6)
    kept = torch.empty_like(values), torch.empty_like(places)
    thin_products.largest_into(logits, *kept)
    assert torch.equal(kept[0], values)
    assert torch.equal(kept[1], places)
