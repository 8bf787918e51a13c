"""The CUDA decode kernels on the host, compared with the reference in float64.

csrc/decode.cu and csrc/library.cpp are compiled with tests/emulator/ptx.h and registered for CPU tensors, so the
kernels, the checks and the Python backend all run without a GPU.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support
import torch

from flashrope import Rotary, attention_with_cache
from flashrope.backends import CacheCall, CacheLayout, cuda, reference, resolve_impl

ROOT = Path(__file__).resolve().parents[1]
CXX = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(
    CXX is None or sys.platform != "linux", reason="the emulator needs Linux and a C++ compiler"
)
BF16, FP16 = torch.bfloat16, torch.float16
COEFFICIENT = support.COEFFICIENT[FP16]  # of u * (1 + kappa) * (P |V|); the largest seen was 0.77

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
    "rerope_local_log_n": lambda d: Rotary.rope(d).rectify(11).local(90).log_n(50, clip=False),
}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """(the operators, the library of the emulated collectives)"""
    folder, package = tmp_path_factory.mktemp("emulator"), Path(torch.__file__).parent
    options = [
        CXX,
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-U_FORTIFY_SOURCE",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-DFLASHROPE_NAMESPACE=flashrope_emulated",
        "-DFLASHROPE_DISPATCH_KEY=CPU",
        f"-I{ROOT}/tests/emulator",
        f"-I{ROOT}/csrc",
        f"-I{package}/include",
        "-x",
        "c++",
    ]
    sources = (ROOT / "csrc/decode.cu", ROOT / "csrc/library.cpp", ROOT / "tests/emulator/fragments.cpp")
    compilers = [subprocess.Popen([*options, "-c", source, "-o", folder / f"{source.stem}.o"]) for source in sources]
    assert [compiler.wait() for compiler in compilers] == [0, 0, 0]
    libraries = {"operators": ["decode.o", "library.o"], "fragments": ["fragments.o"]}
    for name, objects in libraries.items():
        subprocess.run(
            [
                CXX,
                "-shared",
                *(folder / x for x in objects),
                "-o",
                folder / f"{name}.so",
                f"-L{package}/lib",
                "-ltorch_cpu",
                "-lc10",
            ],
            check=True,
        )
    torch.ops.load_library(folder / "operators.so")
    return torch.ops.flashrope_emulated, ctypes.CDLL(folder / "fragments.so")


@pytest.fixture
def operators(built, monkeypatch):
    monkeypatch.setattr(cuda, "_operators", lambda: built[0])
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 2)
    return built[0]


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
        self.layout = CacheLayout(torch.tensor(lengths, dtype=torch.int32), table, pads)
        self.call = CacheCall(rotary, causal, head_dim**-0.5, self.layout, num_splits)

    def run(self):
        return cuda.attention_with_cache(self.q, self.k, self.v, self.call)

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
                q, k, v, self.call.rotary, self.call.causal, grad_out=torch.zeros_like(q), grad_lse=zeros
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


# ---- the emulator itself

LANE = torch.arange(32)[:, None]
GROUP, MEMBER = LANE // 4, LANE % 4  # PTX ISA: groupID and threadID_in_group


def pointer(x):
    return ctypes.c_void_p(x.data_ptr())


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_mma_holds_its_fragments_as_the_ptx_isa_says(built, dtype):
    a, b, c = random(16, 16, dtype=dtype, seed=0), random(16, 8, dtype=dtype, seed=1), torch.randn(16, 8)
    i = torch.arange(8)[None]  # a0 to a7
    fragment_a = a[
        torch.where((i < 2) | ((i >= 4) & (i < 6)), GROUP, GROUP + 8), MEMBER * 2 + i % 2 + torch.where(i >= 4, 8, 0)
    ]
    i = i[:, :4]  # b0 to b3, c0 to c3
    fragment_b = b[MEMBER * 2 + i % 2 + torch.where(i >= 2, 8, 0), GROUP.expand(32, 4)]
    at = torch.where(i < 2, GROUP, GROUP + 8), MEMBER * 2 + i % 2
    fragment_c = c[at].contiguous()
    fragment_a, fragment_b = fragment_a.contiguous(), fragment_b.contiguous()
    assert not built[1].emulated_mma(pointer(fragment_a), pointer(fragment_b), pointer(fragment_c), int(dtype == BF16))
    expected = c.double() + a.double() @ b.double()
    torch.testing.assert_close(fragment_c.double(), expected[at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_deals_rows_as_the_ptx_isa_says(built, transposed):
    numbers = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    registers = torch.zeros(32, 4, 2, dtype=torch.int16)
    assert not built[1].emulated_ldmatrix(pointer(numbers), pointer(registers), int(transposed))
    for matrix in range(4):
        x = numbers[matrix].T if transposed else numbers[matrix]
        assert torch.equal(registers[:, matrix], x[GROUP, MEMBER * 2 + torch.arange(2)])


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_two_byte_types_round_as_torch_does(built, dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64, generator=generator).to(torch.int32)
    near = torch.randn(100_000, generator=generator) * torch.logspace(-9, 5, 100_000)
    x = torch.cat([bits.view(torch.float32), near, torch.tensor([0.0, -0.0, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25])])
    x = x[x.isfinite()]
    narrow = torch.empty(len(x), dtype=dtype)
    built[1].emulated_narrow(pointer(x), pointer(narrow), len(x), int(dtype == BF16))
    assert torch.equal(narrow.view(torch.int16), x.to(dtype).view(torch.int16))
    wide = torch.empty_like(x)
    built[1].emulated_wide(pointer(narrow), pointer(wide), len(x), int(dtype == BF16))
    finite = narrow.isfinite()
    assert torch.equal(wide[finite], narrow.float()[finite])


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


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7, 256])
def test_any_number_of_splits(operators, num_splits):
    Cache(SCHEMES["leaky"](64), BF16, [700, 1], 800, group=4, heads_kv=1, num_splits=num_splits).check()


def test_long_positions_keep_their_accuracy(operators):
    """Past the fine table's 1024 rows, with a window that leaves most blocks unread."""
    Cache(Rotary.rope(64).local(200), FP16, [5003], 5120, seqlen_q=2, heads_kv=1, num_splits=5).check()
    Cache(Rotary.rope(64, interleaved=True).rectify(64), FP16, [2211], 2304, heads_kv=1, num_splits=5).check()


def test_strides_that_do_not_follow_from_the_shape(operators):
    for page_size in (0, 16):
        Cache(SCHEMES["rope"](96), BF16, [77, 30], page_size=page_size, wide=True).check()


def test_copies_that_land_as_late_as_allowed_change_nothing(operators, monkeypatch):
    for head_dim in cuda.HEAD_DIMS:
        cache = Cache(SCHEMES["rerope"](head_dim), BF16, [333, 50], 400, seqlen_q=2, num_splits=2)
        early = cache.run()
        monkeypatch.setenv("FLASHROPE_EMULATED_COPIES", "late")
        late = cache.run()
        monkeypatch.delenv("FLASHROPE_EMULATED_COPIES")
        assert all(map(torch.equal, early, late))
        assert cache.largest_error(*late) <= COEFFICIENT


@pytest.mark.parametrize("scheme", ["rope", "rerope", "local_log_n"])
def test_fixed_splits_are_bitwise_identical_however_tokens_are_divided_into_calls(operators, scheme):
    rotary = SCHEMES[scheme](64)
    together = Cache(rotary, BF16, [150, 60], seqlen_q=6, group=4)
    out, lse = together.run()
    for t in range(6):
        alone = Cache(rotary, BF16, [150, 60], seqlen_q=6, group=4)
        alone.q = alone.q[1:, t : t + 1]
        alone.call.layout = CacheLayout(torch.tensor([60 - 5 + t], dtype=torch.int32))
        alone.k, alone.v = alone.k[1:], alone.v[1:]
        one, one_lse = alone.run()
        assert torch.equal(one[0, 0], out[1, t]) and torch.equal(one_lse[0, :, 0], lse[1, :, t])


@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1, 1000])
def test_hostile_tables_touch_nothing_outside_and_no_other_sequence(operators, hostile):
    cache = Cache(SCHEMES["rerope"](64), BF16, [100, 77, 90, 60], page_size=16, leftpad=[0, 3, 0, 0])
    cache.layout.block_table[0] = hostile
    cache.layout.seqlens[2] = hostile
    cache.layout.leftpad[3] = hostile
    out, lse = cache.run()
    assert cache.largest_error(out, lse, skip=(0, 2, 3)) <= COEFFICIENT
    cache = Cache(SCHEMES["rerope"](64), BF16, [100, 77])
    cache.layout.seqlens[0] = hostile
    assert cache.largest_error(*cache.run(), skip=(0,)) <= COEFFICIENT


def test_table_entries_beyond_a_sequence_are_not_used(operators):
    cache = Cache(SCHEMES["rope"](64), BF16, [33, 70], page_size=16)
    cache.layout.block_table[0, 3:] = -5
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
    cache = Cache(Rotary.rope(head_dim), BF16, [31, 95, 0, 96, 5], 96, page_size=page_size, wide=True)
    cache.layout.seqlens[2] = -7
    if page_size:
        cache.layout.block_table[4] = torch.tensor([2**31 - 1, -1, 0, 0, 0, 0])
    new = [random(5, 4, 2, head_dim, dtype=BF16, seed=i) for i in (7, 8)]
    got, expected = ([x.clone() for x in (cache.k, cache.v)] for _ in range(2))
    layout = cache.layout._replace(seqlen_new=4)
    cuda.append_to_cache(*got, *new, layout)
    reference.append_to_cache(*expected, *new, layout)
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
            cache.layout.seqlens,
            k,
            v,
            cache.layout.block_table,
            cache.layout.leftpad,
            return_lse=True,
            impl=impl,
        )

    (out, lse), (exact, exact_lse) = run("cuda"), run("reference", torch.float64)
    assert out.dtype == BF16 and (out - exact).abs().max() < 0.01 and (lse - exact_lse).abs().max() < 0.01
    with pytest.raises(
        ValueError, match="impl='cuda' cannot serve this call: the CUDA kernels take float16 and bfloat16"
    ):
        run("cuda", torch.float32)


# ---- refusals and checks


def test_unsupported_reasons(monkeypatch, tmp_path):
    q = torch.empty(1, 1, 1, 64, dtype=BF16)
    assert "attention_with_cache only" in cuda.unsupported_reason(q)
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "absent.so")
    assert "not built" in cuda.unsupported_reason(q, cached=True) and cuda.build_info() == "not built"
    monkeypatch.setattr(cuda, "LIBRARY", Path(__file__))
    assert "CUDA device" in cuda.unsupported_reason(q, cached=True)
    with pytest.raises(ValueError, match="impl='cuda' cannot serve this call: the CUDA kernels need a CUDA device"):
        resolve_impl("cuda", q, cached=True)
    assert "float32" in cuda.unsupported_queries(q.float())
    assert "head_dim 64, 96, 128, 256, q has 80" in cuda.unsupported_queries(q.new_empty(1, 1, 1, 80))
    assert "64 query tokens, q has 65" in cuda.unsupported_queries(q.new_empty(1, 65, 1, 64))
    assert not cuda.unsupported_queries(q)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in cuda._unsupported_device("cuda:0")


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
    names = [argument.name for argument in operators.decode.default._schema.arguments]

    class Changed:
        @staticmethod
        def decode(*args):
            operators.decode(*(change.get(name, lambda x: x)(x) for name, x in zip(names, args, strict=True)))

    monkeypatch.setattr(cuda, "_operators", lambda: Changed)
    with pytest.raises(RuntimeError, match=message):
        Cache(Rotary.rope(64), BF16, [40, 7]).run()


def test_a_build_without_nvcc_fails_and_names_it(tmp_path):
    env = {**os.environ, "FLASHROPE_BUILD_CUDA": "1", "PATH": str(tmp_path)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode != 0 and "FLASHROPE_BUILD_CUDA: needs nvcc" in run.stderr


STAND_IN = "int aoti_torch_get_current_cuda_stream(int device, void** stream) { *stream = 0; return 0; }"
LOAD = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
torch.ops.load_library(sys.argv[2])
print(torch.ops.flashrope_cuda.decode.default._schema)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("nvcc", "ninja", "c++"))), reason="needs nvcc, ninja and a C++ compiler on PATH"
)
def test_the_library_builds_and_loads_where_torch_has_cuda(tmp_path):
    """Where this torch has no libtorch_cuda, a stub replaces it: no kernel runs, but every symbol must be found."""
    pytest.importorskip("pybind11", reason="the build needs pybind11")
    env = {**os.environ, "FLASHROPE_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "7.5"}
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        tmp_path / "lib",
        "--build-temp",
        tmp_path / "temp",
    ]
    refused = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "TORCH_CUDA_ARCH_LIST: expected numbers from 8.0 on" in refused.stderr
    env["TORCH_CUDA_ARCH_LIST"] = "8.0"
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    stand_in = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if not stand_in.exists():
        stand_in = tmp_path / "libtorch_cuda.so"
        (tmp_path / "stand_in.c").write_text(STAND_IN)
        options = ["-shared", "-fPIC", "-x", "c", "-Wl,-soname,libtorch_cuda.so"]
        subprocess.run(["c++", *options, tmp_path / "stand_in.c", "-o", stand_in], check=True)
    command = [sys.executable, "-c", LOAD, stand_in, tmp_path / "lib/flashrope/_cuda.abi3.so"]
    load = subprocess.run(command, capture_output=True, text=True)
    assert load.returncode == 0 and "flashrope_cuda::decode(Tensor q" in load.stdout, load.stderr
    assert list((tmp_path / "lib/flashrope").glob("_build_info.*.so"))


# ---- the gate
PTXAS = """\
ptxas info    : Compiling entry function '_ZN1a12split_kernelINS_8BFloat16ELi128ELb0EEEvNS_12DecodeParamsE' for 'sm_80'
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 600 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN1a13append_kernelENS_12AppendParamsE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 0 barriers, 528 bytes cmem[0]
"""


@pytest.fixture
def gate(monkeypatch):
    pytest.importorskip("triton", reason="the gates share their table of GPUs with Triton's")
    monkeypatch.syspath_prepend(str(ROOT))  # bench is not part of the installed package
    from bench.compiling import gate_cuda

    return gate_cuda


def test_the_gate_reads_registers_and_spills(gate):
    found = gate.ptxas_report(PTXAS)
    assert list(found.values()) == [(168, 32), (26, 0)]


def test_the_gate_reads_the_width_of_copies_per_kernel(gate):
    lines = [
        "        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64] ;",
        "        /*0020*/              @P0  LDGSTS.E [R2], [R4] ;",
        "        /*0030*/                   LDG.E.128 R4, [R2] ;",
    ]
    found = gate.functions("\n".join([".text.first:", *lines[:1], ".text.second:", *lines]))
    assert {name: gate.copy_bytes(listing.opcodes) for name, listing in found.items()} == {
        "first": (16,),
        "second": (16, 4),
    }


def test_every_limit_of_the_gate_can_be_broken(gate):
    name, append = gate.ptxas_report(PTXAS)
    shape = gate.Shape(4, (70_000, 75_000, 80_000, 85_000))
    good = gate.Kernel(80, name, 168, 0, (16, 16), shape)
    assert good.violations() == []
    assert good.label == {"kernel": "split", "arch": "sm_80", "D": "128", "dtype": "bf16", "pairs": "halves"}
    assert "spills 32" in gate.Kernel(80, name, 168, 32, (16,), shape).violations()[0]
    assert "spills 8" in gate.Kernel(80, append, 26, 8).violations()[0]
    assert gate.Kernel(80, name.replace("128", "256"), 255, 8, (16,), shape).violations() == []
    assert "shared memory" in gate.Kernel(80, name, 168, 0, (16,), gate.Shape(4, (1, 170_000, 1, 1))).violations()[0]
    assert "by [4, 16] bytes" in gate.Kernel(80, name, 168, 0, (16, 4), shape).violations()[0]
    assert "by no bytes" in gate.Kernel(80, name, 168, 0, (), shape).violations()[0]


def test_the_gate_says_when_there_is_no_nvcc(gate, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert gate.main([]) == 0
    assert "nvcc is not on PATH" in capsys.readouterr().out
