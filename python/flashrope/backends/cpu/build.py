"""``flashrope build-cpu``: compiles the CPU kernels of csrc/ for this processor."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import library


def run(args: argparse.Namespace) -> int:
    path = library.folder() / library.file_name()
    if args.remove:
        path.unlink(missing_ok=True)
        print(f"removed {path}")
        return 0
    try:
        build(path, args.compiler)
    except RuntimeError as error:
        print(f"flashrope build-cpu: error: {error}", file=sys.stderr)
        return 1
    print(f"built {path}\nThe CPU backend uses it from the next start of Python on.")
    return 0


def build(path: Path, compiler: str = "c++") -> None:
    """Compiles the kernels, checks them against the reference, and only then puts the library at path.

    Raises:
        RuntimeError: there is no compiler, it fails, or the kernels are wrong.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"the compiled CPU kernels need Linux, this is {sys.platform}")
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"needs a C++ compiler, and {compiler!r} is not on PATH; install one (Debian: apt install g++) or name it "
            "with --compiler. Without the compiled kernels the CPU backend composes PyTorch's"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *library.FLAGS, *map(str, sorted(library.SOURCES.glob("*.cpp"))), "-o", str(built)]
        if errors := compile_with(command):
            raise RuntimeError(f"the compiler failed: {' '.join(command)}\n{errors[-2000:]}")
        check(library.Library(built))
        os.replace(built, path)


def compile_with(command: list[str]) -> str:
    """Runs a compiler; at Ctrl-C all its processes end too. Returns its messages if it fails, otherwise ""."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    return (errors or f"exit code {process.returncode}") if process.returncode else ""


def check(compiled: library.Library) -> None:
    """A small call of each kernel against the reference. RuntimeError: they differ."""
    import torch

    from ...rotary.rotary import Rotary
    from ..calls import AttentionCall, CacheCall, CacheLayout
    from ..registry import load_backend
    from . import decode, tiles

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 150, heads, 40, generator=generator) for heads in (4, 2, 2))
    rotary, exact = Rotary.rope(40).rectify(70), load_backend("reference")
    call = AttentionCall(rotary, True, 40**-0.5)
    layout = CacheLayout(torch.tensor([150], dtype=torch.int32))
    cached = CacheCall(rotary, True, 40**-0.5, layout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = exact.forward(*leaves, call)[:2]
    out, lse = tiles.forward(compiled, q, k, v, call)
    results = (
        ((out, lse), expected),
        (
            tiles.backward(compiled, q, None, q, k, v, out, lse, call),
            torch.autograd.grad(expected[0], leaves, q),
        ),
        (
            decode.decode(compiled, q[:, :1], k, v, cached),
            exact.attention_with_cache(q[:, :1], k, v, cached),
        ),
    )
    for got, expected in results:
        for x, y in zip(got, expected, strict=True):
            if not torch.allclose(x, y, rtol=1e-4, atol=1e-5):
                raise RuntimeError(f"the compiled kernels are wrong by {(x - y).abs().max():.2g}; they were not kept")
