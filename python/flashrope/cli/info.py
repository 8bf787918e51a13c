"""``flashrope info``: shows installed versions, devices, the backends available on each device, and tuned tiles."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from ..console.hardware import hardware


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no options, because the command has none."""


def run(args: argparse.Namespace) -> int:
    import torch

    from ..backends.cpu import loader
    from ..backends.registry import load_backend
    from ..lab.commands.tune import shown

    print(f"{'flashrope':13}{_installed('flashrope')}")
    print(f"{'python':13}{platform.python_version()}, {platform.system()} {platform.machine()}")
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    print(
        f"{'torch':13}{torch.__version__}" + "".join(f", {name} {number}" for name, number in built.items() if number)
    )
    for package in ("triton", "transformers"):
        print(f"{package:13}{_installed(package)}")
    print(f"{'CUDA kernels':13}{load_backend('cuda').build_info()}")
    library, target, problem = loader.find()
    kernels = (
        f"compiled for {target} by {loader.compiler()}: {library.path}"
        if library
        else f"none, PyTorch's run instead: {problem}"
    )
    print(f"{'CPU kernels':13}{kernels}")
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    for device in devices:
        threads = f", threads: {torch.get_num_threads()}" if device == "cpu" else ""
        print(f"\n{device}: {hardware(device)}{threads}")
        for name, status in backends(device, torch.bfloat16):
            print(f"  {name:10}{status}")
    print("\n" + "\n".join(shown()))
    return 0


def backends(device: str, dtype) -> list[tuple[str, str]]:
    """Returns (name, status) of every backend for tensors of this device and dtype.

    The status is "default" (the backend for impl=None), "default for ..." (for some calls), "available", "available for
    attention_with_cache", or the reason why the backend is unavailable.
    """
    import torch

    from ..backends.names import BACKENDS
    from ..backends.registry import load_backend

    q = torch.empty(1, 1, 1, 64, device=device, dtype=dtype)
    defaults = load_backend("auto").defaults(q)
    rows = []
    for name in BACKENDS:
        try:
            reason, cached_reason = (load_backend(name).unsupported_reason(q, cached) for cached in (False, True))
        except ImportError as error:
            reason = cached_reason = f"cannot be imported ({error})"
        if not reason:
            calls = defaults.get(name)
            status = "available" if calls is None else f"default for {calls}" if calls else "default"
        else:
            status = cached_reason or "available for attention_with_cache"
        rows.append((name, status))
    return rows


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
