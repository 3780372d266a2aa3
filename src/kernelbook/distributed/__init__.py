"""Beyond one GPU, on PyTorch's own DeviceMesh, DTensor, FSDP2 and collectives: experts, their bytes, and active gradients."""

from kernelbook.distributed.adapters import save_adapter
from kernelbook.distributed.expert_parallel import ExpertParallel
from kernelbook.distributed.gradients import Reduction, keep_equal, reduce_active_rows
from kernelbook.distributed.packed import by_expert
from kernelbook.distributed.sharding import fully_shard

__all__ = [
    "ExpertParallel",
    "Reduction",
    "by_expert",
    "fully_shard",
    "keep_equal",
    "reduce_active_rows",
    "save_adapter",
]
