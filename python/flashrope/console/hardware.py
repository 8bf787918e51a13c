"""Finds the name of a processor or GPU."""

from __future__ import annotations

import platform


def hardware(device) -> str:
    """Returns the name of the processor, or the name of the GPU with its memory and its compute capability (under ROCm
    its architecture)."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return _processor()
    properties = torch.cuda.get_device_properties(device)
    kind = f"compute capability {properties.major}.{properties.minor}"
    if torch.version.hip:
        kind = properties.gcnArchName.split(":")[0]
    return f"{properties.name}, {kind}, {properties.total_memory / 2**30:.0f} GiB"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
