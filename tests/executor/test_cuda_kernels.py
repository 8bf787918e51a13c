"""The CUDA C++ kernels of csrc/ on the executor, launched by the extension's own host code.

Results are compared with the reference in float64.
"""

import dataclasses
import re

import pytest
import support
import torch
from flashrope import Rotary, attention_with_cache
from flashrope.backends import cuda, reference
from flashrope.backends.cache_tables import CacheLayer, CacheTables
from flashrope.backends.calls import CacheCall

from . import extension
from .driver import Machine
from .launches import ExecutionError

BF16, FP16 = torch.bfloat16, torch.float16
COEFFICIENT = support.COEFFICIENT[FP16]  # of u * (1 + kappa) * (P |V|); the largest seen was 0.77
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
    """The extension's operators, in the place of those that the backend would load."""
    try:
        operators = extension.operators(machine)
    except extension.NoNvcc as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cuda, "_operators", lambda: operators)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 2)
    return operators


def random(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Cache:
    """Sequences of random keys; every slot that no sequence holds is NaN.

    q: (batch, seqlen_q, heads_kv * group, head_dim).
    """

    def __init__(
        self,
        rotary,
        dtype,
        lengths,
        capacity=160,
        seqlen_q=1,
        group=1,
        heads_kv=2,
        page_size=0,
        leftpad=None,
        causal=True,
        num_splits=3,
        seed=0,
        wide=False,
        softmax_scale=None,
    ):
        batch, head_dim = len(lengths), rotary.head_dim
        self.q = random(batch, seqlen_q, heads_kv * group, head_dim, dtype=dtype, seed=seed)
        self.dtype, self.leftpad, self.lengths = dtype, leftpad or [0] * batch, lengths
        contiguous = [random(batch, capacity, heads_kv, head_dim, dtype=dtype, seed=seed + i) for i in (1, 2)]
        for x in contiguous:
            for b, (start, end) in enumerate(zip(self.leftpad, lengths, strict=True)):
                x[b, :start], x[b, end:] = torch.nan, torch.nan
        self.contiguous = contiguous
        caches, table = contiguous, None
        if page_size:
            count = batch * capacity // page_size
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            pages = [torch.full((count + 1, page_size, heads_kv, head_dim), torch.nan, dtype=dtype) for _ in contiguous]
            for to, x in zip(pages, contiguous, strict=True):
                to[order] = x.reshape(count, page_size, heads_kv, head_dim)
            caches, table = pages, order.view(batch, -1).to(torch.int32)
        if wide:  # strides that do not follow from the shape
            caches = [
                torch.nn.functional.pad(x, (0, 8, 0, 1), value=torch.nan)[:, :, :heads_kv, :head_dim] for x in caches
            ]
        self.k, self.v = caches
        pads = torch.tensor(self.leftpad, dtype=torch.int32) if leftpad else None
        self.tables = CacheTables(torch.tensor(lengths, dtype=torch.int32), table, pads)
        self.call = CacheCall(rotary, causal, softmax_scale or head_dim**-0.5, self.tables, num_splits)

    def run(self):
        return cuda.attention_with_cache(self.q, CacheLayer(self.k, self.v), self.call)

    def largest_error(self, out, lse, skip=()):
        """The largest error, divided by the budget."""
        assert out.dtype == self.dtype and out.is_contiguous() and lse.dtype == torch.float32
        worst = 0.0
        for b, (start, end) in enumerate(zip(self.leftpad, self.lengths, strict=True)):
            if b in skip:
                continue
            q, k, v = self.q[b : b + 1], *(x[b : b + 1, start:end] for x in self.contiguous)
            zeros = torch.zeros(1, q.shape[2], q.shape[1])
            problem = support.Problem(
                *(q, k, v, self.call.rotary, self.call.causal, self.call.softmax_scale),
                grad_out=torch.zeros_like(q),
                grad_lse=zeros,
            )
            exact, bound = support.exact_and_bound(problem)
            for name, got in (("out", out[b : b + 1]), ("lse", lse[b : b + 1])):
                error = torch.where(got.double() == exact[name], 0, (got.double() - exact[name]).abs())
                budget = support.UNIT_ROUNDOFF[self.dtype] * bound[name] + 2.0**-25  # half of float16's smallest step
                worst = max(worst, (error / budget).nan_to_num(nan=torch.inf).max().item())
        return worst

    def check(self, **options):
        error = self.largest_error(*self.run(), **options)
        assert error <= COEFFICIENT, f"{error} of the budget in {self.call.rotary}"


# ---- attention
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["float16", "bfloat16"])
def test_follows_the_reference(operators, dtype, head_dim, scheme):
    """Query tokens, heads per key head and the cache layout vary over the cases."""
    case = list(SCHEMES).index(scheme) + cuda.HEAD_DIMS.index(head_dim) + (dtype == BF16)
    seqlen_q, group, page_size = (1, 3, 17)[case % 3], (1, 4)[case // 3 % 2], (0, 16, 64)[case % 5 % 3]
    lengths = [129, max(37, seqlen_q), 0]
    Cache(
        SCHEMES[scheme](head_dim), dtype, lengths, 192, seqlen_q, group, 1 if group == 4 else 2, page_size, seed=case
    ).check()


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("scheme", ["rerope", "hope_interleaved"])
def test_left_padding_counts_positions_from_the_first_key(operators, scheme, page_size):
    cache = Cache(SCHEMES[scheme](64), BF16, [130, 70, 41, 5], 192, 3, 4, 1, page_size, leftpad=[13, 64, 41, 0])
    cache.check()


@pytest.mark.parametrize("scheme", ["rope", "leaky", "rerope_local_log_n", "none"])
@pytest.mark.parametrize("seqlen_q", [3, 17])
def test_not_causal(operators, scheme, seqlen_q):
    """The second sequence has fewer keys than queries; queries before its first key see keys ahead."""
    Cache(SCHEMES[scheme](64), FP16, [90, 9, 0], seqlen_q=seqlen_q, group=2, causal=False).check()


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_one_tile_and_than_keys(operators, causal):
    cache = Cache(SCHEMES["rerope"](64), BF16, [100, 20], seqlen_q=64, group=2, causal=causal)
    out, lse = cache.run()
    assert cache.largest_error(out, lse) <= COEFFICIENT
    if causal:
        assert (lse[1, :, :44] == -torch.inf).all() and (out[1, :44] == 0).all()


@pytest.mark.parametrize("length_scale", [30.0, 0.5])
def test_the_factor_by_length_counts_the_keys_of_each_sequence(operators, length_scale):
    """One key more or less changes the factor of the two short sequences by several percent."""
    rotary = dataclasses.replace(Rotary.rope(64), length_scale=length_scale)
    for leftpad in (None, [0, 30, 0, 9]):
        lengths = [150, 90, 2, 10 if leftpad else 1]
        Cache(rotary, FP16, lengths, group=4, heads_kv=1, leftpad=leftpad).check()


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7, 256])
def test_any_number_of_splits(operators, num_splits):
    Cache(SCHEMES["leaky"](64), BF16, [700, 1], 800, group=4, heads_kv=1, num_splits=num_splits).check()


def test_long_positions_keep_their_accuracy(operators):
    """Past the fine table's 1024 rows, with a window that leaves most blocks unread."""
    Cache(Rotary.rope(64).local(200), FP16, [5003], 5120, seqlen_q=2, heads_kv=1, num_splits=5).check()
    Cache(Rotary.rope(64, interleaved=True).rectify(64), FP16, [2211], 2304, heads_kv=1, num_splits=5).check()
    Cache(Rotary.rope(64), FP16, [1100], 1152, heads_kv=1, num_splits=3).check()  # across the end of the fine table


def test_strides_that_do_not_follow_from_the_shape(operators):
    for page_size in (0, 16):
        Cache(SCHEMES["rope"](96), BF16, [77, 30], page_size=page_size, wide=True).check()


def test_the_order_of_warps_changes_nothing(operators, machine):
    """Copies land at the wait for them, and not before."""
    for head_dim in cuda.HEAD_DIMS:
        cache = Cache(SCHEMES["rerope"](head_dim), BF16, [333, 50], 400, seqlen_q=2, num_splits=2)
        results = []
        for seed in range(3):
            machine.reset(seed=seed)
            results.append(cache.run())
        assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))
        assert cache.largest_error(*results[0]) <= COEFFICIENT


def test_every_kernel_of_the_source_runs(operators, machine):
    """split: two types, four head_dims, two layouts of pairs; combine: two types; append."""
    for dtype in (BF16, FP16):
        for head_dim in cuda.HEAD_DIMS:
            for interleaved in (False, True):
                Cache(Rotary.rope(head_dim, interleaved=interleaved), dtype, [37], 48, heads_kv=1).check()
    cache = Cache(Rotary.rope(64), BF16, [31], 48)
    cuda.append_to_cache(
        CacheLayer(cache.k, cache.v), cache.k[:, :1].clone(), cache.v[:, :1].clone(), cache.tables._replace(new=1)
    )
    kernels = re.findall(r"^\.entry (\w+)\(", operators.ptx, re.MULTILINE)
    assert len(kernels) == 19 and {launch.kernel for launch in machine.launches} == set(kernels)


@pytest.mark.parametrize(
    "rotary, dtype, lengths, tokens, heads",
    [
        *((SCHEMES[name](64), BF16, [150, 60], 6, dict(group=4)) for name in ("rope", "rerope", "local_log_n")),
        # five blocks of 64 keys; within a tile of queries the window begins in the first block, then in the second
        (Rotary.rope(64).local(200).log_n(20), FP16, [60, 268], 16, dict(heads_kv=4)),
    ],
    ids=["rope", "rerope", "local_log_n", "window_over_blocks"],
)
def test_fixed_splits_are_bitwise_identical_however_tokens_are_divided_into_calls(
    operators, rotary, dtype, lengths, tokens, heads
):
    together = Cache(rotary, dtype, lengths, 320, seqlen_q=tokens, **heads)
    out, lse = together.run()
    for t in range(tokens):
        alone = Cache(rotary, dtype, lengths, 320, seqlen_q=tokens, **heads)
        alone.q = alone.q[1:, t : t + 1]
        alone.call.tables = CacheTables(torch.tensor([lengths[1] - tokens + 1 + t], dtype=torch.int32))
        alone.k, alone.v = alone.k[1:], alone.v[1:]
        one, one_lse = alone.run()
        assert torch.equal(one[0, 0], out[1, t]) and torch.equal(one_lse[0, :, 0], lse[1, :, t])


@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1, 1000])
def test_hostile_tables_touch_nothing_outside_and_no_other_sequence(operators, hostile):
    cache = Cache(SCHEMES["rerope"](64), BF16, [100, 77, 90, 60], page_size=16, leftpad=[0, 3, 0, 0])
    cache.tables.block_table[0] = hostile
    cache.tables.seqlens[2] = hostile
    cache.tables.leftpad[3] = hostile
    out, lse = cache.run()
    assert cache.largest_error(out, lse, skip=(0, 2, 3)) <= COEFFICIENT
    cache = Cache(SCHEMES["rerope"](64), BF16, [100, 77])
    cache.tables.seqlens[0] = hostile
    assert cache.largest_error(*cache.run(), skip=(0,)) <= COEFFICIENT


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1, 100])
def test_hostile_left_padding_is_clamped_to_the_sequence(operators, hostile, page_size):
    cache = Cache(SCHEMES["rerope"](64), BF16, [90, 77], page_size=page_size, leftpad=[0, 3])
    cache.tables.leftpad[0] = hostile
    cache.leftpad[0] = min(max(hostile, 0), 90)
    cache.check()


def test_table_entries_beyond_a_sequence_are_not_used(operators):
    cache = Cache(SCHEMES["rope"](64), BF16, [33, 70], page_size=16)
    cache.tables.block_table[0, 3:] = -5
    cache.check()


def test_nothing_to_attend_to(operators):
    for cache in (
        Cache(Rotary.rope(64), BF16, [0, 0]),
        Cache(Rotary.rope(64), BF16, [0], capacity=0),
        Cache(Rotary.rope(64), BF16, [], capacity=16),
    ):
        out, lse = cache.run()
        assert (out == 0).all() and (lse == -torch.inf).all() and out.shape == cache.q.shape


# ---- append
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_append_writes_what_the_reference_writes(operators, page_size, head_dim):
    cache = Cache(Rotary.rope(head_dim), BF16, [31, 95, 0, 96, 14], 96, page_size=page_size, wide=True)
    cache.tables.seqlens[2] = -7
    if page_size:
        cache.tables.block_table[4] = torch.tensor([2**31 - 1, -1, 0, 0, 0, 0])
    new = [random(5, 4, 2, head_dim, dtype=BF16, seed=i) for i in (7, 8)]
    got, expected = ([x.clone() for x in (cache.k, cache.v)] for _ in range(2))
    tables = cache.tables._replace(new=4)
    cuda.append_to_cache(CacheLayer(*got), *new, tables)
    reference.append_to_cache(CacheLayer(*expected), *new, tables)
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x.nan_to_num(nan=-77.0), y.nan_to_num(nan=-77.0))


@pytest.mark.parametrize("page_size", [0, 64])
def test_the_public_call_appends_and_attends(operators, monkeypatch, page_size):
    # without the check for a device
    monkeypatch.setattr(cuda, "unsupported_reason", lambda q, cached=False: cuda.unsupported_queries(q))
    cache = Cache(
        SCHEMES["rerope"](128), BF16, [100, 126], 128, seqlen_q=2, group=4, page_size=page_size, leftpad=[7, 0]
    )
    new = [random(2, 2, 2, 128, dtype=BF16, seed=i) for i in (7, 8)]

    def run(impl, dtype=BF16):
        q, k_cache, v_cache, k, v = (x.to(dtype) for x in (cache.q, cache.k, cache.v, *new))
        return attention_with_cache(
            q,
            k_cache,
            v_cache,
            cache.call.rotary,
            cache.tables.seqlens,
            k=k,
            v=v,
            block_table=cache.tables.block_table,
            cache_leftpad=cache.tables.leftpad,
            return_lse=True,
            impl=impl,
        )

    (out, lse), (exact, exact_lse) = run("cuda"), run("reference", torch.float64)
    assert out.dtype == BF16 and (out - exact).abs().max() < 0.01 and (lse - exact_lse).abs().max() < 0.01
    with pytest.raises(
        ValueError, match="impl='cuda' cannot serve this call: the CUDA kernels take float16 and bfloat16"
    ):
        run("cuda", torch.float32)


# ---- checks


def test_misaligned_caches_are_refused_and_misaligned_queries_copied(operators):
    cache = Cache(Rotary.rope(64), BF16, [40, 7])
    k = cache.k
    cache.k = torch.nn.functional.pad(k, (0, 1))[..., :64]
    with pytest.raises(ValueError, match="k_cache: the CUDA kernels need"):
        cache.run()
    cache.k = k
    cache.q = torch.nn.functional.pad(cache.q, (1, 0))[..., 1:]
    cache.check()


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
        (dict(rotary_dim=lambda x: 66), "rotary_dim: got 66"),
        (dict(rotated_pairs=lambda x: 33), "rotated_pairs: got 33"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_library_checks_what_it_is_given(operators, monkeypatch, change, message):
    monkeypatch.setattr(cuda, "_operators", lambda: Changed(operators, change))
    with pytest.raises(RuntimeError, match=message):
        Cache(Rotary.rope(64), BF16, [40, 7]).run()


class Changed:
    """The operators, called with changed arguments. change: name -> (argument -> argument)."""

    def __init__(self, operators, change):
        self.operators, self.change = operators, change

    def decode(self, *args):
        names = self.operators.arguments["decode"]
        self.operators.decode(*(self.change.get(n, lambda x: x)(x) for n, x in zip(names, args, strict=True)))


def test_more_shared_memory_than_a_block_has_is_refused(operators, machine, monkeypatch, arch):
    """Three bands at head_dim 256, each given twice, fit into the 163 KB of sm_80 and not into the 99 KB of sm_86."""
    if arch in (86, 89, 120):
        pytest.skip("too little shared memory for a call that runs")
    cache = Cache(Rotary.rope(256).rectify(11).local(90), BF16, [129], causal=False)
    twice = Changed(operators, {"bands": lambda x: x.repeat(2, 1)})
    monkeypatch.setattr(cuda, "_operators", lambda: twice)
    cache.check()
    Machine(86)  # configures the device
    with pytest.raises(RuntimeError, match="decode kernels did not start: a kernel cannot have 120320 bytes"):
        cache.run()
    machine.reset()
    cache.check()  # the error is not the next launch's


def test_bands_that_name_a_missing_rotation_are_noticed(operators, monkeypatch):
    """The library does not look into device tensors."""
    change = {"bands": lambda x: torch.tensor([[0, 1 << 30, 2, 2]], dtype=torch.int32)}
    monkeypatch.setattr(cuda, "_operators", lambda: Changed(operators, change))
    with pytest.raises(
        ExecutionError, match=r"read outside the tensors: \S+split_kernel\S+ line \d+ \(positions.cuh:\d+\)"
    ):
        Cache(Rotary.rope(64), BF16, [40, 7]).run()
