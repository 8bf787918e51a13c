"""If values are channels of the keys, one load of a tile of keys serves both products. This is checked in Triton's GPU
IR and in PTX."""

import re
from collections import Counter

import pytest

from bench.machine_code import cases

CASES = {  # head_dim, scheme, number of tiles of raw keys, how many of these hold values
    "latent": (576, cases.LATENT[0], 6, 4),
    "gemma": (512, cases.SHARED[1], 5, 5),
    "two bands": (128, cases.SHARED_ALL, 2, 2),
}


@pytest.mark.parametrize("case", [x if x == "two bands" else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_one_copy_and_one_tile(case):
    head_dim, scheme, tiles, values = CASES[case]
    launches = cases.Case(80, head_dim, "bf16", scheme).launches()
    launch = next(x for x in launches if x.kernel.__name__ == "attention_decode")
    compiled, variant = launch.compile(), launch.kwargs["VARIANT"]
    tile = rf"{variant.block_n}x(\d+)xbf16"
    loops = loops_of(compiled.asm["ttgir"])
    assert len(loops) == variant.num_bands
    for loop in loops:
        copied = [int(x) for x in re.findall(rf"async_copy_global_to_local .*-> <{tile}", loop)]
        assert len(copied) == tiles and sum(copied) == head_dim
        reads = Counter(name for name, _ in re.findall(rf"local_load (%\w+) token .*memdesc<{tile}.* -> ", loop))
        assert sorted(reads.values()) == [1] * (tiles - values) + [2] * values
    # In PTX, the copies of a tile appear num_stages times per loop: once in the loop, and before the loop once for
    # every tile that is requested ahead.
    needed = variant.block_n * head_dim * 2 // (16 * 32 * compiled.metadata.num_warps)
    needed *= variant.num_bands * compiled.metadata.num_stages
    copies = len(re.findall(r"cp\.async\.cg\.shared\.global \[[^\n]*, 0x10,", compiled.asm["ptx"]))
    assert needed <= copies < 2 * needed  # the keys are copied once; the other copies are of cos and sin


def loops_of(ttgir: str) -> list[str]:
    """Returns the bodies of the loops that have products."""
    found, lines = [], ttgir.split("\n")
    for n, line in enumerate(lines):
        if re.match(r" +%\S+ = scf\.for ", line):
            end = " " * (len(line) - len(line.lstrip())) + "}"
            body = lines[n + 1 : next(m for m in range(n + 1, len(lines)) if lines[m].startswith(end))]
            if not any("scf.for" in x for x in body):
                found.append("\n".join(body))
    return [body for body in found if "tt.dot" in body]
