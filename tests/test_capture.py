"""A call as a CUDA graph."""

import pytest
import torch

from kernelbook import runtime
from kernelbook.train.capture import Captured


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="Captured: call must run on a GPU, and there is none"):
        Captured(lambda: None)


@pytest.mark.gpu
def test_a_replay_reads_the_inputs_and_writes_the_outputs_anew() -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=runtime.DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    x = torch.ones(4, device=runtime.DEVICE)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = Captured(step)
    for value in (1.0, 2.0):
        x.fill_(value)
        before = weight.detach().clone()
        torch.testing.assert_close(captured(), value * before.sum())
        torch.testing.assert_close(weight.detach(), before - 0.1 * value)


@pytest.mark.gpu
def test_after_a_call_that_cannot_be_captured_random_numbers_are_drawn_as_before() -> None:
    x = torch.ones(4, device=runtime.DEVICE)
    torch.cuda.manual_seed(7)
    _, second = torch.rand_like(x), torch.rand_like(x)
    torch.cuda.manual_seed(7)
    with pytest.raises(RuntimeError):
        Captured(lambda: torch.rand_like(x).sum().item(), warm=1)
    assert torch.equal(torch.rand_like(x), second)
    captured = Captured(lambda: torch.rand_like(x))
    assert not torch.equal(captured().clone(), captured())
