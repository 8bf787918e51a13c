"""Tests the compiled CPU kernels at head_dims above 256, with narrow values and rotary channels anywhere.

impl="cpu" takes no other kernels."""

import threading

import pytest
import support
import torch
from caching import Cached, check_needles
from flashrope import Rotary, attention, rotate
from support import Target

pytestmark = pytest.mark.usefixtures("compiled")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TARGETS = [Target("cpu", dtype, "cpu") for dtype in DTYPES]
FLOAT, BRAIN, _ = TARGETS
targets = pytest.mark.parametrize("target", TARGETS, ids=str)
LENGTHS, PADS = (1060, 513, 1, 0), (15, 0, 0, 40)  # three chunks; one chunk and one key; one key; no key
GROUPS = {"mha": (2, 2), "pair": (2, 1), "odd": (6, 2), "many": (16, 2), "most": (14, 1)}  # query heads, key heads
SCHEMES = {
    "rope": lambda d: Rotary.rope(d),
    "rerope": lambda d: Rotary.rope(d).rectify(600),
    "p_rope": lambda d: Rotary.p_rope(d, 0.25, base=1e6).rectify(90, 4.0).log_n(20),
    "interleaved": lambda d: Rotary.hope(d, 512, interleaved=True).rectify(70),
    "front": lambda d: Rotary.rope(d, rotary_dim=64).rectify(100),
    "middle": lambda d: Rotary.rope(d, rotary_dim=64, first_channel=64).rectify(100),
    "behind": lambda d: Rotary.rope(d, rotary_dim=64, first_channel=d - 64).rectify(100),
    "within": lambda d: Rotary.rope(d, rotary_dim=32, first_channel=24).local(600).log_n(20),  # begins within a vector
    "interleaved_behind": lambda d: Rotary.rope(d, rotary_dim=64, interleaved=True, first_channel=d - 64),
    "none": lambda d: Rotary.none(d),
}


def reading(target, rotary, seqlen_q=1, **options) -> Cached:
    """Returns a call that appends nothing."""
    return Cached(target, rotary, LENGTHS, seqlen_q, **{"new": 0, "leftpad": PADS, "capacity": 1088, **options})


WIDTHS = (264, 512, 320, 384)


@pytest.mark.parametrize("scheme", SCHEMES)
@targets
def test_decoding(target, scheme):
    """Decoding is right for every scheme. The widths and the numbers of query heads per key head alternate over the
    cases."""
    number = list(SCHEMES).index(scheme) + TARGETS.index(target)
    rotary, groups = SCHEMES[scheme](WIDTHS[number % len(WIDTHS)]), list(GROUPS.values())
    reading(target, rotary, 1, heads=groups[number % len(groups)]).check()
    Cached(target, rotary, (130, 70), 3, new=0, heads=(4, 2), page=16).check()


@pytest.mark.parametrize("head_dim", [40, 72, 96, 192, 256])
@targets
def test_narrow_heads_take_the_same_code(target, head_dim):
    scheme = ("rerope", "p_rope", "interleaved")[head_dim // 8 % 3]
    reading(target, SCHEMES[scheme](head_dim), heads=(2, 2)).check()
    reading(target, SCHEMES[scheme](head_dim), heads=(16, 2)).check()


@pytest.mark.parametrize("scheme", ["behind", "within", "interleaved_behind"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 200])
def test_rotary_channels_anywhere(head_dim, scheme):
    """The rotary channels may lie anywhere in the head, at every width: in decoding, in the forward and backward over
    tiles, and in rotate."""
    rotary = SCHEMES[scheme](head_dim)
    for target, heads in ((FLOAT, (8, 2)), (BRAIN, (2, 2))):
        reading(target, rotary, heads=heads).check()
        support.check(target, support.problem(target, rotary, 70, 130, heads=4))
        x = support.random((2, 70, 3, head_dim), target, seed=6)
        if len(rotary.bands) == 1:
            expected = rotate(x.double(), rotary, impl="reference")
            torch.testing.assert_close(rotate(x, rotary, impl="cpu").double(), expected, rtol=2**-7, atol=1e-3)


def test_rotary_channels_anywhere_over_quantized_caches():
    for scheme in ("behind", "within", "interleaved_behind"):
        for heads in ((2, 2), (8, 2)):
            reading(FLOAT, SCHEMES[scheme](96), heads=heads, cache_dtype="int8").check()


@pytest.mark.parametrize("widths", [(192, 128), (512, 64), (320, 264), (40, 24), (128, 64)], ids=str)
@targets
def test_narrow_values(target, widths):
    """Values may be narrower than keys, with and without whole vectors. New rows are written too."""
    rotary, options = Rotary.rope(widths[0]).rectify(90), dict(head_dim_v=widths[1])
    for heads, queries in (((1, 1), 1), ((8, 1), 1), ((2, 1), 3)):
        Cached(target, rotary, (600, 3), queries, heads=heads, page=16, **options).check()
    Cached(target, rotary, (170, 70), 70, **options).check()


VALUES_IN_KEYS = {  # scheme, channels that are values
    "shared": (SCHEMES["p_rope"](512), slice(0, 512)),
    "latent": (Rotary.rope(576, rotary_dim=64, first_channel=512).rectify(90), slice(0, 512)),
    "latent_interleaved": (Rotary.rope(576, rotary_dim=64, interleaved=True, first_channel=512), slice(0, 512)),
    "middle": (Rotary.rope(96, rotary_dim=32, first_channel=24).local(500), slice(8, 88)),
    "hope": (Rotary.hope(128, 64).rectify(90), slice(0, 128)),  # 17 pairs rotate
    "interleaved": (SCHEMES["interleaved"](72), slice(0, 40)),
    "none": (Rotary.none(64), slice(0, 64)),
    "self_extend": (Rotary.rope(64).self_extend(84, 7), slice(0, 64)),
}


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("case", VALUES_IN_KEYS)
@targets
def test_values_in_keys(target, case, weighted):
    """Values may be channels of the keys, and the keys may be weighted. New rows are written too."""
    rotary, values = VALUES_IN_KEYS[case]
    weight = torch.rand(rotary.head_dim, generator=torch.Generator().manual_seed(7)) * 2 - 0.5
    options = dict(values=values, key_weight=weight if weighted else None)
    for heads, queries in (((1, 1), 1), ((8, 1), 1), ((2, 1), 3)):
        Cached(target, rotary, (600, 3), queries, heads=heads, page=16, **options).check()
    Cached(target, rotary, (170, 70), 70, heads=(2, 1), **options).check()


def test_weights_are_read_in_their_order():
    """key_weight may be a view with a step."""
    weight = torch.rand(2 * 64, generator=torch.Generator().manual_seed(7))[::2]
    for queries in (1, 70):
        Cached(FLOAT, Rotary.rope(64), (90, 80), queries, values=slice(0, 64), key_weight=weight).check()


@pytest.mark.parametrize(("head_dim", "heads"), [(264, (1, 1)), (264, (4, 1)), (512, (1, 1))], ids=str)
def test_needles_at_the_edges_of_a_window(head_dim, heads):
    """A single nonzero key is found at its distance, next to an edge of a vector of keys, a block, a chunk or a
    window."""
    rotary, keys = Rotary.rope(head_dim).rectify(301), 576
    check_needles(rotary, {0, 16, 64, 512, keys - 301, keys}, keys, heads_kv=heads[0], group=heads[0])


@pytest.mark.parametrize("heads", [(2, 2), (16, 2)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 4])
@targets
def test_unseen_keys_are_not_read(target, seqlen_q, heads):
    """The keys and values that a query does not see change no bit of its result."""
    rotary, keys, heads = Rotary.rope(320, rotary_dim=64).local(600), LENGTHS[0], heads if seqlen_q == 1 else (4, 2)
    expected = reading(target, rotary, seqlen_q, heads=heads).call()
    distances = (keys - seqlen_q + torch.arange(seqlen_q))[:, None] - torch.arange(keys)
    seen = (distances >= 0) & (distances < 600)
    for row in range(seqlen_q):
        c = reading(target, rotary, seqlen_q, heads=heads)
        unseen = tuple(x[~seen[row]] for x in c.visible[0])
        c.k_cache[unseen] = c.v_cache[unseen] = torch.nan
        out, lse = c.call()
        assert torch.equal(out[0, row], expected[0][0, row]) and torch.equal(lse[0, :, row], expected[1][0, :, row])


@pytest.mark.parametrize("head_dim", [328, 512])
@pytest.mark.parametrize("layout", ["heads first", "shared", "poisoned"])
@targets
def test_layouts_are_bitwise_identical(target, layout, head_dim):
    c = reading(target, SCHEMES["rerope"](head_dim), 2, heads=(8, 2))
    for page in (0, 16):
        assert all(map(torch.equal, c.replace(layout=layout, page=page).call(), c.call()))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", [(65, 140), (140, 65), (64, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [264, 384, 512])
@targets
def test_tiles(target, head_dim, lengths, causal):
    """Results are right for several tiles of queries and blocks of keys, whether or not the last ones are complete. At
    these widths a tile has fewer rows."""
    scheme = {264: "interleaved", 384: "behind", 512: "p_rope"}[head_dim]
    rotary = SCHEMES[scheme](head_dim)
    support.check(target, support.problem(target, rotary, *lengths, heads=4, causal=causal, layout="poisoned"))


@pytest.mark.parametrize("widths", [(512, 40), (40, 512), (320, 264), (192, 384), (264, 512)], ids=str)
@targets
def test_tiles_of_values_of_another_width(target, widths):
    rotary = Rotary.rope(widths[0]).rectify(30)
    support.check(target, support.problem(target, rotary, 140, heads=2, head_dim_v=widths[1]))


@targets
def test_a_small_stack(target):
    """The kernels run in a thread with a stack of 1 MiB, which also holds Python's own frames."""
    p, failed = support.problem(target, Rotary.rope(512).rectify(50), 70, heads=2), []
    call = reading(target, Rotary.rope(512), heads=(16, 1))

    def run():
        try:
            support.check(target, p)
            attention(p.q, p.k, p.v, p.rotary, impl="cpu")
            call.check()
        except BaseException as error:
            failed.append(error)

    before = threading.stack_size(2**20)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert not failed
