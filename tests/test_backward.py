"""What the Triton backward does besides its numbers, which test_accuracy.py holds against the reference."""

import pytest
import support
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from flashrope import Rotary, attention_varlen
from flashrope.backends.triton import launcher


@pytest.fixture
def target():
    """Triton in float32."""
    found = [target for target in support.TARGETS if target.impl == "triton" and target.dtype == torch.float32]
    return found[0] if found else pytest.skip("Triton neither compiles nor interprets here")


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that were launched."""
    names, launch = [], launcher.launch

    def watched(kernel, *args, **options):
        names.append(kernel.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(launcher, "launch", watched)
    return names


# ---- queries


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "poisoned"])
@pytest.mark.parametrize("rotary", [Rotary.none(16), Rotary.none(16).local(9)], ids=["none", "local"])
def test_queries_that_do_not_rotate_are_read_in_place(target, launched, rotary, layout):
    support.check(target, support.problem(target, rotary, 40, 50, batch=2, seed=1, layout=layout))
    assert "attention_grad_kv" in launched and "rotate_rows" not in launched


def test_queries_of_packed_sequences_are_read_in_place(target, launched):
    x = support.random((1, 50, 4, 16), target, 2)[0]
    starts = torch.tensor([0, 13, 50], dtype=torch.int32, device=target.device)
    grads = {}
    for impl in ("triton", "reference"):
        q, k, v = (x[:, heads].detach().requires_grad_() for heads in (slice(0, 2), slice(2, 3), slice(3, 4)))
        out = attention_varlen(q, k, v, Rotary.none(16), starts, starts, 37, 37, impl=impl)
        grads[impl] = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(grads["triton"], grads["reference"])
    assert "rotate_rows" not in launched


def test_log_n_and_rotations_need_a_copy(target, launched):
    for rotary in (Rotary.none(16).log_n(10), Rotary.rope(16)):
        launched.clear()
        support.check(target, support.problem(target, rotary, 20, seed=3))
        assert launched.count("rotate_rows") == (1 if rotary.log_n_scale else 2)
