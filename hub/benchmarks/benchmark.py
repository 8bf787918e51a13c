"""Times partial RoPE of queries. Run it with `kernels benchmark REPO`."""

import torch
from kernels.benchmark import Benchmark


class RotateBenchmark(Benchmark):
    seed = 0

    def setup(self):
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.x = torch.randn(1, 4096, 16, 128, device=self.device, dtype=dtype)
        self.rotary = self.kernel.Rotary.rope(128, rotary_dim=32)
        self.out = torch.empty_like(self.x)

    def benchmark_partial(self):
        self.out = self.kernel.rotate(self.x, self.rotary)

    def verify_partial(self) -> torch.Tensor:
        return self.kernel.rotate(self.x, self.rotary, impl="reference")
