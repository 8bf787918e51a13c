"""Describes what a result depends on besides the code: the device, the versions, the git revision."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from flashrope.backends.cpu import loader
from flashrope.console.hardware import hardware

ROOT = Path(__file__).resolve().parent.parent
REVISION_FILE = ROOT / "runs" / "REVISION"  # written by bench/on_gpu.sh -r
PEERS, MISSING = ("flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python"), "not installed"
CHANGED = "-dirty"  # the end of a revision whose code had uncommitted changes
MEASURED = ("bench", "csrc", "python", "triton_kernels")  # the code that results depend on


def describe(device: torch.device) -> dict:
    """Returns the device's name and those of its properties that affect time."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "hardware": hardware(device),
            "multiprocessors": properties.multi_processor_count,
            "cache_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    return {
        "name": hardware(device),
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "cache_bytes": _last_cache_cpu(),
        "kernels": "compiled" if loader.find().library else "composed",
    }


def slug(name: str) -> str:
    """Turns a device's name into a folder name: "NVIDIA A100-SXM4-80GB" becomes nvidia-a100-sxm4-80gb."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:r|tm)\)", "", name.lower())).strip("-")


def versions() -> dict[str, str]:
    """Returns the versions of this code, of the software that it runs on, and of the installed peers."""
    found = {
        "revision": revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "cuda": torch.version.cuda or "none",
    }
    if torch.version.hip:
        found["rocm"] = torch.version.hip
    if torch.version.cuda and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found | {name: _installed(name) for name in PEERS if _installed(name) != MISSING}


@lru_cache(maxsize=1)
def revision() -> str:
    """Returns the commit of the checkout, with CHANGED if the code that results depend on differs from it.

    Outside a git checkout: the text of REVISION_FILE, or "unknown".
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *MEASURED, ":!bench/results")
        return head + (CHANGED if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return REVISION_FILE.read_text().strip() if REVISION_FILE.exists() else "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def load_average() -> list[float] | None:
    """Returns the machine's load: the number of processes ready to run, averaged over 1, 5 and 15 minutes."""
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except OSError:
        return None


def _last_cache_cpu() -> int:
    """Returns the bytes of the processor's last-level cache, or 0 if the system does not report them."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if match := re.fullmatch(r"(\d+)K", path.read_text().strip()):
            sizes.append(int(match[1]) * 1024)
    return max(sizes, default=0)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING
