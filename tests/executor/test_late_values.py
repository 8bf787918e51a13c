"""Executes the forward that adds values one tile late (``Tile.lagged``), at lengths with several inner tiles."""

import pytest
import support
import torch
from caching import Cached
from flashrope import attention, attention_varlen
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile
from packing import cu_seqlens
from support import SCHEMES

BF16, FP16 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16))
SMALL = Tile(64, 64, 4, 3, lagged=True)
# name: (target, scheme, head_dim, seqlen_q, seqlen_k, options of the problem)
CASES = {
    "rope-d128": (BF16, "rope", 128, 400, None, {}),
    "hope-gqa-d128": (BF16, "hope_zeros", 128, 200, 420, {"heads": 2, "group": 2}),
    "rerope-d128": (BF16, "rerope", 128, 400, None, {}),
    "leaky-d128-fp16": (FP16, "leaky", 128, 150, 400, {}),
    "log-n-d64": (BF16, "log_n_clipped", 64, 350, None, {}),
    "local-d64": (BF16, "local", 64, 350, None, {}),
    "not-causal-d128": (BF16, "rope", 128, 200, 300, {"causal": False}),
    "rerope-not-causal-d64": (BF16, "rerope", 64, 200, None, {"causal": False}),
    "interleaved-d72": (BF16, "rope_interleaved", 72, 300, None, {}),
    "no-inner-tile-d64": (BF16, "rope", 64, 40, None, {}),
}


def check(p: support.Problem, target: support.Target) -> None:
    with torch.no_grad():
        out, lse = attention(p.q, p.k, p.v, p.rotary, causal=p.causal, return_lse=True, impl="triton")
    support.check_budget({"out": out, "lse": lse}, p, target.dtype)


def problem(name: str) -> tuple[support.Problem, support.Target]:
    target, scheme, head_dim, seqlen_q, seqlen_k, options = CASES[name]
    options = {"heads": 1, "group": 1, "seed": 3, **options}
    return support.problem(target, SCHEMES[scheme](head_dim), seqlen_q, seqlen_k, **options), target


@pytest.mark.parametrize("name", CASES)
def test_schemes(machine, name):
    with tiles.forced("forward", SMALL):
        check(*problem(name))


def test_unaligned(machine):
    p, target = problem("rope-d128")
    with tiles.forced("forward unaligned", SMALL):
        room = [torch.nn.functional.pad(x, (3, 0))[..., 3:] for x in (p.q, p.k, p.v)]
        check(p.replace(q=room[0], k=room[1], v=room[2]), target)


def test_packed(machine):
    rotary, lengths = SCHEMES["rerope"](64), (150, 1, 210)
    p = support.problem(BF16, rotary, sum(lengths), heads=1, group=1)
    starts = cu_seqlens(lengths, "cpu")
    with tiles.forced("forward", SMALL), torch.no_grad():
        arguments = p.q[0], p.k[0], p.v[0], rotary, starts, starts, max(lengths), max(lengths)
        out, lse = attention_varlen(*arguments, return_lse=True, impl="triton")
    for first, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        own = p.replace(**{x: getattr(p, x)[:, first:end] for x in ("q", "k", "v", "grad_out")})
        own = own.replace(grad_lse=torch.zeros(1, 1, end - first))
        support.check_budget({"out": out[None, first:end], "lse": lse[None, :, first:end]}, own, torch.bfloat16)


def test_chunks_over_a_contiguous_cache(machine):
    with tiles.forced("forward", SMALL):
        Cached(BF16, SCHEMES["rerope"](64), (300, 150), 100, heads=(1, 1)).check(validate=False)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_loop_of_the_table(machine, arch, head_dim):
    """The table chooses this loop for sm_90 and one band, at 128 channels beyond 8,192 keys."""
    tile = configs.tile("forward", arch, head_dim, 2, 1)
    assert tile.lagged == (arch == 90)
    p = support.problem(BF16, SCHEMES["hope_zeros"](head_dim), 600, heads=1, group=1)
    with tiles.forced("forward", tile):
        check(p, BF16)
