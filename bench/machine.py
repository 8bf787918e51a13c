"""What a result depends on beside the code: the device, the versions, the git revision; and the device's measured
ceilings."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from flashrope.info import hardware

from .timing import Spread, Timer, rounds

ROOT = Path(__file__).resolve().parent.parent
PEERS, MISSING = ("flash-attn", "flash-attn-3", "flashinfer-python"), "not installed"
MEASURED = ("bench", "csrc", "python", "triton_kernels")  # what makes a figure


def describe(device: torch.device) -> dict:
    """The device by name, with what of it bears on time."""
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
    }


def slug(name: str) -> str:
    """A folder's name: "NVIDIA A100-SXM4-80GB" is nvidia-a100-sxm4-80gb."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:r|tm)\)", "", name.lower())).strip("-")


def versions() -> dict[str, str]:
    """Of this code and what it runs on; of the peers those that are installed."""
    found = {
        "revision": revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "cuda": torch.version.cuda or "none",
    }
    if torch.version.cuda and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found | {name: _installed(name) for name in PEERS if _installed(name) != MISSING}


@lru_cache(maxsize=1)
def revision() -> str:
    """The checkout's commit, with "-dirty" where a file that makes a figure differs from it. Outside a checkout what
    the file REVISION says (bench/on_gpu.sh -r), or "unknown"."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (
            "-dirty"
            if _git("status", "--porcelain", "--untracked-files=no", "--", *MEASURED, ":!bench/results")
            else ""
        )
    except (OSError, subprocess.CalledProcessError):
        file = ROOT / "REVISION"
        return file.read_text().strip() if file.exists() else "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def load_average() -> list[float] | None:
    """Processes ready to run on average over 1, 5 and 15 minutes: what else the machine does."""
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except OSError:
        return None


@lru_cache(maxsize=8)
def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measured once in a process: product_tflops, a large product of random numbers; copy_gbs, bytes read and written;
    read_gbs, bytes read and nothing written."""
    gpu, timer = device.type == "cuda", Timer(device)
    size = 8192 if gpu else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(
        min(2**30, timer.free_bytes() // 32) if gpu else 2**26, device=device
    )  # 4 GB if they are there, or 256 MB
    target = torch.empty_like(source)
    calls = {"product": lambda: a @ b, "copy": lambda: target.copy_(source), "read": reader(source)}
    median = {name: Spread.of(times).median for name, times in rounds(calls, timer, 1.0, least=5).items()}
    return {
        "product_tflops": 2 * size**3 / median["product"] / 1e9,
        "copy_gbs": 2 * 4 * source.numel() / median["copy"] / 1e6,
        "read_gbs": 4 * source.numel() / median["read"] / 1e6,
    }


def reader(source: torch.Tensor):
    """A call that reads all of a float32 tensor once and writes next to nothing."""
    if source.device.type == "cpu":
        return source.sum
    from .probe import read

    return lambda: read(source)


def _last_cache_cpu() -> int:
    """Bytes of the processor's last cache; 0 where the system does not say."""
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
