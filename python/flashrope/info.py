"""``flashrope info``: what is installed, which devices there are, and which implementation serves on each."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    import torch

    from .backends import load_backend

    print(f"{'flashrope':13}{_installed('flashrope')}")
    print(f"{'python':13}{platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"{'torch':13}{torch.__version__}" + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ""))
    for package in ("triton", "transformers"):
        print(f"{package:13}{_installed(package)}")
    print(f"{'extension':13}{load_backend('cuda').build_info()}")
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    for device in devices:
        threads = f", threads: {torch.get_num_threads()}" if device == "cpu" else ""
        print(f"\n{device}: {hardware(device)}{threads}")
        for name, reason in implementations(device, torch.bfloat16):
            print(f"  {name:10}{reason}")
    return 0


def hardware(device) -> str:
    """The processor's name, or the GPU's with its compute capability and memory."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return processor()
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def implementations(device: str, dtype) -> list[tuple[str, str]]:
    """(name, "the choice", "can serve" or why it cannot) for a call with tensors of this device and dtype."""
    import torch

    from .backends import BACKENDS, load_backend, resolve_impl

    q = torch.empty(1, 1, 1, 64, device=device, dtype=dtype)
    rows = []
    for name in BACKENDS:
        try:
            reason, over_cache = (load_backend(name).unsupported_reason(q, cached) for cached in (False, True))
        except ImportError as error:
            reason = over_cache = f"cannot be imported ({error})"
        if not reason:
            reason = "the choice" if resolve_impl(None, q) == name else "can serve"
        else:
            reason = over_cache or "can serve attention_with_cache"
        rows.append((name, reason))
    return rows


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
