"""Tests axial tables. Compares the schemes of published image and video models with code that follows the models'
descriptions, and tests packed pictures of different sizes."""

import math

import pytest
import torch
from flashrope import Rotary, attention, attention_varlen
from packing import packing
from support import check, problem


def grid(*sizes: int) -> torch.Tensor:
    """Returns the coordinates of every patch, (patches, axes). The last axis changes fastest."""
    return torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"), -1).flatten(0, -2)


# ---- published models: q (seqlen, head_dim) as each model rotates it


def side_by_side(q, angles):
    """Returns q after rotating channels 2m and 2m + 1, taken as a complex number, by angles (seqlen, pairs)."""
    turned = torch.view_as_complex(q.unflatten(-1, (-1, 2))) * torch.exp(1j * angles)
    return torch.view_as_real(turned).flatten(-2)


def halves(q, angles):
    """Returns q after rotating channels m and m + head_dim / 2 by angles (seqlen, pairs)."""
    first, second = q.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def by_channels(q, ids, channels, theta):
    """Returns q after a rotation in which every axis has its own channels. Adjacent channels are pairs, and each axis
    uses RoPE's table for its number of channels."""
    parts = q.split(channels, -1)
    return torch.cat([side_by_side(x, rope_angles(ids[:, a], x.shape[-1], theta)) for a, x in enumerate(parts)], -1)


def rope_angles(position, dim, theta):
    return position[:, None] / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def flux(q, ids):
    """Rotates as FLUX.1 does. Its ids are (0, row, column) for patches and (0, 0, 0) for text, and axes_dim is (16, 56,
    56)."""
    return by_channels(q, ids, [16, 56, 56], 10_000.0)


def flux_2(q, ids):
    """Rotates as FLUX.2 does. Its ids are time, row, column and text index, axes_dim is (32, 32, 32, 32), and theta is
    2000."""
    return by_channels(q, ids, [32, 32, 32, 32], 2000.0)


def wan(q, ids):
    """Rotates as Wan 2.1 does. With d = 128, it gives d - 4 (d // 6) channels to the frame and 2 (d // 6) channels each
    to row and column."""
    d = q.shape[-1]
    return by_channels(q, ids, [d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6)], 10_000.0)


def pixtral(q, ids):
    """Rotates as Pixtral's encoder does. RoPE's table covers the whole head. Rows use its even entries, and columns use
    its odd entries."""
    table = 10_000.0 ** -(torch.arange(0, q.shape[-1], 2, dtype=torch.float64) / q.shape[-1])
    return halves(q, torch.cat((ids[:, :1] * table[::2], ids[:, 1:] * table[1::2]), -1))


def dinov3(q, centers):
    """Rotates as DINOv3 does. The angle is 2 pi * (center of the patch, from -1 to 1) / period, with periods 100 **
    (4m / d). The class token and the four register tokens in front are not rotated."""
    d = q.shape[-1]
    periods = 100.0 ** torch.arange(0, 1, 4 / d, dtype=torch.float64)
    angles = (2 * math.pi * centers[5:, :, None] / periods).flatten(1)
    return torch.cat((q[:5], halves(q[5:], angles)))


def qwen2_vl_tower(q, ids):
    """Rotates as the vision tower of Qwen2-VL and Qwen2.5-VL does. RoPE's table for half of the head is used twice, for
    rows and for columns."""
    return halves(q, torch.cat([rope_angles(ids[:, a], q.shape[-1] // 2, 10_000.0) for a in (0, 1)], -1))


def moonvit(q, ids):
    """Rotates as Kimi-VL's encoder does. Pair 2m rotates by the column and pair 2m + 1 by the row, both with frequency
    theta ** (-4m / d)."""
    by_axis = [rope_angles(ids[:, a], q.shape[-1] // 2, 10_000.0) for a in (1, 0)]
    return side_by_side(q, torch.stack(by_axis, -1).flatten(1))


def qwen3_vl(q, ids):
    """Rotates as Qwen3-VL's text model does, with one table for all axes. Pairs rotate by time, except 20 pairs 1, 4,
    7, ... that rotate by height and 20 pairs 2, 5, 8, ... that rotate by width."""
    angles = rope_angles(ids[:, 0], q.shape[-1], 5e6)
    for axis in (1, 2):
        taken = slice(axis, 3 * 20, 3)
        angles[:, taken] = rope_angles(ids[:, axis], q.shape[-1], 5e6)[:, taken]
    return halves(q, angles)


TABLE = Rotary.rope(64).inv_freq
CENTERS = torch.cat((torch.zeros(5, 2), (2 * grid(3, 4) + 1) / torch.tensor([3, 4]) - 1)).double()
TEXT, PATCHES = torch.zeros(6, 3), torch.nn.functional.pad(grid(4, 5), (1, 0))
# {model: (scheme, code that follows its description, positions that this code takes, factor from these positions to
# those of the scheme)}
MODELS = {
    "FLUX.1": (Rotary.axial(128, [8, 28, 28], 10_000.0, interleaved=True), flux, torch.cat((TEXT, PATCHES)), 1.0),
    "FLUX.2": (Rotary.axial(128, 4, 2000.0, interleaved=True), flux_2, torch.nn.functional.pad(PATCHES, (0, 1)), 1.0),
    "Wan 2.1": (Rotary.axial(128, [22, 21, 21], 10_000.0, interleaved=True), wan, grid(2, 3, 4), 1.0),
    "Pixtral": (Rotary.axial(64, [TABLE[::2], TABLE[1::2]]), pixtral, grid(4, 5), 1.0),
    "DINOv3": (Rotary.axial(64, base=100.0), dinov3, CENTERS, 2 * math.pi),
    "Qwen2-VL's tower": (Rotary.axial(80, base=10_000.0), qwen2_vl_tower, grid(4, 6), 1.0),
    "MoonViT": (Rotary.axial(72, axis=(1, 0) * 18, base=10_000.0, interleaved=True), moonvit, grid(4, 5), 1.0),
    "Qwen3-VL": (Rotary.rope(128, 5e6).mrope([24, 20, 20], interleaved=True), qwen3_vl, grid(2, 3, 4) + 3, 1.0),
}


@pytest.mark.parametrize("model", MODELS)
def test_published_models(model):
    torch.manual_seed(0)
    rotary, rotate, given, scale = MODELS[model]
    q, k, v = (torch.randn(len(given), rotary.head_dim, dtype=torch.float64) for _ in range(3))
    given = given.double()
    scores = rotate(q, given) @ rotate(k, given).T * rotary.head_dim**-0.5
    batched = [x[None, :, None] for x in (q, k, v)]
    out, lse = attention(*batched, rotary, causal=False, positions=given[None] * scale, return_lse=True)
    torch.testing.assert_close(out[0, :, 0], scores.softmax(-1) @ v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert (lse[0, 0] - (q @ k.T * rotary.head_dim**-0.5).logsumexp(-1)).abs().max() > 0.01  # positions matter


# ---- the builder
def test_the_pairs_of_each_axis():
    rotary = Rotary.axial(24, [2, 4, 6], base=50.0)
    assert rotary.axis == (0,) * 2 + (1,) * 4 + (2,) * 6
    assert rotary.frequencies == tuple(50.0 ** (-m / n) for n in (2, 4, 6) for m in range(n))
    assert Rotary.axial(24, (6, 6)) == Rotary.axial(24, 2) == Rotary.axial(24)
    assert Rotary.axial(24, [12]) == Rotary.axial(24, 1) and Rotary.axial(24, 1).axes == 1
    partial = Rotary.axial(64, 3, rotary_dim=60)
    assert (partial.rotary_dim, partial.axis) == (60, (0,) * 10 + (1,) * 10 + (2,) * 10)
    assert partial.axes == 3 and partial.bands == Rotary.rope(64).bands
    assert Rotary.axial(16, axes=1, base=100.0) != Rotary.rope(16, 100.0)  # positions of shape (..., 1)
    assert repr(rotary).startswith("Rotary(head_dim=24, 12 of 12 pairs rotate (inv_freq 1 to 0.03839, half pairing, ")
    assert "half pairing, axes of 2 + 4 + 6 pairs)" in repr(rotary)


def test_the_axis_of_each_pair():
    rotary = Rotary.axial(16, axis=[0, 1, 1, 0, 2, 1, 1, 0], base=81.0)
    assert rotary.axis == (0, 1, 1, 0, 2, 1, 1, 0)
    zero, one = ([81.0 ** (-m / n) for m in range(n)] for n in (3, 4))
    assert rotary.frequencies == (zero[0], one[0], one[1], zero[1], 1.0, one[2], one[3], zero[2])
    assert rotary == Rotary.axial(16, 3, axis=rotary.axis, base=81.0)
    assert rotary == Rotary.axial(16, [3, 4, 1], axis=rotary.axis, base=81.0)
    assert Rotary.axial(16, axis=(0,) * 4 + (1,) * 4) == Rotary.axial(16)
    assert Rotary.axial(64, axis=list(range(32))).axes == 32


def test_a_table_per_axis():
    first, second = torch.tensor([3.0, 0.0, -0.5]), [0.25]
    rotary = Rotary.axial(12, [first, second, 2], base=100.0)
    assert rotary.frequencies == (3.0, 0.0, -0.5, 0.25, 1.0, 0.1)
    assert rotary.axis == (0, 0, 0, 1, 2, 2)
    alternating = Rotary.axial(8, [first[:2].numpy(), (7.0, 5.0)], axis=(0, 1, 1, 0))
    assert alternating.frequencies == (3.0, 7.0, 5.0, 0.0)
    assert Rotary.axial(8, torch.tensor([[1.0, 0.5], [2.0, 0.1]])).frequencies == (1.0, 0.5, 2.0, pytest.approx(0.1))


# ---- attention

FORMS = {
    "unequal": Rotary.axial(24, [2, 5, 5]),
    "interleaved": Rotary.axial(24, [4, 1, 5], 30.0, interleaved=True, rotary_dim=20),
    "in turns, own tables": Rotary.axial(24, [[1.5, 0.0, -0.4, 0.2], 4, [0.7] * 4], axis=(2, 0, 1) * 4),
}
forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.interpreted(lambda target, form: target.dtype == torch.float32 and form == "in turns, own tables")
@forms
def test_accuracy(target, form):
    positions = torch.cat((torch.zeros(5, 3), grid(3, 3, 4) * torch.tensor([1.0, 0.5, 2.0]) - 3))
    positions = positions.expand(2, -1, -1).to(target.device)
    p = problem(target, FORMS[form], 41, batch=2, positions=positions, seed=1, head_dim_v=16, causal=False)
    check(target, p)


def pictures(sizes, registers: int = 3) -> tuple[list[int], torch.Tensor]:
    """Returns the lengths and the positions of packed pictures of these sizes. Every picture follows its register
    tokens, which do not rotate."""
    parts = [torch.cat((torch.zeros(registers, 2), grid(*size) + 1)) for size in sizes]
    return [len(part) for part in parts], torch.cat(parts)


SIZES = ((5, 7), (1, 1), (9, 4), (2, 3))


@pytest.mark.interpreted(lambda exact, causal: not causal)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_pictures(exact, causal):
    """Every picture has the results of a separate call, in the forward and in the backward."""
    lengths, positions = pictures(SIZES)
    positions = torch.cat((positions, torch.full((4, 2), 9.0))).to(exact.device)
    rotary = Rotary.axial(24, [4, 8], base=30.0)
    p = packing(exact, rotary, lengths, head_dim_v=24, spare=4, positions=positions, causal=causal)
    p.check(p.run(exact.impl), exact.dtype)


def test_packed_pictures_in_the_reference():
    """In the reference backend, packed pictures give the results of float64 attention over each picture by itself."""
    torch.manual_seed(0)
    rotary, (lengths, positions) = Rotary.axial(24, [4, 8], base=30.0), pictures(SIZES)
    q, k, v = (torch.randn(sum(lengths), 2, 24, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    arguments = dict(causal=False, impl="reference")
    packed = attention_varlen(q, k, v, rotary, ends, ends, max(lengths), max(lengths), positions=positions, **arguments)
    alone = [
        attention(*(x[None] for x in rows), rotary, positions=rows_at[None], **arguments)[0]
        for *rows, rows_at in zip(*(x.split(lengths) for x in (q, k, v, positions)), strict=True)
    ]
    weights = torch.randn_like(packed)
    found, expected = (
        (out, *torch.autograd.grad((out * weights).sum(), (q, k, v))) for out in (packed, torch.cat(alone))
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_picture_may_lie_anywhere():
    """Moving a picture does not change attention among its patches, because only differences of positions count. It
    does change attention between a register token and the patches."""
    torch.manual_seed(0)
    rotary = Rotary.axial(24, [4, 8], base=30.0)
    q, k, v = (torch.randn(1, 20, 2, 24, dtype=torch.float64) for _ in range(3))
    at = grid(4, 5)[None].double()
    results = [attention(q, k, v, rotary, causal=False, positions=at + shift) for shift in (0, torch.tensor([7, -3]))]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    marked = [torch.cat((torch.zeros(1, 1, 2), at[:, 1:] + shift), 1) for shift in (0, torch.tensor([7, -3]))]
    first, second = (attention(q, k, v, rotary, causal=False, positions=positions) for positions in marked)
    assert (first - second)[:, 0].abs().max() > 1e-3
