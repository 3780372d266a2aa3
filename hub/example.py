# /// script
# requires-python = ">=3.10"
# dependencies = ["kernels>=0.17", "torch>=2.11", "triton>=3.6", "numpy>=2.0"]
# ///
"""Load the kernel repository from the folder that this file lies in, and normalize some rows: uv run example.py"""

from pathlib import Path

import torch
from kernels import get_local_kernel

kb = get_local_kernel(Path(__file__).parent)
device = "cuda" if torch.cuda.is_available() else "cpu"
x, weight, bias = torch.randn(4, 64, device=device), torch.ones(64, device=device), torch.zeros(64, device=device)
torch.testing.assert_close(kb.layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (64,), weight, bias))
