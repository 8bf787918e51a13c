"""Compares rotate with complex numbers in float64, and tests its derivatives and what it refuses."""

import math

import pytest
import support
import torch
from flashrope import Band, Rotary, attention, rotate
from small_calls import check_refused
from support import COEFFICIENT, SCHEMES, UNIT_ROUNDOFF
from torch.func import jvp, vmap

ONE_ROTATION = (
    *("none", "rope", "rope_interleaved", "rope_partial", "hope_zeros", "hope_paper", "hope_compact", "interpolated"),
    *("ntk", "hope_yarn", "local", "log_n_clipped"),
)
MORE = {
    "rotated_scale": lambda d: Rotary.rope(d, rotary_dim=d // 2).scale_rotated(2.25),
    "scaled_interleaved": lambda d: Rotary.rope(d, interleaved=True).scale_rotated(0.5).yarn(4.0, 64),
    "slope": lambda d: Rotary(d, Rotary.rope(d).frequencies, bands=(Band(0, math.inf, 0.25, 0.0),)),
}
ROTATIONS = {name: SCHEMES[name] for name in ONE_ROTATION} | MORE
SEVERAL = {
    "ReRoPE": Rotary.rope(16).rectify(21),
    "Leaky ReRoPE": Rotary.rope(16).rectify(21, 4.0),
    "Self-Extend": Rotary.rope(16).self_extend(16, 4),
    "dual chunk attention": Rotary.rope(16).dual_chunk(256, 128),
    "bands of several rotations": Rotary(16, (1.0,), bands=(Band(0, 3, 1.0, 0.0), Band(3, 9, 2.0, 0.0))).local(8),
}


def by_complex_numbers(x: torch.Tensor, rotary: Rotary, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x (batch, seqlen, heads, head_dim) rotated in float64: pair (a, b) becomes (a + ib) * exp(i * position *
    inv_freq)."""
    x, dim = x.double().cpu(), rotary.rotary_dim
    positions = torch.arange(x.shape[1]) if positions is None else positions.cpu()
    positions = positions.double()[..., list(rotary.axis)] if rotary.axis else positions.double()[..., None]
    turn = torch.exp(1j * rotary.bands[0].slope * positions * rotary.inv_freq)[..., None, :]
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2)) if rotary.interleaved else (slice(dim // 2), slice(dim // 2, dim))
    )
    turned = math.sqrt(rotary.rotated_scale) * turn * torch.complex(x[..., first], x[..., second])
    y = x.clone()
    y[..., first], y[..., second] = turned.real, turned.imag
    return y


def check(target, x, rotary, positions=None, inverse_of=None) -> None:
    """Checks that every element is right within one rounding of the length of its pair."""
    got = rotate(x, rotary, positions, impl=target.impl)
    assert got.dtype == target.dtype and got.is_contiguous() and got.shape == x.shape
    exact = by_complex_numbers(x, rotary, positions)
    bound = support.pair_lengths(x.double().cpu(), rotary)
    bound[..., : rotary.rotary_dim] *= math.sqrt(rotary.rotated_scale)
    least = torch.finfo(target.dtype).smallest_normal
    error = (got.double().cpu() - exact).abs()
    assert (error <= COEFFICIENT[target.dtype] * UNIT_ROUNDOFF[target.dtype] * bound + least).all(), (
        error / bound
    ).max() / UNIT_ROUNDOFF[target.dtype]


@pytest.mark.interpreted(lambda target, scheme: target.dtype == torch.float32)
@pytest.mark.parametrize("scheme", ROTATIONS)
def test_schemes(target, scheme):
    rotary = ROTATIONS[scheme](24)
    layout = "poisoned" if scheme in ("rope", "rope_interleaved", "rotated_scale") else "contiguous"
    check(target, support.random((2, 37, 3, 24), target, 0, layout), rotary)


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (3, 65, 2, 256), (2, 5, 9, 40), (1, 130, 1, 64)])
def test_shapes(exact, shape):
    check(exact, support.random(shape, exact, 1, "transposed"), Rotary.rope(shape[-1], rotary_dim=shape[-1] // 2))


POSITIONS = {
    "whole": lambda g: torch.randint(0, 10**6, (2, 37), generator=g),
    "int32, of one sequence": lambda g: torch.randint(-5000, 5000, (37,), generator=g, dtype=torch.int32),
    "of one batch": lambda g: torch.randint(0, 99, (1, 37), generator=g),
    "fractions": lambda g: 4000 * torch.rand(2, 37, generator=g) - 2000,
    "float64": lambda g: 1e5 * torch.rand(37, generator=g, dtype=torch.float64),
    "far": lambda g: torch.randint(2**24, 2**31, (2, 37), generator=g),
}


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_positions(exact, kind, interleaved):
    positions = POSITIONS[kind](torch.Generator().manual_seed(2)).to(exact.device)
    rotary = Rotary.rope(24, rotary_dim=16, interleaved=interleaved).scale_rotated(1.5)
    check(exact, support.random((2, 37, 3, 24), exact, 3), rotary, positions)


def test_positions_of_a_scheme_that_scales_them(exact):
    positions = torch.randint(0, 99, (2, 9), generator=torch.Generator().manual_seed(15)).to(exact.device)
    check(exact, support.random((2, 9, 3, 16), exact, 16), ROTATIONS["slope"](16), positions)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_reference(dtype):
    x = support.random((2, 9, 3, 24), support.Target("reference", dtype, "cpu"), 17)
    for rotary in (ROTATIONS["rotated_scale"](24), ROTATIONS["scaled_interleaved"](24)):
        for positions in (None, 1000 * torch.rand(2, 9)):
            check(support.Target("reference", dtype, "cpu"), x, rotary, positions)


def test_axes(exact):
    positions = torch.randint(0, 50, (2, 11, 2), generator=torch.Generator().manual_seed(4)).to(exact.device)
    check(exact, support.random((2, 11, 3, 16), exact, 5), Rotary.axial(16, axes=2), positions)


def test_new_keys_of_a_cache(exact):
    """New keys of a cache can be rotated with the positions that the docstring gives."""
    cache_seqlens, cache_leftpad = (torch.tensor(x, dtype=torch.int32, device=exact.device) for x in ([40, 9], [3, 0]))
    positions = cache_seqlens[:, None] - cache_leftpad[:, None] + torch.arange(5, device=exact.device)
    x, rotary = support.random((2, 50, 2, 16), exact, 6), Rotary.rope(16)
    whole = rotate(x, rotary, impl=exact.impl)
    new = torch.stack([x[0, 37:42], x[1, 9:14]])
    got = rotate(new, rotary, positions, impl=exact.impl)
    torch.testing.assert_close(got, torch.stack([whole[0, 37:42], whole[1, 9:14]]), rtol=1e-5, atol=1e-5)


def test_packed(exact):
    x, rotary = support.random((1, 21, 3, 16), exact, 7), Rotary.rope(16)
    positions = torch.cat([torch.arange(9), torch.arange(12)]).to(exact.device)
    got = rotate(x[0], rotary, positions, impl=exact.impl)
    assert torch.equal(got, rotate(x, rotary, positions, impl=exact.impl)[0])
    check(exact, x, rotary, positions)


@pytest.mark.parametrize("scheme", ["rope_partial", "hope_yarn", "log_n_clipped", "rotated_scale"])
def test_the_scores_of_rotated_queries_and_keys(exact, scheme):
    """Over rotated q and k, a scheme that rotates nothing gives the original scheme's results, if it scales the scores
    as the original scheme does."""
    rotary = ROTATIONS[scheme](16)
    p = support.problem(exact, rotary, 23, batch=2)
    q, k = (rotate(x, rotary, impl=exact.impl) for x in (p.q, p.k))
    scores = Rotary(16, (), temperature=rotary.temperature, log_n_scale=rotary.log_n_scale)
    out, lse = attention(q, k, p.v, scores, return_lse=True, impl=exact.impl)
    support.check_budget({"out": out, "lse": lse}, p, exact.dtype)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_on_threads(threads, compiled):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(3, 1000, 4, 32, generator=torch.Generator().manual_seed(8))
        want = by_complex_numbers(x, Rotary.rope(32))
        torch.testing.assert_close(rotate(x, Rotary.rope(32)).double(), want, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("positions", [False, True], ids=["counted", "given"])
def test_sdpa(positions):
    x = torch.randn(2, 9, 3, 24, generator=torch.Generator().manual_seed(9))
    rotary, given = Rotary.rope(24, rotary_dim=16).scale_rotated(4.0), 100 * torch.rand(2, 9) if positions else None
    got = rotate(x, rotary, given, impl="sdpa").double()
    torch.testing.assert_close(got, by_complex_numbers(x, rotary, given), rtol=1e-5, atol=1e-5)


def test_nothing_to_rotate(exact):
    x = support.random((2, 5, 3, 16), exact, 10)
    for each in (x, x[:0], x[:, :0]):
        for rotary in (Rotary.none(16), Rotary.rope(16), Rotary.rope(16).rectify(0)):
            got = rotate(each, rotary, impl=exact.impl)
            assert got.shape == each.shape and got.data_ptr() != each.data_ptr() or not each.numel()
    assert rotate(x.transpose(1, 2), Rotary.none(16), impl=exact.impl).is_contiguous()
    assert torch.equal(rotate(x, Rotary.none(16), impl=exact.impl), x)
    assert torch.equal(rotate(x, Rotary.rope(16).rectify(0), impl=exact.impl), x)


# ---- derivatives, transforms, compilers


SCHEME = Rotary.rope(16, rotary_dim=8).scale_rotated(2.0)


@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_gradients(exact, given):
    """The gradient of a rotation is the inverse rotation."""
    x, grad = (support.random((2, 7, 3, 16), exact, seed) for seed in (11, 12))
    positions = 50 * torch.rand(2, 7, generator=torch.Generator().manual_seed(13)).to(exact.device) if given else None
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(rotate(leaf, SCHEME, positions, impl=exact.impl), leaf, grad)
    backward = torch.arange(7, device=exact.device) if positions is None else positions
    want = by_complex_numbers(grad, SCHEME, -backward)
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_sum(exact):
    """A gradient whose strides are 0, such as the gradient of a sum, is rotated back correctly."""
    leaf = support.random((2, 7, 3, 16), exact, 14).requires_grad_()
    (got,) = torch.autograd.grad(rotate(leaf, SCHEME, impl=exact.impl).sum(), leaf)
    want = by_complex_numbers(torch.ones_like(leaf), SCHEME, -torch.arange(7))
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_gradcheck(impl):
    x = torch.randn(1, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, SCHEME, impl=impl), x)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, SCHEME, impl=impl).square(), x)


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_forward_mode_and_vmap(impl):
    x, tangent = torch.randn(2, 4, 2, 5, 3, 16, dtype=torch.float64)
    positions = torch.randint(0, 99, (4, 5))

    def run(x, positions=None):
        return rotate(x, SCHEME, positions, impl=impl)

    out, derivative = jvp(run, (x[0],), (tangent[0],))
    torch.testing.assert_close(out, run(x[0]))
    torch.testing.assert_close(derivative, run(tangent[0]))
    torch.testing.assert_close(vmap(run)(x), torch.stack([run(each) for each in x]))
    torch.testing.assert_close(vmap(run, 1, 1)(x.transpose(0, 1)), torch.stack([run(each) for each in x], 1))
    each = torch.stack([run(a, b) for a, b in zip(x, positions, strict=True)])
    torch.testing.assert_close(vmap(run)(x, positions), each)
    torch.testing.assert_close(vmap(run, (None, 0))(x[0], positions), torch.stack([run(x[0], b) for b in positions]))


def test_the_operator():
    x = torch.randn(2, 5, 3, 16, requires_grad=True)
    arguments = (x, torch.arange(5).expand(2, 5), SCHEME.text, False, "cpu")
    torch.library.opcheck(torch.ops.flashrope.rotate.default, arguments)


def test_autocast():
    x = torch.randn(1, 5, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotate(x, SCHEME), rotate(x.bfloat16(), SCHEME))


# ---- refusals


@pytest.mark.parametrize("name", SEVERAL)
def test_schemes_of_several_rotations_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^rotary: expected a scheme in which .* rotate applies; got {name}, whose"):
        rotate(torch.zeros(1, 3, 2, 16), SEVERAL[name])


X = torch.zeros(2, 5, 3, 16)


ROPE = Rotary.rope(16)
REFUSED = [  # (call, error, the argument, what is expected, what was given)
    (lambda: rotate([1], ROPE), TypeError, "x", "a tensor", "got list"),
    (lambda: rotate(X.long(), ROPE), TypeError, "x", "float16, ", "got torch.int64"),
    (lambda: rotate(X[0, :, 0], ROPE), ValueError, "x", "(batch, seqlen, heads, head_dim) or ", "(5, 16)"),
    (lambda: rotate(X.transpose(1, 3), Rotary.rope(8)), ValueError, "x", "a contiguous last dimension", "got"),
    (lambda: rotate(X[..., :4], Rotary.rope(4)), ValueError, "x", "head_dim to be a multiple of 8", "got 4"),
    (lambda: rotate(X, "rope"), TypeError, "rotary", "a flashrope.Rotary", "got str"),
    (lambda: rotate(X, Rotary.rope(32)), ValueError, "rotary", "head_dim 16 as in x", "got 32"),
    (lambda: rotate(X, Rotary.axial(16, 2)), ValueError, "positions", "shape (2, 5, 2) for an axial", "None"),
    (lambda: rotate(X[0], ROPE), ValueError, "positions", "shape (5,) for packed x", "got None"),
    (lambda: rotate(X, ROPE, torch.arange(4)), ValueError, "positions", "shape (2, 5) or (5,),", "got (4,)"),
    (lambda: rotate(X, ROPE, X[0, :, 0, 0] > 0), TypeError, "positions", "numbers", "got torch.bool"),
    (lambda: rotate(X, ROPE, 3), TypeError, "positions", "a tensor", "got int"),
    (lambda: rotate(X, ROPE, impl="cuda"), ValueError, "impl='cuda'", "cannot serve", ""),
    (lambda: rotate(X, ROPE, position_ids=3), TypeError, "position_ids", "expected positions", "3"),
]


@pytest.mark.parametrize("row", REFUSED, ids=[f"{name}: {expected}" for _, _, name, expected, _ in REFUSED])
def test_arguments(row):
    check_refused(*row)
