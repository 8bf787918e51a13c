"""Tests which backend impl=None takes: the table for GPUs without a GPU, and the choice on the CPU."""

import pytest
import torch
from flashrope import Rotary, attention
from flashrope.backends import chosen, others
from flashrope.backends.chosen import BOTH, Row, Shape, choose
from flashrope.backends.registry import load_backend, resolve_impl
from flashrope.backends.sdpa import whole
from flashrope.calls.records import AttentionCall
from support import int32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

H200 = Shape(90, torch.bfloat16, 128, 128, 8192, 8192)
HOPE = Rotary.hope(128, 8192)
CALL = AttentionCall(HOPE, True, 0.1, max_seqlen_q=8192, max_seqlen_k=8192)

# (changes of the shape, changes of the call)
CUDNN = {
    "HoPE on an H200": ({}, {}),
    "float16": ({"dtype": torch.float16}, {}),
    "64 channels": ({"head_dim": 64, "head_dim_v": 64}, {"rotary": Rotary.hope(64, 8192)}),
    "the shortest": ({"seqlen_q": 1024, "seqlen_k": 1024}, {}),
    "full": ({}, {"causal": False}),
    "full, other lengths": ({"seqlen_q": 77}, {"causal": False}),
    "RoPE": ({}, {"rotary": Rotary.rope(128)}),
    "YaRN": ({}, {"rotary": Rotary.rope(128).yarn(4.0, train_length=8192)}),
    "nothing rotates": ({}, {"rotary": Rotary.none(128)}),
    "Blackwell": ({"capability": 100}, {}),
    "deterministic=False": ({}, {"deterministic": False}),
}
TRITON = {
    "A100": ({"capability": 80}, {}),
    "RTX 5090": ({"capability": 120}, {}),
    "AMD": ({"capability": None}, {}),
    "float32": ({"dtype": torch.float32}, {}),
    "256 channels": ({"head_dim": 256, "head_dim_v": 256}, {"rotary": Rotary.hope(256, 8192)}),
    "v has another head_dim": ({"head_dim_v": 64}, {}),
    "short": ({"seqlen_q": 1023, "seqlen_k": 1023}, {}),
    "a chunk": ({"seqlen_q": 512}, {}),
    "packed": ({}, {"cu_seqlens_q": int32([0, 8192]), "cu_seqlens_k": int32([0, 8192])}),
    "positions": ({}, {"positions": torch.arange(8192)[None]}),
    "ReRoPE": ({}, {"rotary": HOPE.rectify(2048)}),
    "a window": ({}, {"rotary": HOPE.local(2048)}),
    "log n": ({}, {"rotary": HOPE.log_n(2048)}),
    "deterministic=True": ({}, {"deterministic": True}),
}
EXPECTED = [(name, *changes, "sdpa") for name, changes in CUDNN.items()]
EXPECTED += [(name, *changes, "triton") for name, changes in TRITON.items()]


@pytest.mark.parametrize("name, shape, call, expected", EXPECTED, ids=[each[0] for each in EXPECTED])
def test_the_table(name, shape, call, expected):
    shape, call = H200._replace(**shape), CALL._replace(**call)
    assert [choose(shape, call, direction) for direction in BOTH] == [expected] * 2
    assert choose(shape, call, "backward", grad_lse=True) == "triton"


def test_what_turns_the_table_off(monkeypatch):
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(H200, CALL, "forward") == choose(H200, CALL, "backward") == "triton"
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose(H200, CALL, "forward") == "sdpa"
    monkeypatch.setenv("FLASHROPE_SDPA", "0")
    assert choose(H200, CALL, "forward") == "triton" and chosen.row_of(H200, CALL) is None


def test_a_row_for_one_direction(monkeypatch):
    monkeypatch.setattr(chosen, "ROWS", (Row(range(80, 90), 128, 1024, ("backward",), "a test"),))
    shape = H200._replace(capability=80)
    assert choose(shape, CALL, "forward") == "triton" and choose(shape, CALL, "backward") == "sdpa"


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.partition(".")[0])
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("seqlen, name", [(2048, "cudnn"), (512, "triton")])
def test_what_is_called_on_an_h200(monkeypatch, seqlen, name):
    """Training with HoPE calls cuDNN's operators, forward and backward, through the same functions as on the device."""
    triton, took = load_backend("triton"), []
    monkeypatch.setattr(triton, "compute_capability", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(whole, "_rotate", lambda x, *_, **__: x)
    monkeypatch.setattr(triton, "forward", lambda q, k, v, call: took.append(call) or (None, None, None))
    call = CALL._replace(max_seqlen_q=seqlen, max_seqlen_k=seqlen)
    with FakeTensorMode(), Recorded() as recorded:
        q, k, v = (torch.empty(1, seqlen, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
        assert resolve_impl(None, q) == "auto" and resolve_impl(None, q, cached=True) == "triton"
        backend = load_backend("auto")
        out, lse, kept = backend.forward(q, k, v, call)
        if name == "triton":
            assert took[0].whole_keys and "_scaled_dot_product_cudnn_attention" not in recorded.names
            return
        assert out.shape == q.shape and lse.shape == (1, 8, seqlen) and lse.dtype == torch.float32
        assert kept.rotated_k.shape == (1, seqlen, 2, 128) == backend.kept_shapes(k, call).rotated_k
        grads = backend.backward(torch.empty_like(out), None, q, k, v, out, lse, kept, call)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape] and not took
    wanted = ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]
    assert [x for x in recorded.names if "attention" in x] == wanted


def test_the_cpu_takes_the_compiled_kernels(compiled, monkeypatch):
    taken, (q, k, v) = [], torch.randn(3, 1, 9, 2, 16)
    for name in ("cpu", "sdpa"):
        backend = others.backend(name)
        stock = backend.forward
        monkeypatch.setattr(backend, "forward", lambda *x, name=name, stock=stock: taken.append(name) or stock(*x))
    for x in (q, k, v), (q.double(), k.double(), v.double()):
        attention(*x, Rotary.rope(16))
    assert taken == ["cpu", "sdpa"]
    assert chosen.defaults(q)["cpu"] == "" and chosen.defaults(q.double()) == {"sdpa": ""}


def test_rows_say_what_they_rest_on():
    assert all(row.reason for row in chosen.ROWS)
    assert str(chosen.ROWS[0]).startswith("sm_90 to sm_99, forward and backward: one band, float16 and bfloat16")
