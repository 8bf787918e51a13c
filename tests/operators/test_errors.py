"""Bad input raises an error that names the argument, what was expected and what came."""

import pytest
import torch
from flashrope import Rotary, attention, attention_varlen

ROPE = Rotary.rope(16)


def tensors(**changes):
    return {
        "q": torch.zeros(2, 6, 4, 16),
        "k": torch.zeros(2, 6, 2, 16),
        "v": torch.zeros(2, 6, 2, 16),
        "rotary": ROPE,
    } | changes


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


BAD_CALLS = {
    "q is no tensor": ({"q": [1.0]}, TypeError, "q: expected a tensor, got list"),
    "k is no tensor": ({"k": None}, TypeError, "k: expected a tensor, got NoneType"),
    "rank of q": (
        {"q": zeros(6, 4, 16)},
        ValueError,
        r"q: expected \(batch, seqlen, heads, head_dim\), got shape \(6, 4, 16\)",
    ),
    "rank of v": ({"v": zeros(2, 6, 2, 16, 1)}, ValueError, r"v: expected \(batch.*got shape \(2, 6, 2, 16, 1\)"),
    "dtype of q": ({"q": zeros(2, 6, 4, 16, dtype=torch.int64)}, TypeError, "q: expected float16.*got torch.int64"),
    "dtype of k": (
        {"k": zeros(2, 6, 2, 16, dtype=torch.float16)},
        TypeError,
        "k: expected torch.float32 as in q, got torch.float16",
    ),
    "complex v": (
        {"v": zeros(2, 6, 2, 16, dtype=torch.complex64)},
        TypeError,
        "v: expected float16.*got torch.complex64",
    ),
    "device of k": ({"k": zeros(2, 6, 2, 16, device="meta")}, ValueError, "k: expected device cpu as in q, got meta"),
    "device of v": ({"v": zeros(2, 6, 2, 16, device="meta")}, ValueError, "v: expected device cpu as in q, got meta"),
    "batch": ({"k": zeros(3, 6, 2, 16), "v": zeros(3, 6, 2, 16)}, ValueError, "k: expected batch 2 as in q, got 3"),
    "seqlen of v": (
        {"v": zeros(2, 5, 2, 16)},
        ValueError,
        r"v: expected shape \(2, 6, 2, 16\) as k, got \(2, 5, 2, 16\)",
    ),
    "heads of v": (
        {"v": zeros(2, 6, 4, 16)},
        ValueError,
        r"v: expected shape \(2, 6, 2, 16\) as k, got \(2, 6, 4, 16\)",
    ),
    "head_dim of k": ({"k": zeros(2, 6, 2, 24)}, ValueError, "k: expected head_dim 16 as in q, got 24"),
    "head ratio": (
        {"k": zeros(2, 6, 3, 16), "v": zeros(2, 6, 3, 16)},
        ValueError,
        "q: expected heads_q to be a multiple of heads_kv = 3, got 4",
    ),
    "no key heads": (
        {"k": zeros(2, 6, 0, 16), "v": zeros(2, 6, 0, 16)},
        ValueError,
        "q: expected heads_q to be a multiple of heads_kv = 0, got 4",
    ),
    "head_dim of the scheme": ({"rotary": Rotary.rope(32)}, ValueError, "rotary: expected head_dim 16 as in q, got 32"),
    "no scheme": ({"rotary": "rope"}, TypeError, "rotary: expected a flashrope.Rotary, got str"),
    "stride of q": (
        {"q": zeros(2, 6, 16, 4).transpose(2, 3)},
        ValueError,
        "q: expected a contiguous last dimension, got stride 4",
    ),
    "stride of v": (
        {"v": zeros(2, 6, 2, 32)[..., ::2]},
        ValueError,
        "v: expected a contiguous last dimension, got stride 2",
    ),
    "softmax_scale": ({"softmax_scale": "large"}, TypeError, "softmax_scale: expected a number, got 'large'"),
    "softmax_scale not finite": (
        {"softmax_scale": float("nan")},
        ValueError,
        "softmax_scale: expected a finite number .* got nan",
    ),
    "softmax_scale below 0": ({"softmax_scale": -0.5}, ValueError, "softmax_scale: expected .* at least 0, got -0.5"),
    "causal": ({"causal": 3}, TypeError, "causal: expected True or False, got 3"),
    "deterministic": ({"deterministic": 0}, TypeError, "deterministic: expected True or False, got 0"),
    "impl": ({"impl": "flash"}, ValueError, "impl: expected None or one of triton, cuda, cpu, reference, got 'flash'"),
    "impl cuda": ({"impl": "cuda"}, ValueError, "impl='cuda' cannot serve this call: "),
    "axial without positions": (
        {"rotary": Rotary.axial(16)},
        ValueError,
        r"positions: expected shape \(batch, seqlen, 2\) for an axial scheme, got None",
    ),
    "positions of bands": (
        {"rotary": ROPE.rectify(3), "positions": zeros(2, 6)},
        ValueError,
        "positions: expected None, or a scheme whose distance is d everywhere, got one with bands",
    ),
    "shape of positions": (
        {"positions": zeros(2, 5)},
        ValueError,
        r"positions: expected shape \(2, 6\) or \(6,\), got \(2, 5\)",
    ),
    "axes of positions": (
        {"rotary": Rotary.axial(16), "positions": zeros(2, 6, 3)},
        ValueError,
        r"positions: expected shape \(2, 6, 2\).*got \(2, 6, 3\)",
    ),
    "positions are no tensor": ({"positions": [0, 1]}, TypeError, "positions: expected a tensor, got list"),
    "positions are flags": (
        {"positions": zeros(2, 6, dtype=torch.bool)},
        TypeError,
        "positions: expected numbers, got torch.bool",
    ),
    "device of positions": (
        {"positions": zeros(2, 6, device="meta")},
        ValueError,
        "positions: expected device cpu as q, got meta",
    ),
    "positions of other lengths": (
        {"k": zeros(2, 7, 2, 16), "v": zeros(2, 7, 2, 16), "positions": zeros(2, 6)},
        ValueError,
        "positions: expected None, or seqlen_q == seqlen_k, got 6 and 7",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_attention(changes, error, message):
    with pytest.raises(error, match=message):
        attention(**tensors(**changes))


@pytest.mark.parametrize("head_dim", [4, 12, 264])
def test_head_dim_out_of_range(head_dim):
    q = torch.zeros(1, 2, 1, head_dim)
    with pytest.raises(ValueError, match=f"q: expected head_dim to be a multiple of 8 up to 256, got {head_dim}"):
        attention(q, q, q, Rotary.rope(head_dim))


def test_a_backend_on_the_wrong_device():
    q, k = torch.zeros(2, 6, 4, 16, device="meta"), torch.zeros(2, 6, 2, 16, device="meta")
    with pytest.raises(
        ValueError, match="impl='cpu' cannot serve this call: its tensors must lie on the CPU, q is on meta"
    ):
        attention(q, k, k, ROPE, impl="cpu")


def test_triton_in_float64():
    q = torch.zeros(2, 6, 4, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="impl='triton' cannot serve this call: .*float64"):
        attention(q, q, q, ROPE, impl="triton")


CU = torch.tensor([0, 4, 9], dtype=torch.int32)


def packed(**changes):
    given = {
        "q": zeros(9, 4, 16),
        "k": zeros(9, 2, 16),
        "v": zeros(9, 2, 16),
        "rotary": ROPE,
        "cu_seqlens_q": CU,
        "cu_seqlens_k": CU,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    return given | changes


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_PACKED_CALLS = {
    "rank": (
        {"q": zeros(1, 9, 4, 16)},
        ValueError,
        r"q: expected \(total, heads, head_dim\), got shape \(1, 9, 4, 16\)",
    ),
    "axial": ({"rotary": Rotary.axial(16)}, ValueError, r"positions: an axial scheme needs them, shape \(total, 2\)"),
    "positions of unequal sequences": (
        {"positions": zeros(9), "cu_seqlens_k": torch.tensor([0, 5, 9], dtype=torch.int32)},
        ValueError,
        r"positions: expected equal cu_seqlens_q and cu_seqlens_k, got \[0, 4, 9\] and \[0, 5, 9\]",
    ),
    "positions of another shape": (
        {"positions": zeros(9, 2)},
        ValueError,
        r"positions: expected shape \(9,\), got \(9, 2\)",
    ),
    "no tensor": ({"cu_seqlens_q": [0, 4, 9]}, TypeError, "cu_seqlens_q: expected an int32 tensor, got list"),
    "int64": ({"cu_seqlens_k": CU.long()}, TypeError, "cu_seqlens_k: expected int32, got torch.int64"),
    "two dimensions": (
        {"cu_seqlens_q": CU[None]},
        ValueError,
        r"cu_seqlens_q: expected shape \(sequences \+ 1,\), got \(1, 3\)",
    ),
    "no entry": ({"cu_seqlens_q": CU[:0]}, ValueError, r"cu_seqlens_q: expected shape \(sequences \+ 1,\), got \(0,\)"),
    "device": ({"cu_seqlens_k": CU.to("meta")}, ValueError, "cu_seqlens_k: expected device cpu as k, got meta"),
    "stride": (
        {"cu_seqlens_q": int32(0, 9, 4, 9, 9, 9)[::2]},
        ValueError,
        "cu_seqlens_q: expected a contiguous tensor",
    ),
    "counts": (
        {"cu_seqlens_k": int32(0, 9), "max_seqlen_k": 9},
        ValueError,
        r"cu_seqlens_k: expected shape \(3,\) as cu_seqlens_q, got \(2,\)",
    ),
    "start": ({"cu_seqlens_q": int32(1, 4, 9)}, ValueError, "cu_seqlens_q: expected to start at 0, got 1"),
    "order": (
        {"cu_seqlens_k": int32(0, 6, 4)},
        ValueError,
        r"cu_seqlens_k: expected non-decreasing values, got \[0, 6, 4\]",
    ),
    "end": (
        {"cu_seqlens_q": int32(0, 5, 10)},
        ValueError,
        "cu_seqlens_q: expected to end at 9 at most, the rows of q, got 10",
    ),
    "bound": ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q: expected at least the longest sequence, 5, got 4"),
    "negative bound": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: expected a non-negative integer, got -1"),
    "bound is no integer": (
        {"max_seqlen_k": 5.0},
        ValueError,
        "max_seqlen_k: expected a non-negative integer, got 5.0",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_PACKED_CALLS.values(), ids=BAD_PACKED_CALLS.keys())
def test_attention_varlen(changes, error, message):
    with pytest.raises(error, match=message):
        attention_varlen(**packed(**changes))


def test_the_good_calls_are_good():
    """The calls that the bad ones above change in one place."""
    assert attention(**tensors()).shape == (2, 6, 4, 16)
    assert attention_varlen(**packed()).shape == (9, 4, 16)


@pytest.mark.parametrize("window", [-1, 2.0, True, None])
@pytest.mark.parametrize("method", ["rectify", "local"])
def test_windows(method, window):
    with pytest.raises(ValueError, match=f"window: expected a non-negative integer, got {window}"):
        getattr(ROPE, method)(window)
