"""Several ranks, each a process, over gloo: torchrun starts them, ``several_ranks.py`` says what they check."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kernelbook import runtime
from kernelbook.distributed import by_expert, gradients, keep_equal, reduce_active_rows, windows
from kernelbook.lab import cli
from kernelbook.nn import GatedExperts, SparseLinear
from kernelbook.nn.moe import quantize_parameter, stored_weight

WORKER = Path(__file__).with_name("several_ranks.py")


def _torchrun(ranks: int, folder: Path, *checks: str, cpu: bool = True) -> tuple[int, str]:
    """Exit code and output; a free port is chosen, and no rank outlives the time."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(WORKER))
    forks = cpu and "dies" not in checks  # of forks the first that is named is not always the one that was killed
    command = (str(WORKER), str(ranks)) if forks else torchrun
    environment = os.environ | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    done = subprocess.run(
        [sys.executable, *command, str(folder), *checks],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=540, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _assert_all_passed(output: str, ranks: int, *checks: str) -> None:
    lines = output.splitlines()
    missing = [f"{name} {rank}" for name in checks for rank in range(ranks) if f"ok {name} {rank}" not in lines]
    assert not missing, f"{missing} not passed:\n{output[-6000:]}"


def _run(ranks: int, folder: Path, *checks: str, cpu: bool = True) -> None:
    code, output = _torchrun(ranks, folder, *checks, cpu=cpu)
    _assert_all_passed(output, ranks, *checks)
    assert code == 0


def test_several_ranks(tmp_path: Path) -> None:
    """Two, then three of them, which go on from what the two have written; at the end one is killed."""
    _run(
        2, tmp_path, "expert_parallel", "sharded_four_bits", "active_rows", "kept_equal", "trains_ddp",
        "trains_fsdp", "adapters_are_safe", "bytes_stay_bytes", "transformers_experts", "measures",
    )  # fmt: skip
    three = (
        "expert_parallel_four_bits", "expert_parallel_bfloat16", "expert_parallel_without_waiting", "windows_grow",
        "sharded_loads_elsewhere", "resumes_fsdp",
    )  # fmt: skip
    code, output = _torchrun(3, tmp_path, *three, "dies")
    _assert_all_passed(output, 3, *three)
    assert code != 0 and "ok dies" not in output
    assert "SIGKILL" in output  # torchrun says who it was
    assert torch.load(tmp_path / "dies" / "checkpoint.pt")["run"]["step"] in (2, 4)


def test_a_mesh_of_two_dimensions(tmp_path: Path) -> None:
    _run(4, tmp_path, "two_dimensions")


def test_the_bench_measures_one_gpu_too(tmp_path: Path) -> None:
    _run(1, tmp_path, "measures")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.alone
def test_several_gpus(tmp_path: Path, ranks: int) -> None:
    """The same over NCCL."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    checks = (
        "expert_parallel", "expert_parallel_four_bits", "expert_parallel_bfloat16", "expert_parallel_without_waiting",
        "windows_grow", "in_a_graph", "sharded_four_bits", "active_rows", "kept_equal", "trains_ddp", "trains_fsdp", "measures",
        "adapters_are_safe", "bytes_stay_bytes", "transformers_experts", *(("two_dimensions",) if ranks == 4 else ()),
    )  # fmt: skip
    _run(ranks, tmp_path, *checks, cpu=False)


@pytest.mark.parametrize("double_quant", (False, True))
@pytest.mark.parametrize("sizes", ((3, 32, 32), (2, 128, 128)), ids=("scales_shared", "scales_apart"))
def test_by_expert_changes_no_bit(double_quant: bool, sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    module = GatedExperts(sizes[0], sizes[1], sizes[2], device=runtime.DEVICE)
    for name in ("gate_up", "down"):
        quantize_parameter(module, name, double_quant=double_quant)
    before = {name: getattr(module, name) for name in ("gate_up", "down")}
    size = sum(stored_weight(module, name).nbytes for name in before)
    assert by_expert(module) == 2 and by_expert(module) == 2
    for name, value in before.items():
        assert torch.equal(getattr(module, name), value), name
        part = module.parametrizations[name]
        assert part.original.shape[0] == part[0].absmax.shape[0] == sizes[0]
        assert not any(p.requires_grad or p.dtype != torch.uint8 for p in part.parameters())
    after = sum(stored_weight(module, name).nbytes for name in before)
    assert after <= size * (1.2 if double_quant and sizes[0] == 3 else 1)


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    module = GatedExperts(3, 5, 7, device=runtime.DEVICE)
    quantize_parameter(module, "down")
    with pytest.raises(ValueError, match="by_expert: each expert of down must have a multiple of block_size"):
        by_expert(module)
    with pytest.raises(ValueError, match="reduce_active_rows: module must have SparseLinear layers"):
        reduce_active_rows(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="keep_equal: parameters must not be empty"):
        keep_equal([])
    typed = ["train", "--config", "tiny", "--parallel", "ddp", "--out", str(tmp_path / "run")]
    assert cli.main(typed) == 2 and "must be started by torchrun" in capsys.readouterr().err


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A group of two of which the other one adds nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("at_once", (0, 2**20), ids=("by itself", "together with others"))
@pytest.mark.parametrize(
    ("features", "compact", "frozen"), ((48, False, False), (48, True, False), (40, False, False), (48, False, True))
)
def test_gradients_are_averaged_however_large(
    features: int, compact: bool, frozen: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks of which the other one has no gradient: what is left is half. 40 features end within a chunk."""
    monkeypatch.setattr(gradients, "AT_ONCE", at_once)
    layer = SparseLinear(16, features, chunk_size=16, compact_gradient=compact, device=runtime.DEVICE)
    layer.weight.requires_grad_(not frozen)
    layer.active_chunks = torch.tensor([2, 0], device=runtime.DEVICE)
    x = torch.randn(4, 16, device=runtime.DEVICE)
    layer(x).square().sum().backward()
    alone = [p.grad.to_dense().clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    reduce_active_rows(layer)
    layer(x).square().sum().backward()
    trained = [p for p in layer.parameters() if p.requires_grad]
    for parameter, grad in zip(trained, alone, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad.to_dense(), grad / 2)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("at_once", (0, 2**20), ids=("by itself", "together with others"))
def test_gradients_are_averaged_after_a_backward_pass_that_raised(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: torch.Tensor) -> None:
        raise ArithmeticError

    monkeypatch.setattr(gradients, "AT_ONCE", at_once)
    weight, scale = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    keep_equal([weight, scale])
    broken = torch.ones(2, requires_grad=True)
    broken.register_hook(stop)
    with pytest.raises(ArithmeticError) as kept:  # and its frames
        (broken * weight * scale).sum().backward()
    weight.grad = scale.grad = None
    (weight * scale).sum().backward()
    assert weight.grad.tolist() == scale.grad.tolist() == [0.5, 0.5] and kept.value
    table = torch.nn.Embedding(4, 2, sparse=True)
    keep_equal(table.parameters())
    with pytest.raises(TypeError, match="keep_equal: gradients must be dense, got a sparse one"):
        table(torch.tensor([1])).sum().backward()


def test_a_host_that_is_a_call_ahead_is_understood() -> None:
    """Its numbers for the next call do not hide those for this one."""
    told = [memoryview(bytearray(16)).cast("q") for _ in range(2)]
    late, early = (windows.Windows.__new__(windows.Windows) for _ in told)
    for rank, each in enumerate((late, early)):
        each.rank, each._calls, each._told = rank, 0, told
    early._told = [memoryview(bytearray(b"\xff" * 7 + b"\x7f") * 2).cast("q"), told[1]]  # it waits for nobody
    early.max_tokens_over_ranks(5)
    early.max_tokens_over_ranks(9)
    assert late.max_tokens_over_ranks(3) == 5 and late.max_tokens_over_ranks(3) == 9
