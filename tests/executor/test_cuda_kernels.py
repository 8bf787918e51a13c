"""Runs the CUDA C++ kernels of csrc/ on the executor, launched by the extension's own host code.

Results are compared with the reference in float64.
"""

import dataclasses
import re

import pytest
import support
import torch
from caching import Cached, page_sizes, same
from flashrope import Rotary
from flashrope.backends import cuda, reference
from flashrope.calls.cache_tables import CacheLayer, CacheTables
from flashrope.calls.records import CacheCall

from . import extension
from .machine.driver import Machine
from .machine.launches import ExecutionError

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.quick

SCHEMES = {
    "none": lambda d: Rotary.none(d),
    "rope": lambda d: Rotary.rope(d),
    "rope_partial": lambda d: Rotary.rope(d, rotary_dim=32),
    "rerope": lambda d: Rotary.rope(d).rectify(21),
    "leaky": lambda d: Rotary.rope(d).rectify(21, 4.0),
    "leaky_interleaved_yarn": lambda d: Rotary.rope(d, interleaved=True).yarn(4.0, train_length=64).rectify(50, 4.0),
    "hope_interleaved": lambda d: Rotary.hope(d, 100, interleaved=True),
    "hope_compact": lambda d: Rotary.hope(d, 100, compact=True),
    "hope_zeros_rerope": lambda d: Rotary.hope(d, 100).rectify(33),
    "local_log_n": lambda d: Rotary.rope(d).local(40).log_n(20),
    "rotated_factor_rerope": lambda d: Rotary.rope(d, rotary_dim=d // 2).scale_rotated(1.4).rectify(21),
    "rerope_local_log_n": lambda d: Rotary.rope(d).rectify(11).local(90).log_n(50, clip=False),
}


@pytest.fixture(autouse=True)
def operators(machine, monkeypatch):
    """Makes the backend use the extension's operators on the executor instead of the ones that it would load."""
    try:
        operators = extension.operators(machine)
    except extension.NoNvcc as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cuda, "_operators", lambda: operators)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 2)
    # without the check for a device
    monkeypatch.setattr(cuda, "unsupported_reason", lambda q, cached=False: cuda.unsupported_queries(q))
    return operators


def random(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caching(rotary, dtype, lengths, seqlen_q=1, heads=(2, 2), **options) -> Cached:
    """Returns a call that reads the caches and appends nothing."""
    options = {"new": 0, "heads": heads, "capacity": 160, **options}
    return Cached(support.Target("cuda", dtype, "cpu"), rotary, lengths, seqlen_q, **options)


def check(*arguments, num_splits=3, **options) -> None:
    caching(*arguments, **options).check(num_splits=num_splits)


def tables_of(c: Cached, new=0) -> CacheTables:
    return CacheTables(c.cache_seqlens, c.block_table, c.cache_leftpad, new)


# ---- attention
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["float16", "bfloat16"])
def test_follows_the_reference(operators, dtype, head_dim, scheme):
    """The kernels give the reference's results. Query tokens, heads per key head and the cache layout vary over the
    cases."""
    case = list(SCHEMES).index(scheme) + cuda.HEAD_DIMS.index(head_dim) + (dtype == BF16)
    seqlen_q, group, page_size = (1, 3, 17)[case % 3], (1, 4)[case // 3 % 2], (0, 16, 64)[case % 5 % 3]
    lengths = [129, max(37, seqlen_q), 0]
    options = dict(heads=(4, 1) if group == 4 else (2, 2), page=page_size, capacity=192)
    check(SCHEMES[scheme](head_dim), dtype, lengths, seqlen_q, **options)


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("scheme", ["rerope", "hope_interleaved"])
def test_left_padding_counts_positions_from_the_first_key(operators, scheme, page_size):
    options = dict(heads=(4, 1), capacity=192, page=page_size, leftpad=[13, 64, 41, 0])
    check(SCHEMES[scheme](64), BF16, [117, 6, 0, 5], 3, **options)


@pytest.mark.parametrize("scheme", ["rope", "leaky", "rerope_local_log_n", "none"])
@pytest.mark.parametrize("seqlen_q", [3, 17])
def test_not_causal(operators, scheme, seqlen_q):
    """Calls without a causal mask are right. The second sequence has fewer keys than queries, and queries before its
    first key attend to later keys."""
    check(SCHEMES[scheme](64), FP16, [90, 9, 0], seqlen_q, heads=(4, 2), causal=False)


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_one_tile_and_than_keys(operators, causal):
    cache = caching(SCHEMES["rerope"](64), BF16, [100, 20], 64, heads=(4, 2), causal=causal)
    out, lse = cache.call(num_splits=3)
    cache.judge(out, lse)
    if causal:
        assert (lse[1, :, :44] == -torch.inf).all() and (out[1, :44] == 0).all()


@pytest.mark.parametrize("length_scale", [30.0, 0.5])
def test_the_factor_by_length_counts_the_keys_of_each_sequence(operators, length_scale):
    """The factor by length depends on the number of keys of each sequence. One key more or less changes the factor of
    the two short sequences by several percent."""
    rotary = dataclasses.replace(Rotary.rope(64), length_scale=length_scale)
    for leftpad in (None, [0, 30, 0, 9]):
        check(rotary, FP16, [150, 60, 2, 1], heads=(4, 1), leftpad=leftpad)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 256])
def test_any_number_of_splits(operators, num_splits):
    check(SCHEMES["leaky"](64), BF16, [700, 1], heads=(4, 1), capacity=800, num_splits=num_splits)


def test_long_positions_keep_their_accuracy(operators):
    """Positions after the fine table's 1024 rows are as accurate as earlier ones. The window leaves most blocks
    unread."""
    options = dict(heads=(1, 1), num_splits=5)
    check(Rotary.rope(64).local(200), FP16, [5003], 2, capacity=5120, **options)
    check(Rotary.rope(64, interleaved=True).rectify(64), FP16, [2211], capacity=2304, **options)
    check(Rotary.rope(64), FP16, [1100], capacity=1152, heads=(1, 1))  # across the end of the fine table


def test_strides_that_do_not_follow_from_the_shape(operators):
    for page_size in (0, 16):
        check(SCHEMES["rope"](96), BF16, [77, 30], page=page_size, layout="poisoned")


def test_the_order_of_warps_changes_nothing(operators, machine):
    """The order of warps does not change the result. Asynchronous copies arrive only when the kernel waits for them."""
    for head_dim in cuda.HEAD_DIMS:
        cache = caching(SCHEMES["rerope"](head_dim), BF16, [333, 50], 2, capacity=400)
        results = []
        for seed in range(3):
            machine.reset(seed=seed)
            results.append(cache.call(num_splits=2))
        assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))
        cache.judge(*results[0])


def test_every_kernel_of_the_source_runs(operators, machine):
    """Every kernel of the source runs: split for two types, four head_dims and two layouts of pairs, combine for two
    types, and append."""
    for dtype in (BF16, FP16):
        for head_dim in cuda.HEAD_DIMS:
            for interleaved in (False, True):
                check(Rotary.rope(head_dim, interleaved=interleaved), dtype, [37], heads=(1, 1), capacity=48)
    check(Rotary.rope(64), BF16, [31], new=1, capacity=48)
    kernels = re.findall(r"^\.entry (\w+)\(", operators.ptx, re.MULTILINE)
    assert len(kernels) == 19 and {launch.kernel for launch in machine.launches} == set(kernels)


@pytest.mark.parametrize(
    "rotary, dtype, lengths, tokens, heads",
    [
        *((SCHEMES[name](64), BF16, [150, 60], 6, (8, 2)) for name in ("rope", "rerope", "local_log_n")),
        # five blocks of 64 keys; within a tile of queries the window begins in the first block, then in the second
        (Rotary.rope(64).local(200).log_n(20), FP16, [60, 268], 16, (4, 4)),
    ],
    ids=["rope", "rerope", "local_log_n", "window_over_blocks"],
)
def test_fixed_splits_are_bitwise_identical_however_tokens_are_divided_into_calls(
    operators, rotary, dtype, lengths, tokens, heads
):
    together = caching(rotary, dtype, lengths, tokens, heads, capacity=320)
    out, lse = together.call(num_splits=3)
    p = together.problems[1]
    for t in range(tokens):
        seen = lengths[1] - tokens + 1 + t
        row = p.replace(q=p.q[:, t : t + 1], k=p.k[:, :seen], v=p.v[:, :seen])
        alone = caching(rotary, dtype, [seen], 1, heads, capacity=320, sequences=[row])
        one, one_lse = alone.call(num_splits=3)
        assert torch.equal(one[0, 0], out[1, t]) and torch.equal(one_lse[0, :, 0], lse[1, :, t])


@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1, 1000])
def test_hostile_tables_touch_nothing_outside_and_no_other_sequence(operators, hostile):
    cache = caching(SCHEMES["rerope"](64), BF16, [100, 74, 90, 60], page=16, leftpad=[0, 3, 0, 0])
    cache.block_table[0] = cache.cache_seqlens[2] = cache.cache_leftpad[3] = hostile
    cache.judge(*cache.call(validate=False, num_splits=3), sequences=[1])
    cache = caching(SCHEMES["rerope"](64), BF16, [100, 77])
    cache.cache_seqlens[0] = hostile
    cache.judge(*cache.call(validate=False, num_splits=3), sequences=[1])


@page_sizes
@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1, 100])
def test_hostile_left_padding_is_clamped_to_the_sequence(operators, hostile, page_size):
    cache = caching(SCHEMES["rerope"](64), BF16, [90, 74], page=page_size, leftpad=[0, 3])
    cache.cache_leftpad[0] = hostile
    out, lse = cache.call(validate=False, num_splits=3)
    cache.judge(out, lse, sequences=[0, 1] if hostile < 0 else [1])
    assert hostile < 0 or not out[0].any()


def test_nothing_to_attend_to(operators):
    check(Rotary.rope(64), BF16, [0, 0])
    q = torch.zeros(1, 1, 2, 64, dtype=BF16)
    for batch, capacity in ((1, 0), (0, 16)):
        caches = torch.zeros(2, batch, capacity, 2, 64, dtype=BF16)
        tables = CacheTables(torch.zeros(batch, dtype=torch.int32))
        call = CacheCall(Rotary.rope(64), True, 0.1, tables, 3)
        out, lse = cuda.attention_with_cache(q[:batch], CacheLayer(*caches), call)
        assert (out == 0).all() and (lse == -torch.inf).all() and out.shape == (batch, 1, 2, 64)


# ---- append
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_append_writes_what_the_reference_writes(operators, page_size, head_dim):
    options = dict(capacity=96, page=page_size, layout="poisoned")
    cache = caching(Rotary.rope(head_dim), BF16, [31, 95, 0, 96, 14], **options)
    cache.cache_seqlens[2] = -7
    if page_size:
        cache.block_table[4] = torch.tensor([2**31 - 1, -1, 0, 0, 0, 0])
    new = [random(5, 4, 2, head_dim, dtype=BF16, seed=i) for i in (7, 8)]
    got, expected = ([x.clone() for x in (cache.k_cache, cache.v_cache)] for _ in range(2))
    cuda.append_to_cache(CacheLayer(*got), *new, tables_of(cache, 4))
    reference.append_to_cache(CacheLayer(*expected), *new, tables_of(cache, 4))
    assert same(got[0], expected[0], got[1], expected[1])


@pytest.mark.parametrize("page_size", [0, 64])
def test_the_public_call_appends_and_attends(operators, page_size):
    options = dict(new=2, heads=(8, 2), capacity=128, page=page_size, leftpad=[7, 0])
    check(SCHEMES["rerope"](128), BF16, [95, 128], 2, num_splits=None, **options)
    with pytest.raises(
        ValueError, match="impl='cuda' cannot serve this call: the CUDA kernels take float16 and bfloat16"
    ):
        check(SCHEMES["rerope"](128), torch.float32, [95, 128], 2, **options)


# ---- checks


def test_misaligned_caches_are_refused_and_misaligned_queries_copied(operators):
    cache = caching(Rotary.rope(64), BF16, [40, 7])
    k = cache.k_cache
    cache.k_cache = torch.nn.functional.pad(k, (0, 1))[..., :64]
    with pytest.raises(ValueError, match="k_cache: the CUDA kernels need"):
        cache.call()
    cache.k_cache = k
    cache.q = torch.nn.functional.pad(cache.q, (1, 0))[..., 1:]
    cache.check(num_splits=3)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(table=lambda x: x[:, :1024].contiguous()), "table: expected rows for 160 positions"),
        (dict(bands=lambda x: x[:, :3].contiguous()), "bands: expected"),
        (dict(v_cache=lambda x: x[..., :32]), "v_cache: expected head_dim 64"),
        (dict(k_cache=lambda x: x.half()), "k_cache: expected one type"),
        (dict(cache_seqlens=lambda x: x.long()), "cache_seqlens: expected a contiguous int32"),
        (dict(num_splits=lambda x: 257), "num_splits: expected 1 to 256"),
        (dict(partial_out=lambda x: x[1:]), "partial_out: expected"),
        (dict(rotary_dim=lambda x: 66), "rotary_dim: expected an even number from 0 to 64, got 66"),
        (dict(rotated_pairs=lambda x: 33), "rotated_pairs: expected 0 to 32, got 33"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_library_checks_what_it_is_given(operators, monkeypatch, change, message):
    monkeypatch.setattr(cuda, "_operators", lambda: Changed(operators, change))
    with pytest.raises(RuntimeError, match=message):
        caching(Rotary.rope(64), BF16, [40, 7]).call(num_splits=3)


class Changed:
    """The operators, called with changed arguments. change: name -> (argument -> argument)."""

    def __init__(self, operators, change):
        self.operators, self.change = operators, change

    def decode(self, *args):
        names = self.operators.arguments["decode"]
        self.operators.decode(*(self.change.get(n, lambda x: x)(x) for n, x in zip(names, args, strict=True)))


def test_more_shared_memory_than_a_block_has_is_refused(operators, machine, monkeypatch, arch):
    """A launch that needs more shared memory than a block has is refused. The table of three bands is passed as
    six bands, at head_dim 256. The launch then fits into the 163 KB of sm_80 but not into the 99 KB of sm_86."""
    if arch in (86, 89, 120):
        pytest.skip("too little shared memory for a call that runs")
    cache = caching(Rotary.rope(256).rectify(11).local(90), BF16, [129], causal=False)
    twice = Changed(operators, {"bands": lambda x: x.repeat(2, 1)})
    monkeypatch.setattr(cuda, "_operators", lambda: twice)
    cache.check(num_splits=3)
    Machine(86)  # configures the device
    with pytest.raises(RuntimeError, match="decode kernels did not start: a kernel cannot have 120320 bytes"):
        cache.call(num_splits=3)
    machine.reset()
    cache.check(num_splits=3)  # the next launch does not report this error


def test_bands_that_name_a_missing_rotation_are_noticed(operators, monkeypatch):
    """The executor notices bands that name a missing rotation. The library itself does not read device tensors."""
    change = {"bands": lambda x: torch.tensor([[0, 1 << 30, 2, 2]], dtype=torch.int32)}
    monkeypatch.setattr(cuda, "_operators", lambda: Changed(operators, change))
    with pytest.raises(
        ExecutionError, match=r"read outside the tensors: \S+split_kernel\S+ line \d+ \(positions.cuh:\d+\)"
    ):
        caching(Rotary.rope(64), BF16, [40, 7]).call(num_splits=3)
