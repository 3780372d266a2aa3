"""AdamW for weights of which only some chunks of rows get a gradient.

Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), algorithm 2.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, launcher
from kernelbook.train import kernels

INACTIVE = ("skip", "decay")


def _check_whole_chunks(rows: torch.Tensor, chunk: int, coalesced: bool) -> None:
    """Raise unless ``rows`` are whole chunks, as they are not where the layer's chunks have another size, and each once."""
    by_chunk = rows.view(-1, chunk)
    expected = by_chunk[:, :1] // chunk * chunk + torch.arange(chunk, device=rows.device)
    if not torch.equal(by_chunk, expected):
        raise ValueError(
            f"ChunkAdamW: a sparse gradient must have whole chunks of chunk_size ({chunk}) rows that start at its "
            f"multiples, got other rows; is it the layer's chunk_size?"
        )
    if not coalesced and by_chunk[:, 0].unique().numel() != by_chunk.shape[0]:
        raise ValueError("ChunkAdamW: a sparse gradient must have each row once with unique_rows=True, got some twice")


def _launch(chunk: int, sparse: bool, decay: bool) -> Launch:
    config = kernels.ADAMW_CONFIG
    return launcher(
        kernels._adamw_chunks_kernel,
        CHUNK=chunk, SPARSE=sparse, DECAY=decay,
        **config.kwargs, BLOCK_A=kernels.BLOCK_A, num_warps=config.num_warps,
    )  # fmt: skip


def _numbers(group: dict[str, Any]) -> tuple[float, ...]:
    """Return the hyperparameters as the kernel takes them; floats all, so that a zero compiles no kernel of its own."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    log2_beta1 = math.log2(beta1) if beta1 else -1e4
    rates = float(group["eps"]), float(group["weight_decay"])
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, log2_beta1, math.log2(beta2), *rates


class ChunkAdamW(torch.optim.Optimizer):
    """AdamW; what it does with rows that have no gradient is yours to say.

    A parameter's gradient is dense, or sparse in its rows (``torch.sparse_coo``), as
    ``SparseLinear(compact_gradient=True)`` gives it: whole chunks, in any order.

    - ``inactive="skip"``: such rows rest. Neither they nor their moments change, no weight decay, and each chunk counts its
      own updates: it gets what AdamW would do with the sequence of its own gradients. Memory traffic falls with the
      share of active chunks.
    - ``inactive="decay"``: such rows have gradient zero. Their moments decay, they go on moving by them, and their weights
      decay: what AdamW does with the zero-filled gradient, at its price.

    Args:
        params: float32 parameters of one or two dimensions, contiguous.
        lr: a number, or a tensor of one element on the device, which may change between steps of a captured graph.
        betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        chunk_size: rows in a chunk, the same as the layers'.
        inactive: ``"skip"`` or ``"decay"``.
        unique_rows: sparse gradients have no row twice (one backward pass between steps). Else they are coalesced first,
            which costs a synchronisation.

    Raises:
        TypeError: a parameter is not float32, or a DTensor.
        ValueError: an argument is out of range, or a parameter is not contiguous. Both also come from ``add_param_group``.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        chunk_size: int = 64,
        inactive: str = "skip",
        unique_rows: bool = False,
    ) -> None:
        how = dict[str, Any](chunk_size=chunk_size, inactive=inactive, unique_rows=unique_rows)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **how})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer; the group is checked as the constructor's arguments are, and not kept where it is refused."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as any optimizer does. Raises ``ValueError`` for the state of another one, such as ``torch.optim.AdamW``."""
        for group in state_dict["param_groups"]:
            # Not of all defaults: PyTorch adds to them in an optimizer that is copied or loaded.
            if missing := {"chunk_size", "inactive", "unique_rows"} - group.keys():
                raise ValueError(
                    f"ChunkAdamW.load_state_dict: state_dict must be of a ChunkAdamW, got groups without "
                    f"{', '.join(sorted(missing))}"
                )
        super().load_state_dict(state_dict)

    @staticmethod
    def _check(group: dict[str, Any]) -> None:
        op = "ChunkAdamW"
        arguments.check_choice(op, "inactive", group["inactive"], INACTIVE)
        betas = group["betas"] = tuple(arguments.number(op, "betas", beta, "two numbers") for beta in group["betas"])
        if len(betas) != 2 or not (0 <= betas[0] < 1 and 0 < betas[1] < 1):
            raise ValueError(f"{op}: betas must lie in [0, 1) and (0, 1), got {betas}")
        group["chunk_size"] = arguments.integer(op, "chunk_size", group["chunk_size"], least=1)
        for name in ("lr", "eps", "weight_decay"):
            value = group[name]
            if isinstance(value, torch.Tensor) and name == "lr":
                if value.numel() != 1:
                    raise ValueError(f"{op}: lr must have one element, got shape {tuple(value.shape)}")
                continue
            value = group[name] = arguments.number(op, name, value)
            if not 0 <= value < math.inf:
                raise ValueError(f"{op}: {name} must not be negative, and finite, got {value}")
        for param in group["params"]:
            if type(param) not in (torch.Tensor, torch.nn.Parameter):
                kind = type(param.data if isinstance(param, torch.nn.Parameter) else param).__name__
                raise TypeError(
                    f"{op}: params must be ordinary tensors, got {kind}; for parameters that FSDP2 has sharded "
                    f"(fully_shard) take torch.optim.AdamW, with compact_gradient=False"
                )
            arguments.check_tensor(op, "params", param, dtypes=(torch.float32,))
            if isinstance(group["lr"], torch.Tensor):
                arguments.check_same_device(op, params=param, lr=group["lr"])
            if param.ndim not in (1, 2) or not param.is_contiguous():
                raise ValueError(
                    f"{op}: params must be contiguous and have one or two dimensions, got shape {tuple(param.shape)} and "
                    f"strides {param.stride()}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        """Update once, by gradients multiplied by ``scale``, one number in a tensor on the device (gradient clipping)."""
        if scale is not None:
            arguments.check_tensor("ChunkAdamW", "scale", scale)
            if scale.numel() != 1:
                raise ValueError(f"ChunkAdamW: scale must have one element, got shape {tuple(scale.shape)}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group, scale)
        return loss

    def _state_of(self, param: torch.Tensor, chunk: int) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
            # Updates of each chunk; float32 counts exactly to 16 million.
            state["counts"] = torch.zeros(-(-param.shape[0] // chunk), dtype=torch.float32, device=param.device)
        return state

    def _update(self, param: torch.Tensor, group: dict[str, Any], scale: torch.Tensor | None) -> None:
        grad, chunk = param.grad, group["chunk_size"]
        assert grad is not None
        if param.dtype != torch.float32 or not param.is_contiguous():  # a module's .to() may have changed it
            self._check(group)
        state = self._state_of(param, chunk)
        rows, chunks = param.shape[0], state["counts"].shape[0]
        d = param.numel() // max(rows, 1)
        sparse, decay = grad.is_sparse, group["inactive"] == "decay"
        if sparse:
            if not group["unique_rows"]:
                grad = grad.coalesce()
            indices, values = grad._indices()[0], grad._values().contiguous()
            if values.shape[0] % chunk:
                raise ValueError(
                    f"ChunkAdamW: a sparse gradient must have whole chunks of {chunk} rows, got {values.shape[0]} rows"
                )
            # Coalescing has waited for the device already; without it only where the check costs no wait.
            if not group["unique_rows"] or not grad.is_cuda or runtime.debug_enabled():
                _check_whole_chunks(indices, chunk, coalesced=not group["unique_rows"])
            active = values.shape[0] // chunk
        else:
            # A tensor that PyTorch has yet to negate may be contiguous.
            indices, values, active = grad, grad.contiguous().resolve_neg(), chunks
        if sparse and not decay:
            state["counts"].index_add_(0, indices[::chunk] // chunk, state["counts"].new_ones(()).expand(active))
        else:
            state["counts"] += 1
        programs = active if sparse and not decay else chunks
        if programs == 0 or d == 0:
            return
        one = torch.ones(1, dtype=torch.float32, device=param.device)
        lr = group["lr"] if isinstance(group["lr"], torch.Tensor) else one * group["lr"]
        scale = one if scale is None else scale
        launch = _launch(chunk, sparse, decay)
        launch(
            (programs, -(-chunk * d // kernels.ADAMW_CONFIG.kwargs["BLOCK"])),
            indices, values,
            param, state["exp_avg"], state["exp_avg_sq"],
            state["counts"],
            lr, scale,
            rows, d, active, *_numbers(group),
        )  # fmt: skip
        torch.autograd.graph.increment_version(param)
