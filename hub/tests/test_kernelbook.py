"""The kernel repository's own tests; LOCAL_KERNELS says where it lies while it is not on the hub."""

import kernels
import pytest
import torch
import torch.nn.functional as F

kb = kernels.get_kernel("kernelbook/kernelbook", version=1, trust_remote_code=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.kernels_ci
def test_layer_norm() -> None:
    x, weight, bias = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((5, 48), (48,), (48,)))
    ours, plain = kb.layer_norm(x, weight, bias), F.layer_norm(x, (48,), weight, bias)
    torch.testing.assert_close(ours, plain)
    dy = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight, bias), dy) for y in (ours, plain))):
        torch.testing.assert_close(a, b)


@pytest.mark.kernels_ci
def test_rms_norm() -> None:
    x, weight = torch.randn(5, 48, device=DEVICE), torch.randn(48, device=DEVICE)
    torch.testing.assert_close(kb.rms_norm(x, weight), F.rms_norm(x, (48,), weight, 1e-6))


@pytest.mark.kernels_ci
def test_attention() -> None:
    q, k, v = (torch.randn(1, 2, 33, 16, device=DEVICE) for _ in range(3))
    ours = kb.flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-3, atol=1e-3)
