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
    optimizer = torch.optim.AdamW([weight], lr=0.1, capturable=True)
    x = torch.ones(4, device=runtime.DEVICE)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = Captured(step)
    before = weight.detach().clone()
    first = captured().item()
    x.copy_(torch.full_like(x, 2.0))
    assert captured().item() == pytest.approx(2 * 4 * (weight + 0.1).mean().item(), rel=0.1) != first
    assert (weight < before).all()


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
