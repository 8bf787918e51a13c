"""Tests forward and gradients of five products with the default tiles and with ``CONTENDERS``, at lengths with several
inner tiles. The results of several schemes and masks must be within the error budget."""

import contextlib

import pytest
import support
import torch
from flashrope import Rotary, attention
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.lab.tuning.candidates import CONTENDERS
from flashrope.triton_kernels import configs
from packing import packing
from support import SCHEMES

BF16 = support.Target("triton", torch.bfloat16, "cpu")
ONE, GROUPED = {"heads": 1, "group": 1}, {"heads": 2, "group": 2}
slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:deterministic:UserWarning")

GRADIENTS = {  # rotary, seqlen_q, seqlen_k, options
    "rope-d128": (Rotary.rope(128), 330, None, ONE),
    "rerope-d128": (Rotary.rope(128).rectify(90), 330, None, GROUPED),
    "hope-d72": (Rotary.hope(72, 100), 200, 330, ONE),
    "leaky-d128": (SCHEMES["leaky"](128), 330, 200, ONE),
    "local-d128": (Rotary.rope(128).local(150), 330, None, GROUPED),
    "rerope-d72-two-sided": (Rotary.rope(72).rectify(90), 260, 330, ONE | {"causal": False}),
    "rope-d128-two-sided": (Rotary.rope(128), 330, 140, ONE | {"causal": False}),
}


def tiles_of(arch: int, bands: int) -> list[configs.Tile]:
    """Returns the tile of dK, dV and dQ at 128 channels, and the tiles that contend with it."""
    others = CONTENDERS.get((configs.family(arch), "grad_qkv", 128, bands > 1), ())
    return [configs.tile("grad_qkv", arch, 128, 2, bands), *others]


def check_step(machine, tile: configs.Tile, blocks: int) -> None:
    [step] = [launch for launch in machine.launches if launch.kernel == "attention_grad_kv"]
    assert step.grid == (blocks, 1, 1) and step.threads == 32 * tile.num_warps
    assert step.warps("red.global.add") and not step.warps("atom")


SLOWEST = ("rerope-d72-two-sided", "hope-d72")  # they compile kernels that no other case needs


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name in SLOWEST else ()) for name in GRADIENTS])
def test_gradients_of_five_products(machine, arch, name):
    rotary, seqlen_q, seqlen_k, options = GRADIENTS[name]
    p = support.problem(BF16, rotary, seqlen_q, seqlen_k, seed=4, deterministic=False, **options)
    for tile in tiles_of(arch, len(rotary.bands_for(p.causal))):
        machine.launches.clear()
        with tiles.forced("grad_qkv", tile):
            support.check(BF16, p)
        check_step(machine, tile, -(-p.k.shape[1] // tile.block_n) * p.k.shape[2])


FORWARDS = {  # rotary, seqlen_q, seqlen_k, causal
    "rope-d128": (Rotary.rope(128), 600, 600, True),
    "hope-d72": (Rotary.hope(72, 100), 200, 450, True),
    "local-d128": (Rotary.rope(128).local(250), 450, 450, True),
    "rope-d128-two-sided": (Rotary.rope(128), 200, 450, False),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward_with_the_tiles_of_short_and_of_long_sequences(machine, arch, name):
    """The executor is slow, so the tile of long sequences is forced."""
    rotary, seqlen_q, seqlen_k, causal = FORWARDS[name]
    p = support.problem(BF16, rotary, seqlen_q, seqlen_k, seed=3, causal=causal)
    exact = support.exact_and_bound(p)
    short, default = (configs.tile("forward", arch, 128, 2, 1, max_keys=keys) for keys in (1024, 0))
    for tile, forced in {short: contextlib.nullcontext(), default: tiles.forced("forward", default)}.items():
        machine.launches.clear()
        with torch.no_grad(), forced:
            out, lse = attention(p.q, p.k, p.v, rotary, causal=causal, return_lse=True, impl="triton")
        worst = support.excess({"out": out, "lse": lse}, *exact, torch.bfloat16)
        assert max(worst.values()) <= support.COEFFICIENT[torch.bfloat16]
        [step] = [launch for launch in machine.launches if launch.kernel == "attention_forward"]
        assert step.grid == (-(-seqlen_q // tile.block_m) * p.q.shape[2], 1, 1) and step.threads == 32 * tile.num_warps


@pytest.mark.parametrize("window", [0, pytest.param(70, marks=slow)])
def test_packed_gradients_of_five_products(machine, arch, window):
    lengths = (200, 1, 150)
    rotary = Rotary.rope(128).rectify(window) if window else Rotary.rope(128)
    p = packing(BF16, rotary, lengths, heads=2, heads_kv=1)
    for tile in tiles_of(arch, 2 if window else 1):
        machine.launches.clear()
        with tiles.forced("grad_qkv", tile):
            p.check(p.run("triton", deterministic=False), torch.bfloat16)
        check_step(machine, tile, -(-max(lengths) // tile.block_n) * len(lengths))
