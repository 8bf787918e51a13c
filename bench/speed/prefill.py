"""Measures prefill and training, with HoPE and with ReRoPE.

    python -m bench hope [--head-dim 128] [--heads 16] [--heads-kv 16] [--seqlens 2048 8192] [--passes forward]
    python -m bench rerope [--head-dim 128] [--window 512] [--seqlens 2048 8192] [--passes forward] [--no-causal]

HoPE and RoPE are compared with attention after a separate rotation: PyTorch's kernels, and flash-attn 2, 3 and 4 where
they are installed. ReRoPE is compared with two calls of PyTorch's kernels, or of flash-attn 3 or 4, whose results are
merged, with two FlexAttention passes, with two dense score matrices, with RoPE by the fastest kernels and with
flashrope's HoPE.
"""

from __future__ import annotations

import argparse

from .contestants import prefill_hope, prefill_rerope
from .options import Table, parse, parser, prefill_tables
from .session import Session
from .settings import FIELDS, named_after, run_code_of, tile_of, with_tiles

CUDA = {
    "heads": 16,
    "heads_kv": 16,
    "head_dim": 128,
    "seqlens": [512, 1024, 2048, 4096, 8192, 16384],
    "tokens": 16384,
    "window": 512,
}
CPU = {"heads": 4, "heads_kv": 4, "head_dim": 64, "seqlens": [512, 1024, 2048, 4096], "tokens": 4096, "window": 256}


COMMANDS = {  # {command: (what it does, sizes on a GPU, sizes on the CPU, contestants, names that --tiles applies to)}
    "hope": (
        "Prefill and training with RoPE and HoPE, against attention after a separate rotation.",
        CUDA,
        CPU,
        prefill_hope,
        ("flashrope RoPE",),
    ),
    "rerope": (
        "Prefill and training with ReRoPE, against two calls, two FlexAttention passes and two dense score matrices.",
        CUDA | {"seqlens": [2048, 4096, 8192, 16384]},
        CPU | {"seqlens": [1024, 2048, 4096]},
        prefill_rerope,
        ("flashrope ReRoPE",),
    ),
}


def hope(argv: list[str]) -> int:
    return _run("hope", argv)


def rerope(argv: list[str]) -> int:
    return _run("rerope", argv)


def parsed(command: str, argv: list[str], needs_device: bool = True) -> argparse.Namespace:
    p = parser(command, *COMMANDS[command][:3])
    tiles = f"also time flashrope with these tiles: DIRECTION={','.join(FIELDS[:4])}, for example forward=64,64,4,3"
    p.add_argument("--tiles", nargs="+", default=[], metavar="TILE", help=tiles)
    code = "run the kernels of another architecture; Triton's variables must be set as in bench/on_gpu.sh"
    p.add_argument("--code", type=int, metavar="ARCH", help=code)
    options = parse(p, argv, needs_device)
    try:
        list(map(tile_of, options.tiles))
    except ValueError as error:
        p.error(f"--tiles: {error}")
    return options


def tables(command: str, options: argparse.Namespace) -> list[Table]:
    """Returns one table for every pass and length, with the contestants of the command and those of --tiles."""
    contestants, changed = COMMANDS[command][3:]
    every = contestants(options.device)
    every += with_tiles(every, options.tiles, changed)
    return prefill_tables(options, named_after(options.code, every) if options.code else every)


def _run(command: str, argv: list[str]) -> int:
    """Times the contestants for every pass and length."""
    options = parsed(command, argv)
    if options.code:
        run_code_of(options.code)
    session = Session(command, argv, options)
    session.measure(tables(command, options))
    session.memory()
    return session.finish()
