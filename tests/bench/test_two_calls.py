"""Tests ReRoPE by two calls of a library: what makes it wrong is found, and PyTorch knows the calls of a GPU."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bench.speed import check, two_calls
from bench.speed.contestants import Contestant, eager
from bench.speed.problem import Problem, Unavailable

SMALL = Problem(1, 128, 4, 2, 32, torch.float64, torch.device("cpu"), window=32)
BANDS = partial(two_calls.two_calls, eager, "SDPA flash")


def error(backward: bool, prepare=BANDS, problem: Problem = SMALL) -> float:
    return check.error(Contestant("two calls", Problem.rerope, prepare), problem, backward)


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_two_calls_are_rerope(heads_kv, backward):
    assert error(backward, problem=SMALL.replace(heads_kv=heads_kv)) < 1e-14


@pytest.mark.parametrize("name", ["window", "merge", "lse of one band", "scale"])
def test_a_wrong_composition_is_found(monkeypatch, name):
    """The near band by one key too long, no merge, a backward with the lse of the near band alone, and a far band with
    another scale are all found."""
    plain = two_calls.CPU

    def forward(q, k, v, scale, window=0):
        return plain.forward(q, k, v, scale, window + (name == "window" and window > 0))

    def merged(near, near_lse, far, far_lse):
        out, lse = right(near, near_lse, far, far_lse)
        return (near if name == "merge" else out), (near_lse if name == "lse of one band" else lse)

    def far(q, k, v, scale, window=0):
        return forward(q, k, v, scale if window else scale * 1.1, window)

    right = two_calls.merge
    monkeypatch.setattr(two_calls, "CPU", plain._replace(forward=far if name == "scale" else forward))
    monkeypatch.setattr(two_calls, "merge", merged)
    assert error(True) > 1e-3
    if name == "lse of one band":
        assert error(False) < 1e-14


def test_what_two_calls_cannot_compute():
    for changes, reason in (
        ({"causal": False}, "without it three are needed"),
        ({"window": 128}, "no pair is beyond the window of 128"),
    ):
        with pytest.raises(Unavailable, match=reason):
            BANDS(SMALL.replace(**changes))
    for which in ("SDPA cuDNN", "flash-attn 3", "flash-attn 4"):
        with pytest.raises(Unavailable, match="needs a CUDA device"):
            two_calls.two_calls(eager, which, SMALL)


@pytest.mark.parametrize(("which", "window"), [("SDPA flash", 0), ("SDPA flash", 32), ("SDPA cuDNN", 0)])
def test_pytorch_knows_the_calls_of_a_gpu(which, window):
    """Both calls take and return the shapes that the composition needs, with grouped heads."""
    library = two_calls.LIBRARIES[which]()[1]
    with FakeTensorMode():
        q, k = (torch.empty(1, 256, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
        out, lse, kept = library.forward(q, k, k, 0.1, window)
        grads = library.backward(q, q, k, k, out, lse, kept, 0.1, window)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 4, 256), torch.float32)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def limits(left, right) -> int:
    """Returns the window that a library is asked for. Checks that it is causal."""
    if left in (None, -1):
        assert right in (None, -1)
        return 0
    assert right == 0
    return left + 1


class Installed:
    """Stands in for flash-attn 3 and 4: the functions that are called, with the arguments that these packages have."""

    def __init__(self):
        self.windows, self.plain = [], two_calls.CPU

    def computed(self, call, *args, causal, window):
        assert causal and all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor))
        self.windows.append(window)
        return call(*args, window)

    def _flash_attn_forward(
        self, q, k, v, k_new=None, v_new=None, qv=None, out_=None, softmax_scale=None, causal=False,
        window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        window = limits(window_size_left, window_size_right)
        out, lse, _ = self.computed(self.plain.forward, q, k, v, softmax_scale, causal=causal, window=window)
        return out, lse, torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        given, window = (dout, q, k, v, out, softmax_lse), limits(window_size_left, window_size_right)
        found = self.computed(self.plain.backward, *given, (), softmax_scale, causal=is_causal, window=window)
        for to, grad in zip((dq, dk, dv), found, strict=True):
            to.copy_(grad)
        return torch.tensor([])

    def _flash_attn_fwd(
        self, q, k, v, cu_seqlens_q=None, softmax_scale=None, causal=False, window_size_left=None,
        window_size_right=None, return_lse=False,
    ):  # fmt: skip
        window = limits(window_size_left, window_size_right)
        out, lse, _ = self.computed(self.plain.forward, q, k, v, softmax_scale, causal=causal, window=window)
        return out, lse if return_lse else None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None,
    ):  # fmt: skip
        given, window = (dout, q, k, v, out, lse), limits(window_size_left, window_size_right)
        return self.computed(self.plain.backward, *given, (), softmax_scale, causal=causal, window=window)


MODULES = {"flash-attn 3": "flash_attn_interface", "flash-attn 4": "flash_attn.cute.interface"}


def installed(monkeypatch, which: str) -> Installed:
    """Installs a package that computes on the CPU, and lets the two calls use it there."""
    package = Installed()
    for path in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, path, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, MODULES[which], package)
    near, far = two_calls.LIBRARIES[which]()
    assert near is far
    monkeypatch.setattr(two_calls, "CPU", far)
    return package
