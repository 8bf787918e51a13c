"""Shows the defect of Triton that ``hide_codes`` avoids: products that add up 16 terms of joined 8-bit loads."""

import importlib.util
import pathlib
import re

import pytest
import torch
import triton
import triton.language as tl
from flashrope.triton_kernels.quantized import hide_codes, join_codes

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "kernels.md"
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


@pytest.fixture
def product_of_the_page(tmp_path):
    """Writes the kernel of docs/kernels.md to a file and loads it, because Triton reads a kernel's source from a
    file."""
    (block,) = (x for x in re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M) if "def product" in x)
    path = tmp_path / "reproducer.py"
    path.write_text(block)
    spec = importlib.util.spec_from_file_location("reproducer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.product


@triton.jit
def hidden_product(a, b, out, K: tl.constexpr, JOINED: tl.constexpr):
    row, half = tl.arange(0, 16)[:, None], tl.arange(0, K // 2)[None, :]
    low = tl.load(b + row * (K // 2) + half).to(tl.int32).to(tl.float32) * 0.5
    low, high = low.to(tl.float16), (3 * low).to(tl.float16)
    keys = join_codes(low, high, K) if JOINED else hide_codes(tl.reshape(tl.join(low, high), (16, K)))
    queries = tl.load(a + row * K + tl.arange(0, K)[None, :])
    tl.store(out + row * 16 + tl.arange(0, 16)[None, :], tl.dot(queries, tl.trans(keys)))


def error(kernel, terms, *options):
    """Returns (the largest error, the widths that Triton chose)."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (16, terms), generator=generator).half()
    b = torch.randint(-4, 5, (16, terms // 2), generator=generator, dtype=torch.int8)
    out, keys = torch.empty(16, 16), torch.stack((b * 0.5, b * 1.5), -1).flatten(1)
    compiled = kernel[(1,)](a, b, out, terms, *options, num_warps=1)
    widths = {int(x) for x in re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])}
    return (out - a.float() @ keys.T).abs().max().item(), widths


@pytest.mark.parametrize("terms", [16, 32, 64])
def test_the_defect(machine, product_of_the_page, terms):
    """Triton 3.6 gives wrong results for products that add up 16 terms. If this test fails, Triton has changed.
    docs/kernels.md says which versions are wrong."""
    wrong, widths = error(product_of_the_page, terms)
    assert (wrong > 1) == (VERSION == (3, 6) and terms == 16)
    assert widths == {4 if terms == 16 and VERSION >= (3, 9) else 8}


@pytest.mark.quick
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("terms", [16, 32])
def test_hidden(machine, terms, joined):
    wrong, widths = error(hidden_product, terms, joined)
    assert wrong == 0
    assert widths == {8 if joined and terms == 32 else 2}
