"""Tests v and out with a different head_dim than q and k, as in multi-head latent attention."""

import pytest
import test_varlen
import torch
from flashrope import KVCache, Rotary, attention, attention_with_cache
from support import SCHEMES, check, problem

WIDTHS = {(64, 128): "rerope", (128, 64): "rope_interleaved", (192, 128): "rope_partial", (80, 256): "leaky"}
widths = pytest.mark.parametrize(("head_dim", "head_dim_v"), WIDTHS, ids=lambda n: str(n))


def small(target, head_dim, head_dim_v):
    """Returns smaller widths for Triton's interpreter. A smaller width is a power of two if the original width is."""
    return (head_dim // 4, head_dim_v // 4) if target.slow and head_dim != 80 else (head_dim, head_dim_v)


@pytest.mark.interpreted(lambda target, causal, **_: causal == (target.dtype == torch.float32))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@widths
def test_accuracy(target, head_dim, head_dim_v, causal):
    """Results stay within the budget for grouped heads, odd lengths and the bands of several schemes."""
    scheme = WIDTHS[head_dim, head_dim_v]
    head_dim, head_dim_v = small(target, head_dim, head_dim_v)
    check(target, problem(target, SCHEMES[scheme](head_dim), 37, 53, seed=1, head_dim_v=head_dim_v, causal=causal))


@pytest.mark.interpreted(lambda exact, width, layout: width == ((16, 40) if layout == "poisoned" else (40, 16)))
@pytest.mark.parametrize("layout", ["transposed", "poisoned"])
@pytest.mark.parametrize("width", [(16, 40), (40, 16), (24, 8)], ids=str)
def test_strides(exact, width, layout):
    options = {"batch": 2, "heads": 6, "group": 3, "head_dim_v": width[1], "layout": layout}
    lengths = (25, 17) if exact.slow else (41, 33)
    check(exact, problem(exact, SCHEMES["local"](width[0]), *lengths, seed=2, **options))


@pytest.mark.parametrize("width", [(16, 32), (48, 16)], ids=str)
@pytest.mark.parametrize("scheme", ["hope_rerope_log_n", "none"])
def test_gradient_of_q_by_atomics(exact, scheme, width):
    options = {"head_dim_v": width[1], "causal": False, "deterministic": False}
    check(exact, problem(exact, SCHEMES[scheme](width[0]), 41, 55, seed=3, **options))


def test_sinks(exact):
    p = problem(exact, SCHEMES["rerope"](24), 30, heads=4, seed=4, head_dim_v=40)
    check(exact, p.replace(sinks=torch.tensor([0.5, -1.0, 3.0, 0.0], device=exact.device)))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 70), (70, 1), (0, 5), (5, 0)], ids=str)
def test_any_length(exact, lengths):
    check(exact, problem(exact, SCHEMES["rope"](16), *lengths, batch=2, seed=5, head_dim_v=24))


@pytest.mark.interpreted(lambda exact, width, causal: causal and width == (24, 40))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("width", [(24, 40), (192, 128)], ids=str)
def test_packed(exact, width, causal):
    lengths = test_varlen.LENGTHS["different"]
    test_varlen.test_packed_is_a_loop_over_sequences(exact, "hope_rerope_log_n", lengths, causal, *width)


def test_the_scale_is_that_of_q(exact):
    p = problem(exact, Rotary.rope(16), 20, seed=6, head_dim_v=40)
    q, k, v = p.q, p.k, p.v
    given = attention(q, k, v, p.rotary, softmax_scale=16**-0.5, impl=exact.impl)
    assert torch.equal(attention(q, k, v, p.rotary, impl=exact.impl), given) and given.shape == (1, 20, 2, 40)


def test_caches_name_what_they_expect():
    rotary, seqlens = Rotary.rope(64), torch.zeros(1, dtype=torch.int32)
    q, k, v = (torch.randn(1, 1, 2, width) for width in (64, 64, 32))
    k_cache, v_cache = torch.zeros(1, 16, 2, 64), torch.zeros(1, 16, 2, 32)
    with pytest.raises(
        ValueError, match="v_cache: expected head_dim to be a multiple of 8 up to 32, the head_dim of k_c"
    ):
        attention_with_cache(q[..., :32], v_cache, k_cache, Rotary.rope(32), seqlens, k=v, v=k)
    cache = KVCache(batch=1, capacity=16, heads_kv=2, head_dim=64, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"v: expected shape \(1, 1, 2, 64\), got \(1, 1, 2, 32\)"):
        cache.attend(q, rotary, k=k, v=v)


@pytest.mark.parametrize("direction", ["forward", "grad_kv", "grad_q", "grad_qkv", "decode"])
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_equal_widths_keep_their_tiles(capability, direction):
    triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from flashrope.triton_kernels import configs

    table = configs.HALF[configs.family(capability)]
    for block_d in (16, 32, 64, 128, 256):
        expected = table.get(direction, {}).get(block_d) or table["grad_kv"][block_d]
        given = [configs.tile(direction, capability, block_d, 2, 1, block_dv) for block_dv in (0, block_d)]
        assert given[0] == given[1]
        assert given[0] == expected or not triton.__version__.startswith("3.6.")  # newer versions have their own tiles
    if direction != "decode":
        assert configs.tile(direction, capability, 256, 2, 1, 64) == configs.tile(direction, capability, 256, 2, 1, 128)
    if direction == "forward" and capability != 80:
        assert configs.tile(direction, capability, 256, 2, 1, 128) != configs.tile(direction, capability, 256, 2, 1)
