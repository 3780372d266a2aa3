"""transformers' expert parallelism on our exchange of tokens.

transformers shards a model's experts itself, when it loads one with a ``DistributedConfig``, and asks a named implementation
to bring them their tokens. After :func:`register` ::

    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="kernelbook")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

runs on :func:`kernelbook.distributed.exchange`: a token travels once to each rank that has experts for it, where transformers'
own ``"all_to_all"`` sends it once for each expert. ``use_kernels(model)`` then runs the experts on our kernels.
"""

from typing import Any

import torch
import transformers

from kernelbook.distributed.exchange import exchange
from kernelbook.distributed.expert_parallel import LORA_ATTRIBUTE, own_pairs

NAME = "kernelbook"


def register() -> None:
    """Adds ``"kernelbook"`` to the names that ``DistributedConfig(ep_implementation=...)`` takes.

    Raises:
        ImportError: this version of transformers has no table of them.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"kernelbook.interop.expert_parallel: transformers must have named implementations of expert parallelism, as "
            f"5.23 has; transformers {transformers.__version__} has none"
        ) from error

    class Exchange(EPImplementation):  # type: ignore[misc, unused-ignore]
        """Tokens travel once to each rank; the ranks of the mesh hold different batches."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if tp_mesh.size() > 1:
                raise ValueError(
                    f"ep_implementation 'kernelbook': every rank must have a batch of its own (tp_size=1), got tp_size="
                    f"{tp_mesh.size()}"
                )
            self.experts: Any = experts

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            size: int = self.num_local_experts  # type: ignore[assignment, unused-ignore]
            first = self.ep_mesh.get_local_rank() * size
            with own_pairs(
                self.experts.__dict__.get(LORA_ATTRIBUTE, {}), slice(first, first + size), size * self.ep_mesh.size()
            ):
                return exchange(
                    self.experts_forward,
                    hidden_states,
                    top_k_index,
                    top_k_weights,
                    num_experts=size * self.ep_mesh.size(),
                    share=size,
                    group=self.ep_mesh.get_group(),
                )

    EPImplementationInterface.register(NAME, Exchange)
