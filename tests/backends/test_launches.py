"""Tests launches as a GPU would get them, without a GPU. Random calls run up to the driver, through Triton's own
specialisation of their arguments, and every kernel is compiled for the architecture. Only loading and running are
left out. The interpreter cannot test launches, because it treats constants and runtime numbers alike."""

import collections
import ctypes
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from caching import cached_call

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from flashrope import (
    KVCache,
    PagedKVCache,
    Rotary,
    attention,
    attention_varlen,
    attention_with_cache,
    rotate,
)
from flashrope.backends import triton as backend
from flashrope.backends.triton import carveout, launcher
from flashrope.schemes.bands import have_maps, shared_map
from triton.compiler import CompiledKernel

from bench.machine_code import architectures, offline

ROOT = pathlib.Path(__file__).parents[2]
LENGTHS = (1, 2, 16, 17, 64, 65, 100, 128, 129, 300, 1024, 1025)
PLACED = {"place_slots", "place_tokens"}  # kernels of calls with explicit positions of cached tokens
KERNELS = {
    "rotate_rows",
    "attention_forward",
    "attention_chunks",
    "attention_statistics",
    "attention_grad_kv",
    "attention_grad_q",
    "attention_finish_grad_q",
    "append_rows",
    "rotate_cached_rows",
    "attention_decode",
    "combine_splits",
}
SHARES = {"plan_shares", "combine_shares"}  # kernels of decoding by shares, which heads of 16 channels do not use


class Launcher:
    """Replaces the launcher that Triton calls for every launch, and checks the grid and the types of the arguments."""

    def __init__(self, source, metadata):
        self.name, self.signature = metadata.name, tuple(source.signature.values())
        assert metadata.enable_fp_fusion, f"{self.name}: products and sums do not fuse"

    def __call__(self, x, y, z, *arguments):
        assert 0 < x < 2**31 and 0 < y < 2**16 and 0 < z < 2**16, f"{self.name}: grid {(x, y, z)}"
        assert self.fits(self.signature, arguments[-len(self.signature) :]), (
            f"{self.name}: {self.signature}, {arguments}"
        )

    def fits(self, kind, value):
        if isinstance(kind, tuple):
            return len(kind) == len(value) and all(map(self.fits, kind, value))
        if kind.startswith("*"):
            return isinstance(value, torch.Tensor)
        if kind in ("i32", "i64"):
            return -(2 ** int(kind[1:]) // 2) <= value < 2 ** int(kind[1:]) // 2
        return kind == "constexpr" or kind == "fp32" and isinstance(value, float)


class Uncompiled(CompiledKernel):
    """Replaces a compiled kernel. ``ran`` lists the kernels that were launched."""

    ran = []

    def __init__(self, source, target, options):
        self.src, self.metadata, self.packed_metadata = source, SimpleNamespace(shared=0, num_warps=4), None
        self.n_regs, self.asm = 255, {"ttgir": ""}
        self.module = self.function = self.name = source.name
        self._run = lambda *_: self.ran.append(self)


class Calls(random.Random):
    """Makes one random call per seed. seed % 3 selects the public function. The tensors are not initialised."""

    def __init__(self, seed: int, head_dims):
        super().__init__(seed)
        self.head_dim, self.dtype = self.choice(head_dims), self.choice((torch.bfloat16, torch.float16, torch.float32))
        self.heads_kv = self.choice((1, 1, 2, 3, 16))
        self.heads_q, self.batch = self.heads_kv * self.choice((1, 2, 5, 16)), self.choice((1, 2, 3, 16))
        self.options = {"causal": self.random() < 0.7, "return_lse": True, "impl": "triton"}
        self.deterministic = seed % 2 == 0
        (self.dense, self.packed, self.cached)[seed % 3]()

    def tensor(self, *shape, grad=False):
        """Returns a contiguous tensor, a view in which the rows or the first element are not aligned to 16 bytes, or a
        tensor with the heads first."""
        layout, (*rows, heads, head_dim) = (
            self.choice(("contiguous", "contiguous", "heads first", "window", "odd")),
            shape,
        )
        if layout == "heads first" and len(rows) == 2:
            return torch.empty(rows[0], heads, rows[1], head_dim, dtype=self.dtype, requires_grad=grad).transpose(1, 2)
        extra = {"window": 8, "odd": 3}.get(layout, 0)
        return torch.empty(*rows, heads, head_dim + extra, dtype=self.dtype, requires_grad=grad)[..., extra:]

    def rotary(self):
        d = self.head_dim
        rotary = self.choice(
            (
                Rotary.rope(d),
                Rotary.rope(d, interleaved=True),
                Rotary.rope(d, rotary_dim=2),
                Rotary.hope(d, 512),
                Rotary.rope(d, rotary_dim=d - 2),
                Rotary.hope(d, 512, interleaved=True),
                Rotary.hope(d, 512, compact=True),
            )
        )
        rotary = self.choice(
            (rotary, rotary.rectify(16), rotary.rectify(21, 4.0), rotary.rectify(16).local(100), Rotary.none(d))
        )
        if self.random() >= 0.3:
            return rotary
        which = self.random()
        if int(100 * which) % 2:
            rotary = dataclasses.replace(rotary, length_scale=30.0)
        return rotary.log_n(20, clip=which < 0.3) if which < 0.6 else rotary.log_steps(9, first=int(which < 0.8))

    def backward(self, out, lse):
        results, grads = [out, lse], [self.tensor(*out.shape), torch.empty_like(lse)]
        chosen = slice(0, self.choice((1, 2)))
        torch.autograd.backward(results[chosen], grads[chosen])

    def dense(self):
        seqlen_q, seqlen_k, rotary = self.choice(LENGTHS), self.choice(LENGTHS), self.rotary()
        if self.random() < 0.3:
            rotary, seqlen_k = (
                self.choice((Rotary.rope(self.head_dim).log_n(20), Rotary.axial(self.head_dim))),
                seqlen_q,
            )
            self.options["positions"] = torch.rand(self.batch, seqlen_q, *((2,) if rotary.axis else ()))
        q, k, v = (
            self.tensor(self.batch, seqlen, heads, self.head_dim, grad=True)
            for seqlen, heads in ((seqlen_q, self.heads_q), (seqlen_k, self.heads_kv), (seqlen_k, self.heads_kv))
        )
        self.backward(*attention(q, k, v, rotary, **self.options, deterministic=self.deterministic))

    def packed(self):
        starts = [
            torch.tensor([0, *self.choices((0, *LENGTHS), k=self.batch)]).cumsum(0).to(torch.int32) for _ in range(2)
        ]
        q, k, v = (
            self.tensor(int(start[-1]) + 1, heads, self.head_dim, grad=True)
            for start, heads in ((starts[0], self.heads_q), (starts[1], self.heads_kv), (starts[1], self.heads_kv))
        )
        options = self.options | {"deterministic": self.deterministic}
        self.backward(*attention_varlen(q, k, v, self.rotary(), *starts, 1100, 1100, **options))

    def cached(self):
        """Calls attention_with_cache on views, and a step of a cache on aligned tensors."""
        page_size, rotary = self.choice((0, 0, 16, 64, 256)), self.rotary()
        rows, table = (self.batch, 2048), None
        if page_size:
            rows, table = (self.batch * 8, page_size), torch.zeros(self.batch, 8, dtype=torch.int32)
        seqlens = torch.zeros(self.batch, dtype=torch.int32)
        q, k, v = (
            self.tensor(self.batch, seqlen, heads, self.head_dim)
            for seqlen in (self.choice((1, 2, 17, 64, 65, 500)),)
            for heads in (self.heads_q, self.heads_kv, self.heads_kv)
        )
        k_cache, v_cache = (self.tensor(*rows, self.heads_kv, self.head_dim) for _ in range(2))
        cached_call(
            q,
            k_cache,
            v_cache,
            rotary,
            seqlens,
            k=k,
            v=v,
            block_table=table,
            cache_leftpad=self.choice((None, seqlens)),
            num_splits=self.choice((None, None, 1, 2, 256)),
            **self.options,
        )
        starts = torch.arange(self.batch + 1, dtype=torch.int32) * q.shape[1]
        cached_call(
            *(q.flatten(0, 1), k_cache, v_cache, rotary, starts, seqlens, q.shape[1]),
            k=k.flatten(0, 1),
            v=v.flatten(0, 1),
            block_table=table,
            slot_mapping=self.choice(
                (None, torch.zeros(q.shape[0] * q.shape[1], dtype=self.choice((torch.int32, torch.int64))))
            ),
            cache_leftpad=self.choice((None, seqlens)),
            num_splits=self.choice((None, None, 1, 2, 256)),
            **self.options,
        )
        if page_size:
            cache = PagedKVCache(self.batch * 40, 16, *k.shape[2:], self.dtype)
            cache.attend([cache.allocate() for _ in range(self.batch)], q.contiguous(), rotary, k, v, **self.options)
        else:
            KVCache(self.batch, 512, *k.shape[2:], self.dtype).attend(q.contiguous(), rotary, k, v, **self.options)
        if not have_maps(rotary.bands):
            slots, at = torch.zeros(k_cache.shape[:2]), torch.zeros(q.shape[:2], dtype=torch.int32)
            placed = dict(slot_positions=self.choice((None, slots)), page_positions=self.choice((None, table)))
            given = (None, at, at.long()) if placed["slot_positions"] is None else (at, at.long(), at.float())
            placed["positions"] = self.choice(given)
            cached_call(q, k_cache, v_cache, rotary, seqlens, k=k, v=v, block_table=table, **placed, **self.options)
        if shared_map(rotary.bands):
            rotated = {**self.options, "rotated_keys": True}
            cached_call(q, k_cache, v_cache, rotary, seqlens, k=k, v=v, block_table=table, **rotated)
            packed = {"k": k.flatten(0, 1), "v": v.flatten(0, 1)}
            lengths = (starts, seqlens, q.shape[1])
            cached_call(
                q.flatten(0, 1),
                k_cache,
                v_cache,
                rotary,
                *lengths,
                **packed,
                block_table=table,
                cache_leftpad=seqlens,
                **rotated,
            )
            for positions in (None, torch.rand(q.shape[:2])):
                rotate(q, rotary, positions, impl="triton")


def compiling_environment() -> dict[str, str]:
    """Returns the environment of a process in which Triton compiles."""
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}


def launched(arch: int | str, seeds, *head_dims, compiling=True) -> dict[str, int]:
    """Makes these calls in a separate process in which Triton compiles. Returns {kernel: number of launches}.
    compiling=False: only launches that bypassed Triton's specialisation count, and each is checked to use the kernel
    that Triton would have chosen."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps([arch, list(seeds), head_dims, compiling])],
        capture_output=True,
        text=True,
        env=compiling_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU launches the kernels themselves, in the other tests"
)


@pytest.mark.slow  # CI runs such launches in tests/executor/test_cases.py, compiled for sm_80
@without_gpu
def test_launches():
    assert launched(90, (58, 8, 3), 16).keys() - PLACED == KERNELS  # seed 58 draws one head, seed 3 deterministic=False


@pytest.mark.slow
@without_gpu
def test_launches_on_amd():
    assert launched("gfx942", (58, 8, 3), 16).keys() - PLACED == KERNELS


@without_gpu
def test_launches_reach_the_kernel_that_triton_would_pick():
    again = launched(90, range(300), 16, 64, compiling=False)
    assert again.keys() == KERNELS | SHARES | PLACED and min(again.values()) > 1, again


def test_a_grid_that_triton_would_skip(monkeypatch):
    monkeypatch.setattr(launcher, "interpreted", lambda: False)
    kernel = SimpleNamespace(__name__="attention_grad_kv")
    with pytest.raises(
        ValueError, match=r"attention_grad_kv: expected fewer than 2\^31 programs, got .*\(65536, 32768"
    ):
        launcher.launch(kernel, (65536, 32768))


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "warps", "wants"),
    [
        (80, 128, 49152, 4, True),  # three blocks
        (80, 255, 49153, 4, False),  # Triton asks for it
        (80, 255, 49152, 8, False),  # the registers suffice for one block
        (80, 255, 24577, 4, True),  # two blocks
        (80, 255, 24576, 4, False),  # two blocks need 48 KB
        (80, 32, 0, 4, False),
        (86, 128, 49152, 4, True),
    ],
)
def test_which_kernels_want_shared_memory(capability, registers, shared, warps, wants):
    assert carveout.wants_shared_memory(capability, registers, shared, warps) == wants


def test_the_driver_is_asked_for_shared_memory(monkeypatch):
    """Only a CUDA driver gets a call. The driver of another module is a stand-in, which loads no kernels."""
    asked = []
    monkeypatch.setattr(carveout, "_driver", lambda: SimpleNamespace(cuFuncSetAttribute=lambda *a: asked.append(a)))
    compiled = SimpleNamespace(function=1234, n_regs=128)
    compiled.metadata = SimpleNamespace(target=SimpleNamespace(arch=80), shared=40960, num_warps=4)
    for module, expected in (("bench.machine_code.offline", []), ("triton.backends.nvidia.driver", [(1234, 9, 100)])):
        driver = type("Driver", (), {"__module__": module})()
        monkeypatch.setattr(carveout.triton.runtime.driver, "_active", driver)
        carveout.prefer_shared_memory(compiled)
        assert asked == expected


@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs a GPU of NVIDIA")
def test_the_driver_remembers_what_kernels_want():
    """After a call, every kernel that wants shared memory has the attribute."""
    x = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    attention(x, x, x, Rotary.rope(64), impl="triton")
    value, found = ctypes.c_int(), 0
    for compiled, _ in launcher._compiled.values():
        metadata = compiled.metadata
        shape = (metadata.target.arch, compiled.n_regs, metadata.shared, metadata.num_warps)
        if carveout.wants_shared_memory(*shape):
            handle = ctypes.c_void_p(compiled.function)
            assert carveout._driver().cuFuncGetAttribute(ctypes.byref(value), 9, handle) == 0 and value.value == 100
            found += 1
    assert found


@pytest.mark.slow
@without_gpu
def test_host_work_of_a_call():
    """Until the kernels of a call are queued, Python calls at most about a tenth more functions than when the limit was
    set."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "host", "--blocks", "2", "--calls", "1"],
        capture_output=True,
        text=True,
        env=compiling_environment(),
        check=True,
    )
    found = {line[:42].rstrip(): tuple(map(int, line[42:].split()[:2])) for line in done.stdout.splitlines()[3:]}
    allowed = {
        "attention, HoPE, 512 tokens": (2, 230),
        "the same and its backward": (6, 720),
        "attention_with_cache, ReRoPE, one token": (3, 300),
        "KVCache.attend": (3, 350),
        "PagedKVCache.attend": (3, 420),
        "KVCache.step, one layer": (3, 150),
        "PagedKVCache.step, one layer": (3, 150),
    }
    assert found.keys() == allowed.keys()
    for name, (launches, functions) in allowed.items():
        assert found[name][0] == launches and found[name][1] <= functions, (name, found[name])


RESIDENT = """
import json, torch
from bench.machine_code import offline
from flashrope import Rotary, attention_with_cache
from flashrope.backends import triton as backend
from flashrope.backends.triton import cached

class Device(offline.AbsentDevice):
    def load_binary(self, *args):
        module, function, _, *rest = super().load_binary(*args)
        return module, function, self.registers, *rest

device, asked, choose_splits = Device(80, lambda *_: lambda *_: None), [], cached.choose_splits
backend.unsupported_reason = lambda q, cached=False: ""
cached.choose_splits = lambda *args: asked.append(args) or choose_splits(*args)
with offline.active(80, device):
    for head_dim, device.registers in ((256, 255), (128, 64)):  # limited by registers, by shared memory
        q, k = (torch.zeros(1, n, 32, head_dim, dtype=torch.bfloat16) for n in (1, 65536))
        for rotary in (Rotary.rope(head_dim), Rotary.rope(head_dim).local(1000)):
            attention_with_cache(q, k, k, rotary, torch.ones(1, dtype=torch.int32), impl="triton")
print(json.dumps(asked))
"""


@pytest.mark.slow
@without_gpu
def test_splits_follow_what_the_compiled_kernel_occupies():
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, env=compiling_environment(), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    programs, keys, keys_of_window = 32, 65536, 1024
    assert json.loads(done.stdout) == [
        [programs, count // block_n, blocks * 108]
        for block_n, blocks in ((32, 1), (64, 2))
        for count in (keys, keys_of_window)
    ]


@pytest.mark.slow
@without_gpu
@pytest.mark.parametrize("arch", architectures.ALL)
def test_many_launches(arch):
    assert launched(arch, (*range(100, 112), 131), 8, 16, 24, 40, 64, 72, 96, 128, 160, 192, 256).keys() == KERNELS


if __name__ == "__main__":
    arch, seeds, head_dims, compiling = json.loads(sys.argv[1])
    names, launch = collections.Counter(), launcher.launch

    def watched(kernel, grid, *args, **options):
        known = len(launcher._compiled)
        launch(kernel, grid, *args, **options)
        if compiling:
            names[kernel.__name__] += 1
        elif known == len(launcher._compiled):
            kernel[grid](*args, **options)
            assert Uncompiled.ran[-2] is Uncompiled.ran[-1], f"{kernel.__name__}: {args}, {options}"
            names[kernel.__name__] += 1

    if not compiling:
        triton.compiler.compile = Uncompiled
    backend.unsupported_reason = lambda q, cached=False: ""
    launcher.launch = watched
    triton.runtime.driver.set_active(offline.AbsentDevice(arch, Launcher))
    for seed in seeds:
        Calls(seed, head_dims)
    print(json.dumps(names))


@without_gpu
def test_a_number_of_blocks_that_is_not_known_is_not_remembered(monkeypatch):
    """If a hook of Triton compiled nothing, the number of blocks is asked for again at the next call."""
    from flashrope.backends.triton import cached

    asked: list[int] = []
    monkeypatch.setattr(cached, "_resident", {})
    monkeypatch.setattr(launcher, "resident_blocks", lambda *args, **options: asked.append(1))
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 64, 1, 16)
    for _ in range(2):
        attention_with_cache(
            q, cache, cache.clone(), Rotary.rope(16), torch.tensor([40], dtype=torch.int32), impl="triton"
        )
    assert len(asked) == 2 and not cached._resident
