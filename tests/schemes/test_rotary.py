"""Compares the table, bands and scale of every scheme with the published formulas."""

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from flashrope import Band, Rotary
from flashrope.schemes.rotary import _from_text

INF = math.inf


def geometric(dim, base=10_000.0):
    return np.array([base ** (-2 * m / dim) for m in range(dim // 2)])


def same_table(rotary, expected):
    np.testing.assert_allclose(rotary.frequencies, expected, rtol=1e-13, atol=0)


def relative(rotary, size, causal=True):
    """Returns the relative positions (size, size) that a scheme sees. An entry is slope * (i - j) + offset of the band
    that holds i - j, or nan outside all bands."""
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    seen = np.full((size, size), np.nan)
    for start, stop, slope, offset, *_ in rotary.bands_for(causal):
        inside = (i - j >= start) & (i - j < stop)
        assert np.isnan(seen[inside]).all(), "bands overlap"
        seen[inside] = (slope * i + offset - slope * j)[inside]
    return seen


def mirrored(causal_rows):
    """Extends a causal matrix to both sides: the upper triangle becomes minus the transposed lower triangle."""
    lower = np.tril(causal_rows)
    return lower - lower.T


# ---- RoPE and the schemes made from it


@pytest.mark.parametrize("dim", [2, 8, 64, 128])
@pytest.mark.parametrize("base", [10_000.0, 500_000])
def test_rope(dim, base):
    rotary = Rotary.rope(dim, base)
    same_table(rotary, geometric(dim, base))
    assert rotary.inv_freq.dtype == torch.float64 and rotary.inv_freq.tolist() == list(rotary.frequencies)
    assert (rotary.rotary_dim, rotary.axes, rotary.bands, rotary.temperature) == (dim, 1, (Band(0, INF, 1, 0),), 1)
    assert rotary.two_sided_bands == (Band(-INF, INF, 1, 0),)
    assert not rotary.interleaved and Rotary.rope(dim, base, interleaved=True).interleaved


def test_partial_rotary_has_its_own_denominator():
    rotary = Rotary.rope(128, rotary_dim=32)
    same_table(rotary, geometric(32))
    assert (rotary.head_dim, rotary.rotary_dim) == (128, 32)
    assert Rotary.rope(128, rotary_dim=0) == Rotary.none(128)


def test_none():
    rotary = Rotary.none(64)
    assert (rotary.head_dim, rotary.rotary_dim, rotary.frequencies) == (64, 0, ())
    assert rotary.inv_freq.shape == (0,)


def test_from_inv_freq():
    table = [0.5, 0.0, -0.25]
    for given in (table, tuple(table), np.array(table), torch.tensor(table)):
        assert Rotary.from_inv_freq(given, head_dim=8).frequencies == (0.5, 0.0, -0.25)
    assert Rotary.from_inv_freq(Rotary.rope(64).inv_freq, 64) == Rotary.rope(64)
    assert Rotary.from_inv_freq(table, 8, interleaved=True).interleaved


@pytest.mark.parametrize(("head_dim", "train_length", "kept"), [(64, 512, 16), (128, 8192, 50), (128, 4096, 46)])
def test_hope_keeps_the_pairs_that_make_a_turn_in_training(head_dim, train_length, kept):
    full = geometric(head_dim)
    assert full[kept - 1] >= 2 * math.pi / train_length > full[kept]
    hope = Rotary.hope(head_dim, train_length)
    assert hope.rotary_dim == head_dim and not hope.interleaved
    same_table(hope, [*full[:kept], *[0] * (head_dim // 2 - kept)])
    compact = Rotary.hope(head_dim, train_length, compact=True)
    assert compact.rotary_dim == 2 * kept and not compact.interleaved
    same_table(compact, full[:kept])
    paper = Rotary.hope(head_dim, train_length, interleaved=True)
    assert paper.rotary_dim == 2 * kept and paper.interleaved
    same_table(paper, full[:kept])


@pytest.mark.filterwarnings("ignore:train_length")
def test_hope_edges():
    assert Rotary.hope(64, 1e9) == Rotary.rope(64)
    assert not any(Rotary.hope(64, 6).frequencies)
    assert Rotary.hope(64, 6, compact=True) == Rotary.none(64)


# ---- interpolation
def test_position_interpolation():
    same_table(Rotary.rope(64).interpolate(4), geometric(64) / 4)
    assert Rotary.rope(64).interpolate(1.0) == Rotary.rope(64)


@pytest.mark.parametrize("rotary_dim", [64, 128])
@pytest.mark.parametrize("s", [0.5, 2.0, 8.0])
def test_ntk(rotary_dim, s):
    full, dim, m = geometric(rotary_dim), rotary_dim, np.arange(rotary_dim // 2)
    rope, lam = Rotary.rope(128, rotary_dim=rotary_dim), s ** (2 / rotary_dim)
    same_table(rope.ntk(s), geometric(dim, 1e4 * s ** (dim / (dim - 2))))
    same_table(rope.ntk(s, variant="old"), geometric(dim, 1e4 * s))
    same_table(rope.ntk(s, "old"), full * lam**-m)
    same_table(rope.ntk(s, "fixed"), full * lam ** -(m + 1.0))
    same_table(rope.ntk(s, "mixed"), full * np.exp(-math.log(s) / (dim / 2) ** 0.625 * (m + 1.0) ** 0.625))


def test_ntk_ends():
    s, full = 8.0, geometric(64)
    aware, old, fixed, mixed = (
        np.array(Rotary.rope(64).ntk(s, v).frequencies) / full for v in ("aware", "old", "fixed", "mixed")
    )
    assert aware[0] == old[0] == 1
    np.testing.assert_allclose([aware[-1], fixed[-1], mixed[-1]], 1 / s, rtol=1e-13)
    assert old[-1] > aware[-1]
    assert mixed[0] < fixed[0] < 1  # mixed slows down even the fastest pair
    # lambda_m is the factor by which pair m is slowed down, divided by the factor of pair m - 1 (by 1 for m = 0). For
    # fixed, all lambda_m are equal. For mixed they start above this constant and decrease. For both, their product is
    # s.
    ratios = np.concatenate([[1 / mixed[0]], mixed[:-1] / mixed[1:]])
    assert (np.diff(ratios) < 0).all() and np.prod(ratios) == pytest.approx(s, rel=1e-12)


def yarn_oracle(dim, base, factor, length, beta_fast=32, beta_slow=1, truncate=True):
    """Returns YaRN's frequencies (Peng et al. 2023, section 3.2) as the authors' code computes them. The ramp begins
    and ends at pairs that make given numbers of turns over `length`."""
    full = geometric(dim, base)
    ends = []
    for turns in (beta_fast, beta_slow):
        wanted = turns * 2 * math.pi / length  # the frequency of a pair that makes this many turns
        ends.append(-math.log(wanted) / math.log(base) * dim / 2)
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    high = high if high > low else low + 0.001
    kept = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return full / factor * (1 - kept) + full * kept


@pytest.mark.parametrize(
    "kwargs", [{}, {"truncate": False}, {"beta_fast": 16, "beta_slow": 2}, {"beta_fast": 4.0, "beta_slow": 4.0}]
)
@pytest.mark.parametrize(("head_dim", "rotary_dim", "base"), [(128, 128, 1e4), (128, 32, 1e4), (64, 64, 5e5)])
@pytest.mark.parametrize("length", [64, 4096, 1 << 20])
def test_yarn(head_dim, rotary_dim, base, length, kwargs):
    rotary = Rotary.rope(head_dim, base, rotary_dim).yarn(8.0, length, **kwargs)
    np.testing.assert_allclose(rotary.frequencies, yarn_oracle(rotary_dim, base, 8.0, length, **kwargs), rtol=1e-12)
    assert rotary.temperature == (0.1 * math.log(8.0) + 1) ** 2


def test_yarn_ends_by_hand():
    # D 128, base 10000, L 4096: floor(20.9) and ceil(45.02)
    ratio = np.array(Rotary.rope(128).yarn(16.0, 4096).frequencies) / geometric(128)
    np.testing.assert_allclose(ratio[:21], 1, rtol=1e-14)
    assert ratio[21] < 1 and ratio[45] > 1 / 16
    np.testing.assert_allclose(ratio[46:], 1 / 16, rtol=1e-14)
    assert ratio[33] == pytest.approx((1 + 1 / 16) / 2, rel=1e-13)


def test_yarn_temperature():
    rope = Rotary.rope(64)
    assert rope.yarn(4.0, 512, temperature=2.5).temperature == 2.5
    assert rope.yarn(1.0, 512).temperature == rope.yarn(0.5, 512).temperature == 1
    assert dataclasses.replace(rope, temperature=3.0).yarn(4.0, 512, temperature=2.5).temperature == 7.5


def test_ntk_exponent():
    full, m = geometric(64), np.arange(32)
    same_table(Rotary.rope(64).ntk(8.0, "mixed", 0.75), full * np.exp(-math.log(8) / 32**0.75 * (m + 1.0) ** 0.75))


def test_ntk_by_parts_is_yarn_without_its_temperature():
    rotary = Rotary.rope(64).ntk_by_parts(8.0, 512)
    assert rotary == Rotary.rope(64).yarn(8.0, 512, temperature=1) and rotary.scaled_by == "ntk_by_parts"
    np.testing.assert_allclose(rotary.frequencies, yarn_oracle(64, 1e4, 8.0, 512), rtol=1e-12)
    assert rotary.temperature == 1


# ---- CoPE
@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("length", [64, 512, 4096])
def test_cope(length, base):
    """CoPE multiplies the frequencies of the n pairs below HoPE's cut by (1 + cos(pi r / (n - 1))) / 2. r counts these
    pairs from the fastest one."""
    rope = Rotary.rope(64, base)
    kept = sum(f >= 2 * math.pi / length for f in rope.frequencies)
    factors = np.ones(32)
    factors[kept:] = (1 + np.cos(np.pi * np.linspace(0, 1, 32 - kept))) / 2
    same_table(rope.cope(length), geometric(64, base) * factors)
    assert rope.cope(length).frequencies[kept] == rope.frequencies[kept] and rope.cope(length).frequencies[-1] == 0
    assert rope.cope(length, taper=False) == Rotary.hope(64, length, base)
    assert rope.cope(length, pairs=32 - kept) == rope.cope(length)


def test_cope_of_few_pairs():
    rope = Rotary.rope(64)
    assert rope.cope(1 << 20) == rope.cope(512, pairs=0) == rope  # no pair is below the cut
    assert rope.cope(512, pairs=1).frequencies == (*rope.frequencies[:-1], 0.0)
    # The faster of two pairs keeps its frequency.
    assert rope.cope(512, pairs=2).frequencies == rope.cope(512, pairs=1).frequencies
    three = rope.cope(512, pairs=3).frequencies
    assert three[-3] == rope.frequencies[-3] and three[-2] == pytest.approx(rope.frequencies[-2] / 2) and three[-1] == 0


def test_cope_of_any_table_and_chained():
    """CoPE tapers pairs in the order of their frequencies, whatever their order in the table. Pairs that do not rotate
    do not count."""
    rotary = Rotary.from_inv_freq([0.001, 0.0, 1.0, -0.002, 0.004], 16)
    assert rotary.cope(512).frequencies == pytest.approx((0.0, 0.0, 1.0, -0.001, 0.004))
    chained = Rotary.rope(64).cope(512).rectify(128).log_n(512)
    assert chained.frequencies == Rotary.rope(64).cope(512).frequencies and len(chained.bands) == 2


@pytest.mark.parametrize("layout", [{}, {"interleaved": True}, {"compact": True}])
@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.interpolate(8.0),
        lambda r: r.yarn(8.0, 512),
        lambda r: r.ntk(8.0),
        lambda r: r.ntk(8.0, "old"),
        lambda r: r.ntk(8.0, "fixed"),
        lambda r: r.ntk(8.0, "mixed"),
    ],
)
def test_hope_with_interpolation_drops_the_pairs_that_hope_drops(change, layout):
    kept = 16
    expected = [*change(Rotary.rope(64)).frequencies[:kept], *([] if layout else [0] * 16)]
    rotary = change(Rotary.hope(64, 512, **layout))
    same_table(rotary, expected)
    assert rotary.temperature == change(Rotary.rope(64)).temperature


# ---- bands
def test_rerope_matrix():
    expected = np.array(
        [
            [0, 0, 0, 0, 0, 0],  # the paper's matrix for w = 3, on and below the diagonal
            [1, 0, 0, 0, 0, 0],
            [2, 1, 0, 0, 0, 0],
            [3, 2, 1, 0, 0, 0],
            [3, 3, 2, 1, 0, 0],
            [3, 3, 3, 2, 1, 0],
        ]
    )
    rotary = Rotary.rope(64).rectify(3)
    assert rotary.bands == (Band(0, 3, 1, 0), Band(3, INF, 0, 3))
    assert rotary.two_sided_bands == (Band(-2, 3, 1, 0), Band(3, INF, 0, 3), Band(-INF, -2, 0, -3))
    np.testing.assert_array_equal(np.tril(relative(rotary, 6)), expected)
    np.testing.assert_array_equal(relative(rotary, 6, causal=False), mirrored(expected))


@pytest.mark.parametrize("k", [4.0, 0.5, 1 / 16])
def test_leaky_rerope_matrix(k):
    w = 2
    expected = np.array(
        [
            [0, 0, 0, 0, 0],  # the distances beyond the window are w, w + 1/k, w + 2/k, ...
            [1, 0, 0, 0, 0],
            [w, 1, 0, 0, 0],
            [w + 1 / k, w, 1, 0, 0],
            [w + 2 / k, w + 1 / k, w, 1, 0],
        ]
    )
    rotary = Rotary.rope(64).rectify(w, k)
    np.testing.assert_allclose(np.tril(relative(rotary, 5)), expected, rtol=1e-15)
    np.testing.assert_allclose(relative(rotary, 5, causal=False), mirrored(expected), rtol=1e-15)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("factor", [None, INF, 3.0, 0.25])
@pytest.mark.parametrize("local", [None, 1, 4, 7])
def test_bands_cover_each_distance_once(window, factor, local, causal):
    size, k = 12, math.inf if factor is None else factor
    rotary = Rotary.rope(64).rectify(window, factor)
    rotary = rotary if local is None else rotary.local(local)
    d = np.arange(size)[:, None] - np.arange(size)[None, :]
    expected = np.sign(d) * np.where(abs(d) < window, abs(d), window + (abs(d) - window) / k)
    hidden = abs(d) >= (local or INF)
    if causal:
        hidden |= d < 0
    seen = relative(rotary, size, causal)
    np.testing.assert_array_equal(np.isnan(seen) & hidden, hidden)
    np.testing.assert_allclose(seen[~hidden], expected[~hidden], rtol=1e-14, atol=1e-14)


def test_rectify_without_a_near_band():
    assert Rotary.rope(64).rectify(0).bands == (Band(0, INF, 0, 0),)
    assert Rotary.rope(64).rectify(0).two_sided_bands == (Band(-INF, INF, 0, 0),)
    assert Rotary.rope(64).rectify(0, 4.0).two_sided_bands == (Band(-INF, INF, 0.25, 0),)


def test_rectify_by_one_changes_nothing():
    rope = Rotary.rope(64)
    assert rope.rectify(16, 1.0) == rope.rectify(0, 1) == rope
    assert rope.local(32).rectify(16, 1.0) == rope.local(32)
    assert rope.rectify(16, 1.0).rectify(8) == rope.rectify(8)


def test_local():
    rotary = Rotary.rope(64).local(4)
    assert rotary.bands == (Band(0, 4, 1, 0),)
    assert rotary.two_sided_bands == (Band(-3, 4, 1, 0),)
    assert Rotary.rope(64).rectify(11).local(11) == Rotary.rope(64).local(11)  # the far keys are not visible
    assert rotary.local(2) == Rotary.rope(64).local(2) == Rotary.rope(64).local(2).local(4)


@pytest.mark.parametrize("window", [0, 1, 8, 32])
@pytest.mark.parametrize("factor", [None, 16.0])
def test_local_and_rectify_commute(window, factor):
    rope = Rotary.rope(64)
    for local in (1, 8, 16):
        assert rope.rectify(window, factor).local(local) == rope.local(local).rectify(window, factor)
    assert rope.rectify(window, factor).local(16).bands[-1].stop == 16


def test_changes_commute():
    changes = [
        lambda r: r.yarn(4.0, 512),
        lambda r: r.rectify(128, 8.0),
        lambda r: r.log_n(512),
        lambda r: r.local(300),
    ]
    results = set()
    for order in itertools.permutations(changes):
        rotary = Rotary.hope(64, 512)
        for change in order:
            rotary = change(rotary)
        results.add(rotary)
    assert len(results) == 1


# ---- value semantics

SCHEMES = [
    Rotary.rope(64),
    Rotary.rope(64, interleaved=True),
    Rotary.rope(64, 500_000.0),
    Rotary.rope(64, rotary_dim=32),
    Rotary.none(64),
    Rotary.none(128),
    Rotary.hope(64, 512),
    Rotary.hope(64, 512, compact=True),
    Rotary.hope(64, 512, interleaved=True),
    Rotary.rope(64).interpolate(3.0),
    *(Rotary.rope(64).ntk(3.0, v) for v in ("aware", "old", "fixed", "mixed")),
    Rotary.rope(64).yarn(3.0, 512),
    Rotary.rope(64).yarn(3.0, 512, temperature=1.0),
    Rotary.rope(64).rectify(7),
    Rotary.rope(64).rectify(7, 3.0),
    Rotary.rope(64).local(7),
    Rotary.rope(64).log_n(512),
    Rotary.rope(64).log_n(512, clip=False),
    Rotary.axial(64),
    Rotary.axial(64, axes=4),
    Rotary.from_inv_freq([0.1, 1 / 3], 64),
    Rotary.hope(64, 512).yarn(3.0, 512).rectify(100, 3.0).local(200).log_n(512),
    Rotary.rope(64).cope(512).rectify(128).log_n(512),
    Rotary.rope(64).mrope([12, 10, 10], interleaved=True),
    Rotary.rope(64).log_steps(7),
    Rotary.rope(64).log_steps(7, first=0),
    Rotary.rope(64, rotary_dim=32).scale_rotated(1.4),
    Rotary.rope(64).self_extend(20, 4),
    Rotary.rope(64, interleaved=True).yarn(4.0, 64).log_n(20).self_extend(24, 8),
    Rotary.rope(64).dual_chunk(160, 32),
    Rotary.rope(64).dual_chunk(160, 32, length_scale=100),
    dataclasses.replace(Rotary.rope(64), bands=(Band(0, 5, 1.0, 0.0), Band(5, INF, -0.5, 7.5))).log_n(1e4 / 3),
]


def test_equal_only_to_itself():
    assert len(set(SCHEMES)) == len(SCHEMES)


def test_equal_however_it_was_built():
    rope = Rotary.rope(64)
    twin = Rotary.from_inv_freq(rope.frequencies, 64)
    assert rope == twin and hash(rope) == hash(twin)
    assert rope.rectify(8) == rope.rectify(8, INF) and hash(rope.rectify(8)) == hash(rope.rectify(8, INF))
    twin = Rotary.from_inv_freq(rope.inv_freq / 2, 64)
    assert rope.interpolate(2.0) == twin and hash(rope.interpolate(2.0)) == hash(twin)
    assert rope != "rope" and rope != rope.text


@pytest.mark.parametrize("rotary", SCHEMES, ids=range(len(SCHEMES)))
def test_text_and_pickle_are_exact(rotary):
    mapped = any(band.group != 1 or band.chunk for band in rotary.bands)  # maps are causal only
    hash(rotary), rotary.text, mapped or rotary.two_sided_bands  # fill the caches
    again = _from_text.__wrapped__(rotary.text)
    for twin in (again, pickle.loads(pickle.dumps(rotary)), copy.copy(rotary), copy.deepcopy(rotary)):
        assert twin == rotary and hash(twin) == hash(rotary)
        assert dataclasses.astuple(twin) == dataclasses.astuple(rotary) and twin.text == rotary.text
        assert all(type(band) is Band for band in twin.bands)
        assert repr(twin) == repr(rotary)
        assert mapped or twin.bands_for(False) == rotary.bands_for(False)
    assert Rotary.from_text(rotary.text) is Rotary.from_text(rotary.text)


def test_a_checkpoint_is_loaded_with_weights_only(tmp_path):
    rotary = Rotary.hope(64, 512).yarn(4.0, 512).rectify(8).log_n(512)
    torch.save({"weight": torch.ones(2), "rotary": rotary}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["rotary"] == rotary


def test_a_pickle_holds_no_hash():
    """A pickle contains no hash, because hashes of strings differ between processes."""
    rotary = Rotary.rope(64).rectify(8)
    assert hash(rotary) and "_hash" in vars(rotary) and b"_hash" not in pickle.dumps(rotary)
    _from_text.cache_clear()  # as in a process that has not parsed this text
    assert "_hash" not in vars(pickle.loads(pickle.dumps(rotary)))


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rotary.rope(64).head_dim = 32


def test_a_table_from_numpy_scalars_keeps_its_precision():
    assert Rotary.rope(64).interpolate(np.float32(3)) == Rotary.rope(64).interpolate(3)
    assert (
        Rotary.rope(64, np.float32(10_000)).yarn(np.int64(4), np.int32(512)).text == Rotary.rope(64).yarn(4, 512).text
    )


ALL = "pairs rotate (inv_freq 1 to 0.0001334"
ONE = "pairs rotate (inv_freq 1 to 1, half pairing in 2 channels)"


@pytest.mark.parametrize(
    ("rotary", "pairs", "distance", "scale"),
    [
        (Rotary.rope(64), f"32 of 32 {ALL}, half pairing)", "d for d >= 0", "1"),
        (Rotary.none(64), "0 of 32 pairs rotate", "d for d >= 0", "1"),
        (
            Rotary.hope(128, 8192, interleaved=True).yarn(4.0, 8192).rectify(1024).log_n(4096),
            "50 of 64 pairs rotate (inv_freq 1 to 0.0002425, interleaved pairing in 100 channels, yarn)",
            "d for 0 <= d < 1024; 1024 for d >= 1024",
            "1.29648 * max(1, ln(i + 1) / ln(4096))",
        ),
        (
            Rotary.rope(64).rectify(16, 4.0).local(32).log_n(512, clip=False),
            f"32 of 32 {ALL}, half pairing)",
            "d for 0 <= d < 16; d * 0.25 + 12 for 16 <= d < 32",
            "ln(i + 1) / ln(512)",
        ),
        (Rotary.axial(64), "32 of 32 pairs rotate (inv_freq 1 to 0.01334, half pairing, 2 axes)", "d for d >= 0", "1"),
        (
            Rotary(8, (1.0,), bands=(Band(2, 4, 1.0, 0.0), Band(9, math.inf, 0.0, 4.0))),
            f"1 of 4 {ONE}",
            "unseen for 0 <= d < 2; d for 2 <= d < 4; unseen for 4 <= d < 9; 4 for d >= 9",
            "1",
        ),
        (
            Rotary(8, (1.0,), bands=(Band(0, 4, 1.0, 0.0), Band(8, 16, 1.0, -4.0))),
            f"1 of 4 {ONE}",
            "d for 0 <= d < 4; unseen for 4 <= d < 8; d - 4 for 8 <= d < 16",
            "1",
        ),
        (
            Rotary.from_inv_freq([-1.0, -0.5], 8).local(1),
            "2 of 4 pairs rotate (inv_freq -1 to -0.5, half pairing in 4 channels)",
            "d for 0 <= d < 1",
            "1",
        ),
    ],
)
def test_repr(rotary, pairs, distance, scale):
    assert repr(rotary) == f"Rotary(head_dim={rotary.head_dim}, {pairs}, distance: {distance}, score scale: {scale})"
