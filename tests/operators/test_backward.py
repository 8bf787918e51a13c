"""Tests which kernels the Triton backward launches and what the forward saves. test_accuracy.py compares its results
with the reference."""

from functools import partial

import pytest
import support
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from flashrope import Rotary, attention
from flashrope.backends.triton import attention as plans
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.backends.triton import launcher
from flashrope.triton_kernels import configs
from packing import packing
from support import SCHEMES


@pytest.fixture
def target():
    """Returns the test target with impl "triton" and dtype float32, or skips the test if there is none."""
    found = [target for target in support.TARGETS if target.impl == "triton" and target.dtype == torch.float32]
    return found[0] if found else pytest.skip("Triton neither compiles nor interprets here")


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Records the names of the kernels that are launched."""
    names, launch = [], launcher.launch

    def watched(kernel, *args, **options):
        names.append(kernel.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(launcher, "launch", watched)
    return names


@pytest.fixture
def deterministic():
    """Returns torch.use_deterministic_algorithms, and undoes its effect after the test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---- queries


@pytest.mark.parametrize("layout", ["transposed", "poisoned"])
@pytest.mark.parametrize("rotary", [Rotary.none(16).local(9)], ids=["local"])
def test_queries_that_do_not_rotate_are_read_in_place(target, launched, rotary, layout):
    support.check(target, support.problem(target, rotary, 40, 50, batch=2, seed=1, layout=layout))
    assert "attention_grad_kv" in launched and "rotate_rows" not in launched


def test_queries_of_packed_sequences_are_read_in_place(target, launched):
    p = packing(target, Rotary.none(16), (13, 37), heads=2, heads_kv=1)
    p.check(p.run("triton"), target.dtype)
    assert "rotate_rows" not in launched


def test_log_n_and_rotations_need_a_copy(target, launched):
    for rotary in (Rotary.none(16).log_n(10), Rotary.rope(16)):
        launched.clear()
        support.check(target, support.problem(target, rotary, 20, seed=3))
        assert launched.count("rotate_rows") == (1 if rotary.log_n_scale else 2)


# ---- dQ by atomics

FINISH = "attention_finish_grad_q"
BOTH_SIDES = ("rope", "local", "rerope", "leaky", "inverse_leaky", "hope_rerope_log_n")
# The cases that the interpreter runs in the default tests: every layout of pairs, and one scheme of each kind of bands.
CAUSAL = ("rope_interleaved", "rope_partial", "hope_compact", "rerope", "local", "yarn_leaky_local_log_n")
FIVE = [(name, True, name in CAUSAL) for name in SCHEMES]
FIVE += [(name, False, name in ("rope", "leaky", "hope_rerope_log_n")) for name in BOTH_SIDES]


def rows(cases):
    """Returns pytest's parameters. cases: (arguments..., whether the interpreter runs the case by default)."""
    slow = () if torch.cuda.is_available() else pytest.mark.slow
    return [pytest.param(*arguments, marks=() if quick else slow) for *arguments, quick in cases]


def check_atomic(target, rotary, *lengths, **options):
    support.check(target, support.problem(target, rotary, *lengths, deterministic=False, **options))


@pytest.mark.parametrize(("scheme", "causal"), rows(FIVE))
def test_five_products(target, launched, scheme, causal):
    check_atomic(target, SCHEMES[scheme](16), 41, 55, causal=causal, seed=4)
    assert FINISH in launched and "attention_grad_q" not in launched


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("scheme", ["rope", "rerope"])
def test_scores_with_rows_of_queries(target, scheme, deterministic):
    tile = configs.Tile(16, 64, 4, 1)
    assert configs.query_rows(80, tile, 128)
    with tiles.forced("grad_kv", tile), tiles.forced("grad_qkv", tile):
        p = support.problem(target, SCHEMES[scheme](128), 41, 70, seed=6, deterministic=deterministic)
        support.check(target, p)


LENGTHS = [(64, 64), (1, 1), (1, 70), (70, 1), (70, 33), (0, 5), (5, 0)]


@pytest.mark.parametrize(
    ("scheme", "causal", "lengths"),
    rows(
        (scheme, causal, lengths, scheme == "rerope" and (causal or lengths == (70, 33)))
        for lengths in LENGTHS
        for causal in (True, False)
        for scheme in ("rope", "rerope")
    ),
    ids=str,
)
def test_five_products_of_any_length(target, scheme, causal, lengths):
    batch = 2 if lengths == (70, 33) else 1
    check_atomic(target, SCHEMES[scheme](8), *lengths, causal=causal, batch=batch, seed=5)


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (24, {"layout": "poisoned"}),
        (40, {"heads": 3, "group": 3, "batch": 2}),
        (72, {"layout": "transposed", "heads": 4, "group": 1}),
    ],
)
def test_five_products_of_any_shape(target, head_dim, options):
    check_atomic(target, SCHEMES["leaky"](head_dim), 37, 45, causal=False, seed=6, **options)


@pytest.mark.parametrize("axial", [False, True])
def test_five_products_at_given_positions(target, axial):
    given = torch.rand(2, 40, generator=torch.Generator().manual_seed(7)) * 40 - 3
    rotary = Rotary.rope(16, rotary_dim=8).log_n(20)
    if axial:
        row = torch.arange(40)
        given, rotary = torch.stack((row // 6, row % 6), -1).expand(2, 40, 2), Rotary.axial(16)
    check_atomic(target, rotary, 40, batch=2, positions=given.to(target.device), causal=not axial, seed=7)


@pytest.mark.parametrize(("scheme", "causal"), [("rope", False), ("hope_rerope_log_n", True)])
def test_five_products_of_packed_sequences(target, launched, scheme, causal):
    """The backward with five products is right for packed sequences. Rows outside every sequence get 0."""
    p = packing(target, SCHEMES[scheme](16), (13, 0, 37, 5), (13, 4, 50, 0), spare=5, causal=causal)
    p.check(p.run("triton", deterministic=False), target.dtype)
    assert FINISH in launched


def test_the_default_uses_no_atomics(target, launched):
    support.check(target, support.problem(target, SCHEMES["rerope"](16), 40, seed=12))
    assert "attention_grad_q" in launched and FINISH not in launched


def compiled_operator(rotary, deterministic):
    def call(q, k, v, positions=None):
        options = (rotary.text, True, 16**-0.5, q.shape[1], k.shape[1], deterministic, False, "triton")
        return torch.ops.flashrope.attention(q, k, v, positions, None, None, *options)[0]

    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_operator_carries_the_choice(target, launched, compiled, deterministic):
    rotary = Rotary.rope(16)

    def call(q, k, v):
        return attention(q, k, v, rotary, impl="triton", deterministic=deterministic)

    if compiled:
        call = compiled_operator(rotary, deterministic)
    q, k, v = (support.random((1, 20, 1, 16), target, seed).requires_grad_() for seed in range(3))
    torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    assert (FINISH in launched, "attention_grad_q" in launched) == (not deterministic, deterministic)


@pytest.mark.filterwarnings("error:deterministic")
def test_torch_is_asked_for_deterministic_algorithms(target, deterministic):
    q, k, v = (support.random((1, 20, 1, 16), target, seed).requires_grad_() for seed in range(3))

    def step(asked):
        out = attention(q, k, v, Rotary.rope(16), impl="triton", deterministic=asked)
        return torch.autograd.grad(out.sum(), (q, k, v))

    message = r"deterministic: expected True under torch.use_deterministic_algorithms\(True\), got False"
    deterministic(True)
    step(True)
    with pytest.raises(RuntimeError, match=message):
        step(False)
    deterministic(True, warn_only=True)
    with pytest.warns(UserWarning, match=message):
        step(False)
    deterministic(False)
    step(False)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "enabled", "atomics"),
    [
        (64, torch.float16, False, True),
        (64, torch.float16, True, False),
        (64, torch.float32, False, False),
        (16, torch.float16, False, False),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_none_follows_torch(launched, target, deterministic, compiled, head_dim, dtype, enabled, atomics):
    """deterministic=None follows torch's setting when the backward runs. Without the setting, the backward uses
    atomics if they are predicted to be faster for the shape."""
    rotary = Rotary.rope(head_dim)
    run = compiled_operator(rotary, None) if compiled else partial(attention, rotary=rotary, impl="triton")
    options = {"dtype": dtype, "device": target.device, "requires_grad": True}
    q, k, v = (torch.randn(1, 20, 1, head_dim, **options) for _ in range(3))
    deterministic(enabled and compiled)  # torch.compile allows no change between forward and backward
    out = run(q, k, v) if compiled else run(q, k, v, deterministic=None)
    deterministic(enabled)
    out.sum().backward()
    assert (FINISH in launched, "attention_grad_q" in launched) == (atomics, not atomics)


# ---- what the forward keeps


@pytest.mark.parametrize("compiled", [False, True])
def test_the_table_of_given_positions_is_built_once_per_step(target, monkeypatch, compiled):
    built, position_table = [], plans.position_table
    monkeypatch.setattr(plans, "position_table", lambda *args: built.append(args) or position_table(*args))
    rotary = Rotary.rope(16)

    def call(q, k, v, positions):
        return attention(q, k, v, rotary, positions=positions, impl="triton")

    if compiled:
        call = compiled_operator(rotary, True)
    q, k, v = (support.random((2, 20, 1, 16), target, seed).requires_grad_() for seed in range(3))
    positions = torch.rand(2, 20, device=target.device) * 20
    grads = torch.autograd.grad(call(q, k, v, positions).square().sum(), (q, k, v))
    assert len(built) == 1
    want = torch.autograd.grad(
        attention(q, k, v, rotary, positions=positions, impl="reference").square().sum(), (q, k, v)
    )
    torch.testing.assert_close(grads, want)
