"""Tests the built kernel. The hub's builder runs this file and sets LOCAL_KERNELS."""

import kernels
import pytest
import torch

flashrope = kernels.get_kernel("flashrope/flashrope", version=0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.kernels_ci
def test_attention_and_gradients():
    q, k, v = torch.randn(3, 1, 100, 4, 64, device=DEVICE, requires_grad=True).unbind()
    rotary = flashrope.Rotary.rope(64).rectify(16)
    out, expected = (flashrope.attention(q, k, v, rotary, impl=impl) for impl in (None, "reference"))
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    grads = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


@pytest.mark.kernels_ci
def test_rotate_one_tensor_in_part():
    x = torch.randn(2, 50, 3, 64, device=DEVICE)
    rotary = flashrope.Rotary.rope(64, rotary_dim=16)
    out = torch.compile(flashrope.rotate, backend="eager", fullgraph=True)(x, rotary)
    torch.testing.assert_close(out, flashrope.rotate(x, rotary, impl="reference"), rtol=1e-4, atol=1e-4)
    assert torch.equal(out[..., 16:], x[..., 16:])
