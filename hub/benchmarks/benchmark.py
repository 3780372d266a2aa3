"""``kernels benchmark``: LayerNorm, RMSNorm and attention beside PyTorch's own."""

import torch
import torch.nn.functional as F
from kernels import Benchmark


class LayerNormBenchmark(Benchmark):
    seed = 0

    def setup(self) -> None:
        self.x = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        self.weight, self.bias = (torch.randn(4096, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        self.out = torch.empty_like(self.x)

    def benchmark_base(self) -> None:
        self.out = self.kernel.layer_norm(self.x, self.weight, self.bias)

    def verify_base(self) -> torch.Tensor:
        return F.layer_norm(self.x, self.weight.shape, self.weight, self.bias)


class RMSNormBenchmark(LayerNormBenchmark):
    def benchmark_base(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight)

    def verify_base(self) -> torch.Tensor:
        return F.rms_norm(self.x, self.weight.shape, self.weight, 1e-6)


class AttentionBenchmark(Benchmark):
    seed = 0

    def setup(self) -> None:
        self.q, self.k, self.v = (
            torch.randn(2, 16, 4096, 128, device=self.device, dtype=torch.bfloat16) for _ in range(3)
        )
        self.out = torch.empty_like(self.q)

    def benchmark_base(self) -> None:
        self.out = self.kernel.flash_attention(self.q, self.k, self.v, causal=True)

    def verify_base(self) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)
