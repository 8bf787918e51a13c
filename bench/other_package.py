"""Times another build of flashrope's forward, such as one with a patched kernel. PYTHONPATH says which.

    PYTHONPATH=FOLDER python bench/other_package.py --label NAME [--tile "DIRECTION=bm,bn,warps,stages"]

It uses nothing of this checkout but the clock, because the other package may lack what ``bench`` imports. It prints a
line of JSON for every scheme and length.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from flashrope import Rotary, attention
from flashrope.triton_kernels import configs

CLOCK = Path(__file__).resolve().parents[1] / "python" / "flashrope" / "lab" / "tuning" / "timer.py"
HEAD_DIM, WINDOW, LIMIT = 128, 512, 2e-2


def clock():
    spec = importlib.util.spec_from_file_location("clock", CLOCK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use_tile(text: str) -> None:
    """Puts a tile into the package's table. "forward tma" is a direction of packages with a forward in Gluon."""
    direction, _, numbers = text.partition("=")
    tile = configs.Tile(*map(int, numbers.split(",")))
    if direction == "forward tma":
        for name in (direction, f"{direction} banded"):
            configs.FORWARD_TMA[name] = dict.fromkeys((64, 128), tile)
        return
    before = configs.tile
    configs.tile = lambda asked, *args, **kwargs: tile if asked == direction else before(asked, *args, **kwargs)


def tensors(device, *sizes, dtype=torch.bfloat16):
    return [torch.randn(*sizes, HEAD_DIM, device=device, dtype=dtype) for _ in range(3)]


def error(call, rotary, device) -> float:
    inputs = tensors(device, 1, 700, 2)
    exact = attention(*(x.double().cpu() for x in inputs), rotary, impl="reference")
    return float((call(*inputs).double().cpu() - exact).norm() / exact.norm())


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--label", required=True, help="name of the rows")
    p.add_argument("--tile", help="a tile to use instead of the package's own")
    p.add_argument("--seqlens", type=int, nargs="+", default=[8192, 2048])
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--seconds", type=float, default=0.5)
    p.add_argument("--device", default="cuda")
    options = p.parse_args()
    device, timing = torch.device(options.device), clock()
    impl = "triton" if device.type == "cuda" else "reference"
    if options.tile:
        use_tile(options.tile)
    wrong = 0
    for name, rotary in (("RoPE", Rotary.rope(HEAD_DIM)), ("ReRoPE", Rotary.rope(HEAD_DIM).rectify(WINDOW))):

        def call(q, k, v, rotary=rotary):
            return attention(q, k, v, rotary, causal=True, impl=impl)

        off = error(call, rotary, device)
        wrong += not off <= LIMIT
        for seqlen in options.seqlens:
            batch = max(1, options.tokens // seqlen)
            inputs = tensors(device, batch, seqlen, options.heads)
            times = timing.rounds({"": lambda at=inputs: call(*at)}, timing.Timer(device), options.seconds)[""]
            spread = timing.Spread.of(times)
            flops = 2 * batch * options.heads * seqlen**2 * HEAD_DIM
            row = {"contestant": f"{options.label}, {name}", "seqlen": seqlen, "batch": batch, "error": off}
            row |= {"milliseconds": spread.median, "tflops": flops / spread.median / 1e9}
            print(json.dumps(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
