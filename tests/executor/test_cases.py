"""Runs the compiled kernels on the executor, against the same error budget as every other backend."""

import dataclasses
import pathlib
import random
import re

import pytest
import support
import test_mrope
import test_varlen
import torch
import triton
import triton.language as tl
from caching import PAGE, Cached
from flashrope import Rotary, attention
from flashrope.backends.registry import load_backend
from flashrope.backends.triton import launcher
from flashrope.calls.records import AttentionCall
from flashrope.triton_kernels import configs
from support import SCHEMES

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
TEXT = pathlib.Path(__file__).parent / "machine" / "README.md"
SCALES = {
    "steps": lambda head_dim: Rotary.hope(head_dim, 60).rectify(21, 4.0).log_steps(7, 0.5),
    "length": lambda head_dim: dataclasses.replace(SCALES["steps"](head_dim), length_scale=30.0),
    "rotated": lambda head_dim: Rotary.rope(head_dim, rotary_dim=head_dim // 2).scale_rotated(1.4).rectify(21),
}
ROPE, LATENT = Rotary.rope(64), Rotary.rope(192, rotary_dim=64)
DEEPSEEK, DEEPSEEK_V2 = (Rotary.rope(192, rotary_dim=64, interleaved=x, first_channel=128) for x in (False, True))
quick, slow = pytest.mark.quick, pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:deterministic:UserWarning")


@dataclasses.dataclass
class Dense:
    """One call of attention and its backward."""

    target: support.Target
    rotary: Rotary
    seqlen_q: int
    seqlen_k: int | None = None
    options: dict = dataclasses.field(default_factory=dict)


def odd(x: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers at addresses that are only multiples of 2 bytes."""
    room = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    room[..., 3:] = x
    return room[..., 3:]


ATTENTION = {
    "rerope-d64-bf16": (Dense(BF16, SCHEMES["rerope"](64), 150), quick),
    "yarn-leaky-local-log-n-d16-fp16": (Dense(FP16, SCHEMES["yarn_leaky_local_log_n"](16), 100), ()),
    "hope-interleaved-d128-bf16": (Dense(BF16, SCHEMES["hope_paper"](128), 140), ()),
    "leaky-d40-bf16": (Dense(BF16, SCHEMES["leaky"](40), 130), ()),
    "partial-d72-fp16": (Dense(FP16, SCHEMES["rope_partial"](72), 90), ()),
    "local-d160-bf16": (Dense(BF16, SCHEMES["local"](160), 100), slow),
    "rope-d256-bf16": (Dense(BF16, SCHEMES["rope"](256), 80), ()),
    "rerope-d256-fp16": (Dense(FP16, SCHEMES["rerope"](256), 80), slow),
    "compact-d96-fp16": (Dense(FP16, SCHEMES["hope_compact"](96), 80), slow),
    "rope-interleaved-d32-fp32": (Dense(FP32, SCHEMES["rope_interleaved"](32), 70), ()),
    "rerope-d16-fp32": (Dense(FP32, SCHEMES["rerope"](16), 70), slow),
    "two-sided-d64-bf16": (Dense(BF16, SCHEMES["hope_rerope_log_n"](64), 70, 130, {"causal": False}), ()),
    "more-queries-than-keys-d64-bf16": (Dense(BF16, SCHEMES["inverse_leaky"](64), 130, 40, {"batch": 2}), slow),
    "one-key-d64-bf16": (Dense(BF16, SCHEMES["rerope"](64), 1, 1), ()),
    "none-d64-fp16": (Dense(FP16, SCHEMES["none"](64), 90, None, {"heads": 6, "group": 3}), slow),
    "window-of-a-buffer-d64-bf16": (Dense(BF16, SCHEMES["rerope"](64), 100, None, {"layout": "poisoned"}), ()),
    "atomic-leaky-d40-bf16": (
        Dense(BF16, SCHEMES["leaky"](40), 130, None, {"causal": False, "deterministic": False}),
        (),
    ),
    "atomic-rerope-d128-fp16": (Dense(FP16, SCHEMES["rerope"](128), 150, 170, {"deterministic": False}), ()),
    "atomic-rope-d256-bf16": (Dense(BF16, SCHEMES["rope"](256), 80, None, {"deterministic": False}), slow),
    "atomic-rerope-d16-fp32": (Dense(FP32, SCHEMES["rerope"](16), 70, None, {"deterministic": False}), slow),
    "latent-d192-v128-bf16": (Dense(BF16, LATENT, 140, 170, {"head_dim_v": 128}), ()),
    "atomic-latent-d192-v128-bf16": (
        Dense(BF16, LATENT, 100, None, {"head_dim_v": 128, "deterministic": False}),
        slow,
    ),
    "deepseek-v3-d192-v128-bf16": (Dense(BF16, DEEPSEEK, 140, 170, {"head_dim_v": 128}), ()),
    "deepseek-v2-rerope-d192-v128-bf16": (Dense(BF16, DEEPSEEK_V2.rectify(21), 130, None, {"head_dim_v": 128}), slow),
    "atomic-deepseek-v3-d192-v128-bf16": (
        Dense(BF16, DEEPSEEK, 100, None, {"head_dim_v": 128, "deterministic": False}),
        slow,
    ),
    "glm-flash-d256-bf16": (Dense(BF16, Rotary.rope(256, rotary_dim=64, first_channel=192), 90), slow),
    "rerope-d64-v40-fp16": (Dense(FP16, SCHEMES["rerope"](64), 100, None, {"head_dim_v": 40, "batch": 2}), ()),
    "leaky-d80-v256-bf16": (Dense(BF16, SCHEMES["leaky"](80), 90, None, {"head_dim_v": 256, "causal": False}), slow),
    "self-extend-d64-bf16": (Dense(BF16, ROPE.self_extend(48, 8), 150), slow),
    "self-extend-d128-fp16": (Dense(FP16, Rotary.rope(128).self_extend(45, 9), 70, 170), slow),
    "dual-chunk-d64-bf16": (Dense(BF16, ROPE.dual_chunk(160, 32), 60, 290), ()),
    "dual-chunk-log-n-d128-fp16": (Dense(FP16, Rotary.rope(128).dual_chunk(128, 0).log_n(20), 270), slow),
    "atomic-dual-chunk-d64-bf16": (Dense(BF16, ROPE.dual_chunk(160, 32), 270, None, {"deterministic": False}), slow),
    "log-steps-leaky-d64-bf16": (Dense(BF16, SCHEMES["leaky"](64).log_steps(7, 0.5), 100, 130), ()),
    "length-scale-log-steps-leaky-d64-bf16": (Dense(BF16, SCALES["length"](64), 90, 130), ()),
    "atomic-length-scale-d40-fp32": (Dense(FP32, SCALES["length"](40), 60, 90, {"deterministic": False}), ()),
    "rotated-factor-partial-rerope-d64-fp16": (Dense(FP16, SCALES["rotated"](64), 130), ()),
    "log-steps-rotated-factor-two-sided-d40-bf16": (
        Dense(BF16, SCALES["rotated"](40).log_steps(9, first=0), 90, 70, {"causal": False, "deterministic": False}),
        slow,
    ),
    "heads-first-d64-bf16": (Dense(BF16, SCHEMES["leaky"](64), 100, None, {"layout": "transposed"}), slow),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=marks) for name, (case, marks) in ATTENTION.items()]
)
def test_attention(machine, case):
    p = support.problem(case.target, case.rotary, case.seqlen_q, case.seqlen_k, seed=1, **case.options)
    support.check(case.target, p)
    last = "attention_grad_q" if p.deterministic else "attention_finish_grad_q"
    assert machine.launches[-1].kernel == last


@pytest.mark.parametrize("target", [BF16, FP16], ids=str)
def test_unaligned(machine, target):
    p = support.problem(target, SCHEMES["leaky"](40), 100, seed=2)
    support.check(target, p.replace(**{name: odd(getattr(p, name)) for name in ("q", "k", "v", "grad_out")}))
    forward = machine.launches[1]
    assert not forward.warps("cp.async.cg")
    tile = configs.tile("forward unaligned", machine.arch, 64, 2, 1)
    assert forward.grid == (-(-100 // tile.block_m) * p.q.shape[0] * p.q.shape[2], 1, 1)


@quick
def test_the_short_cut_launches_what_triton_does(machine, monkeypatch):
    """A repeated call skips Triton's inspection of the arguments, launches the same kernels and gives the same
    results."""
    p = support.problem(BF16, SCHEMES["rerope"](64), 150, seed=3)
    monkeypatch.setattr(launcher, "_compiled", {})
    results, launches = [], []
    for _ in range(2):
        machine.launches.clear()
        results.append(support.run(p, "triton"))
        launches.append([(x.kernel, x.grid, x.shared_bytes, x.opcodes) for x in machine.launches])
        assert len(launcher._compiled) == len(launches[0]) - 1 == 5  # rotate_rows runs for keys and for queries
    assert launches[0] == launches[1]
    assert all(torch.equal(results[0][name], results[1][name]) for name in support.NAMES)


@pytest.mark.parametrize("kind", ["fractions", "axial"])
def test_positions(kind):
    given, rotary = torch.rand(2, 90, generator=torch.Generator().manual_seed(10)) * 90 - 5, Rotary.rope(64).log_n(20)
    if kind == "axial":
        given = torch.stack((torch.arange(90) // 8, torch.arange(90) % 8), -1).expand(2, 90, 2)
        rotary = Rotary.axial(64)
    options = {"batch": 2, "positions": given, "causal": kind != "axial"}
    support.check(BF16, support.problem(BF16, rotary, 90, seed=11, **options))


@pytest.mark.parametrize("scheme", ["hope_rerope_log_n", pytest.param("hope_zeros", marks=slow)])
def test_packed(scheme):
    test_varlen.test_packed_is_a_loop_over_sequences(BF16, scheme, test_varlen.LENGTHS["different"], True)


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=slow)])
def test_packed_positions(deterministic):
    test_mrope.test_packed(BF16, "sections", deterministic)


@triton.jit
def product(a, b, c, n):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None]
    total = tl.zeros((64, 64), tl.float32)
    for _ in range(n):
        total = tl.dot(tl.load(a + at), tl.load(b + at), total)
        a += 64 * 64
        b += 64 * 64
    tl.store(c + at, total)


def test_triton_fences_no_cp_async_before_wgmma(machine, arch):
    """Triton puts no fence between cp.async and wgmma. If this test fails, Triton has changed, and the executor can
    require the fence."""
    if arch != 90:
        pytest.skip("sm_90")
    a, b = (torch.randn(3, 64, 64).bfloat16() for _ in range(2))
    c = torch.empty(64, 64)
    product[(1,)](a, b, c, 3, num_stages=2)
    torch.testing.assert_close(c, (a.float() @ b.float()).sum(0), rtol=1e-4, atol=1e-3)
    ptx = machine.modules[machine.launches[-1].function][1]
    assert "cp.async.cg" in ptx and "wgmma.mma_async" in ptx and "fence.proxy.async" not in ptx


def test_the_code_of_its_page_runs(arch, capsys):
    """The code of machine/README.md runs. The tests of the other pages leave this page out."""
    (block,) = re.findall(r"^```py\n(.*?)^```", TEXT.read_text(), re.DOTALL | re.MULTILINE)
    tiles = dict(zip("abc", torch.randn(3, 1, 64, 64).bfloat16(), strict=True), n=1)
    exec(block.replace("arch=90", f"arch={arch}"), {"kernel": product, "grid": (1,), **tiles})
    assert "product" in capsys.readouterr().out


# ---- decoding

LONG = (300, 1, 87)
DECODING = {  # (target, scheme, head_dim, mark), options
    "contiguous-d64-bf16": ((BF16, "rerope", 64, quick), {}),
    "paged-leftpad-d64-bf16": ((BF16, "rerope", 64, ()), dict(page=PAGE, leftpad=(3, 0, 40))),
    "splits-d128-fp16": ((FP16, "leaky", 128, ()), dict(num_splits=3, leftpad=(3, 0, 0))),
    "paged-splits-d128-bf16": ((BF16, "rope_interleaved", 128, ()), dict(page=PAGE, num_splits=2)),
    "several-tokens-d40-bf16": ((BF16, "hope_rerope_log_n", 40, ()), dict(seqlen_q=3)),
    "local-d256-bf16": ((BF16, "local", 256, slow), dict(page=PAGE)),
    "rope-d16-fp32": ((FP32, "rope", 16, ()), dict(num_splits=2)),
    "prefill-d64-bf16": ((BF16, "rerope", 64, ()), dict(seqlen_q=70)),
    "prefill-paged-leftpad-d64-bf16": ((BF16, "yarn_leaky_local_log_n", 64, ()),
                                       dict(seqlen_q=70, page=PAGE, leftpad=(3, 0, 5))),
    "prefill-paged-rope-d128-bf16": ((BF16, "rope", 128, ()), dict(seqlen_q=70, page=PAGE)),
    "self-extend-paged-leftpad-d64-bf16": ((BF16, "self_extend", 64, ()),
                                           dict(page=PAGE, leftpad=(3, 0, 40), lengths=LONG)),
    "self-extend-odd-d64-bf16": ((BF16, "self_extend_odd", 64, ()), dict(lengths=LONG)),
    "dual-chunk-splits-d128-fp16": ((FP16, "dual_chunk", 128, ()),
                                    dict(page=PAGE, num_splits=2, lengths=(420, 1, 200))),
    "dual-chunk-wide-d64-bf16": ((BF16, "dual_chunk", 64, ()), dict(seqlen_q=20, lengths=(300, 20, 150))),
    "log-steps-splits-d64-bf16": ((BF16, "steps", 64, ()), dict(num_splits=2, leftpad=(3, 0, 5))),
    "length-scale-d64-bf16": ((BF16, "length", 64, ()), {}),
    "length-scale-paged-leftpad-splits-d40-fp32": ((FP32, "length", 40, ()),
                                                   dict(page=PAGE, leftpad=(3, 0, 40), num_splits=2)),
    "rotated-factor-paged-d64-fp16": ((FP16, "rotated", 64, ()), dict(page=PAGE)),
    "prefill-paged-d128-fp16": ((FP16, "leaky", 128, slow), dict(seqlen_q=70, page=PAGE)),
    "prefill-paged-d256-bf16": ((BF16, "leaky", 256, slow), dict(seqlen_q=70, page=PAGE)),
}  # fmt: skip


MAPS = {
    "self_extend": lambda head_dim: Rotary.rope(head_dim).self_extend(48, 8),
    "self_extend_odd": lambda head_dim: Rotary.rope(head_dim).self_extend(45, 9),
    "dual_chunk": lambda head_dim: Rotary.rope(head_dim).dual_chunk(160, 32),
}


def decode(target, scheme, head_dim, seqlen_q=1, num_splits=None, lengths=None, **options):
    lengths, rotary = lengths or (145, seqlen_q, 87), {**SCHEMES, **SCALES, **MAPS}[scheme](head_dim)
    options["capacity"] = -(-max(192, *lengths) // 64) * 64
    Cached(target, rotary, lengths, seqlen_q, **options).check(num_splits=num_splits)


@pytest.mark.parametrize("name", [pytest.param(name, marks=case[3]) for name, (case, _) in DECODING.items()])
def test_decoding(machine, name):
    (target, scheme, head_dim, _), case = DECODING[name]
    decode(target, scheme, head_dim, **case)
    kernels = {launch.kernel for launch in machine.launches}
    assert "append_rows" in kernels
    assert ("attention_chunks" if case.get("seqlen_q", 1) > 64 else "attention_decode") in kernels
    assert ("combine_splits" in kernels) == ("num_splits" in case)


@pytest.mark.parametrize("scheme", MAPS)
def test_keys_are_requested_ahead_where_maps_align(machine, scheme):
    """Keys are requested ahead only if a tile of 64 keys holds whole groups. Groups of 8 fit and groups of 9 do not."""
    decode(BF16, scheme, 64, page=PAGE, lengths=(300, 1, 87))
    (step,) = (launch for launch in machine.launches if launch.kernel == "attention_decode")
    assert bool(step.warps("cp.async.cg")) == (scheme != "self_extend_odd")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(target=BF16, head_dim=64, mapped=False), id="d64-bf16"),
        pytest.param(dict(target=FP16, head_dim=128, mapped=True), id="mapped-d128-fp16"),
    ],
)
@pytest.mark.parametrize("num_splits", [None, 2])
def test_mixed_batch(machine, case, num_splits):
    """Steps, drafts, chunks and prompts in one call give the right results."""
    target, head_dim, mapped = case.values()
    rotary, pads = SCHEMES["hope_rerope_log_n"](head_dim), (3, 0, 0, 2, 0)
    sizes = ((1, 45), (70, 70), (5, 5), (0, 9), (66, 112))
    options = dict(heads=(2, 1), leftpad=pads, page=PAGE, mapped=mapped)
    Cached.packed(target, rotary, sizes, **options).check(num_splits=num_splits)
    kernels = {launch.kernel for launch in machine.launches}
    assert {"append_rows", "attention_decode"} <= kernels
    assert ("attention_chunks" in kernels) == (num_splits is None)
    assert ("combine_splits" in kernels) == (num_splits == 2)


def test_one_key_with_an_odd_row_stride():
    """A cache with one key and an odd row stride works. The copy of the tile's other rows is masked off, but their
    addresses are still computed."""
    q, k, v = (
        torch.randn(1, 1, 1, 65, generator=torch.Generator().manual_seed(n)).bfloat16()[..., :64] for n in range(3)
    )
    out = attention(q, k, v, SCHEMES["rerope"](64), impl="triton")
    assert torch.equal(out, v)


@slow
@pytest.mark.parametrize("seed", range(30))
def test_random(seed):
    """Random shapes, schemes, strides and layouts give the right results."""
    choose = random.Random(seed)
    target = choose.choice((BF16, FP16, BF16, FP16, FP32))
    head_dim = choose.choice((16, 24, 40, 64, 72, 128) if target is not FP32 else (16, 40))
    group = choose.choice((1, 2, 3))
    lengths = [choose.choice((1, 2, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 150)) for _ in range(2)]
    options = {"causal": choose.random() < 0.7, "batch": choose.choice((1, 2)), "heads": group, "group": group}
    options["deterministic"] = seed % 2 == 0
    p = support.problem(target, SCHEMES[choose.choice(list(SCHEMES))](head_dim), *lengths, seed=seed, **options)
    layouts = {
        name: choose.choice(("contiguous", "transposed", "odd", "padded")) for name in ("q", "k", "v", "grad_out")
    }
    support.check(target, p.replace(**{name: laid_out(getattr(p, name), how) for name, how in layouts.items()}))


@slow
@pytest.mark.parametrize("seed", range(12))
def test_random_maps(seed):
    """Random windows, groups and chunks give the right results, for lengths around their edges."""
    choose = random.Random(100 + seed)
    rope, group = Rotary.rope(choose.choice((16, 40, 64)), interleaved=choose.random() < 0.3), choose.randint(2, 12)
    rope = choose.choice((rope, rope.log_n(20), rope.yarn(4.0, train_length=64)))
    chunk, local = choose.choice((128, 256)), choose.randint(0, 200)
    window = group * choose.randint(0, 9)
    rotary = rope.dual_chunk(chunk + local, local) if seed % 2 else rope.self_extend(window, group)
    edge = chunk if seed % 2 else max(window, 1)
    lengths = [max(choose.choice((1, 2, 3)) * edge + choose.randint(-2, 2), 1) for _ in range(2)]
    options = {"batch": choose.choice((1, 2)), "deterministic": choose.random() < 0.6}
    support.check(BF16, support.problem(BF16, rotary, min(lengths), max(lengths), seed=seed, **options))
    if seed < 4:
        support.check(BF16, support.problem(BF16, rotary, max(lengths), min(lengths), seed=seed, **options))


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """Returns the same numbers in another layout. "padded" has another stride in every dimension, also in dimensions of
    size 1."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "odd":
        return odd(x)
    if how == "padded":
        room = x.new_full(tuple(n + 1 for n in x.shape[:-1]) + (x.shape[-1] + 8,), torch.nan)
        view = room[tuple(slice(0, n) for n in x.shape)]
        return view.copy_(x)
    return x


@pytest.mark.parametrize(
    "head_dim, deterministic", [pytest.param(64, False, marks=quick), (128, False), (64, True), (128, True)]
)
def test_whole_keys(head_dim, deterministic):
    """HoPE keeps rotated keys with all channels where the backward may be another backend's. Results are those of
    keys with only the rotating channels, within the budget."""
    p = support.problem(BF16, Rotary.hope(head_dim, 60), 140, heads=2, group=2, seed=21)
    lengths = {"max_seqlen_q": 140, "max_seqlen_k": 140, "deterministic": deterministic}
    call = AttentionCall(p.rotary, True, head_dim**-0.5, whole_keys=True, **lengths)
    backend = load_backend("triton")
    out, lse, kept = backend.forward(p.q, p.k, p.v, call)
    assert kept.rotated_k.shape == (1, p.k.shape[0] * 140, p.k.shape[2], head_dim)
    assert backend.forward(p.q, p.k, p.v, call._replace(whole_keys=False))[2].rotated_k.shape[-1] < head_dim
    grads = backend.backward(p.grad_out, p.grad_lse, p.q, p.k, p.v, out, lse, kept, call)
    support.check_budget(dict(zip(support.NAMES, (out, lse, *grads), strict=True)), p, BF16.dtype)
