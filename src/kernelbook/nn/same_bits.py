"""What a model needs around the kernels to be the same bits in any batch: its linear layers, and attention of padded and packed batches."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.attention import flash_attention
from kernelbook.linear.op import _linear
from kernelbook.nn.made_again import MadeAgain
from kernelbook.tensors import has_values

# --- linear layers --------------------------------------------------------------------------------------------------


class SameBitsLinear(torch.nn.Linear):
    """``torch.nn.Linear`` whose rows are the same bits in any batch, on :func:`linear`; the state dict is the same.

    Args:
        in_features, out_features, bias, device, dtype: as in PyTorch.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features). Raises ``ValueError`` where it is compiled."""
        with runtime.same_bits():
            return _own(input, self.weight, self.bias)


def _own(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if torch.compiler.is_compiling():
        raise ValueError(
            "linear: torch.compile must be off within same_bits(), since the compiler cuts sums by their sizes"
        )
    # The operator itself: Dynamo may go on past this error, and the function is PyTorch's there.
    return _linear(x, weight, bias)  # type: ignore[no-any-return]


class _OwnProducts(TorchFunctionMode):
    """Products with a matrix go to :func:`linear`; others are refused, since PyTorch's change with the number of rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is F.linear:
            return _own(*args, **(kwargs or {}))
        if name in ("matmul", "mm", "__matmul__") and len(args) == 2 and args[1].ndim == 2:
            return _own(args[0], args[1].t())
        if name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__"):
            raise ValueError(
                f"{name}: within same_bits() a product must be linear or matmul with a matrix, got another"
            )
        return func(*args, **(kwargs or {}))


class _WithLinear(MadeAgain):
    """The forward pass of a class that multiplies by a weight of its own, such as a router's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with runtime.same_bits(), _OwnProducts():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def with_linear(kind: Any) -> type[torch.nn.Module]:
    """Return the class with its products by :func:`linear`."""
    return type(kind.__name__, (_WithLinear, kind), {"__module__": __name__, "make": with_linear})


# --- attention of padded and packed batches --------------------------------------------------------------------------


class Sequences(NamedTuple):
    """Places of the sequences of a batch: rows of queries (B N) and of keys (B S), gathered into a batch of one a row."""

    queries: torch.Tensor  # (R, L) row numbers; places that are none have some row's
    keys: torch.Tensor  # (R, M) likewise
    lengths: torch.Tensor | None  # (R,) keys; the last query stands at the last. None: query i stands at key i
    places: torch.Tensor  # (B N,) where each query went, R L for one that is padding
    window: int | None


def sequences(
    mask: torch.Tensor, batch: int, window: int | None, position_ids: torch.Tensor | None = None
) -> Sequences:
    """Return what a mask (B or 1, 1, N, S) of booleans says, if it is causal within sequences; the host waits for the device, once.

    A query that does not see the key at its own place is padding. ``window``: how many keys back a query sees at most.

    Raises:
        ValueError: the mask is another, or ``position_ids`` begin anew within one of its sequences.
    """
    found: Sequences | None = getattr(mask, "_kernelbook_sequences", None)
    if found is None or found.window != window:
        n, anew = mask.shape[2], None
        if position_ids is not None and position_ids.shape in ((1, n), (batch, n)):
            anew = jumps(position_ids, batch)
        found = mask._kernelbook_sequences = _read(mask.expand(batch, -1, -1, -1)[:, 0], window, anew)  # type: ignore[attr-defined]
    return found


# What the model of transformers was given that runs; () outside of one that swap() knows.
_given: contextvars.ContextVar[torch.Tensor | tuple[()] | None] = contextvars.ContextVar("position_ids", default=())


@contextlib.contextmanager
def in_mode(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """The mode for a call of ``module``; of a model of transformers :func:`positions` knows which it was given, or that none."""
    token = None
    if hasattr(module, "set_attn_implementation"):
        given = kwargs.get("position_ids")
        if given is None and args:
            given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get("position_ids")
        token = _given.set(given)
    try:
        with runtime.same_bits():
            yield
    finally:
        if token is not None:
            _given.reset(token)


def positions(others: dict[str, Any]) -> torch.Tensor | None:
    """Return the ``position_ids`` by which sequences may be packed: of an attention's keywords, or of the model that it is in.

    Some models do not hand them on. Those that a model makes itself, since it was given none, need not be looked at.
    """
    given = _given.get()
    if given is None:
        return None
    own: torch.Tensor | None = others.get("position_ids")
    return given if own is None and isinstance(given, torch.Tensor) else own


PACKED = "attention_forward: position_ids must not pack sequences where attention_mask tells of one, got {}"


def begin_anew(position_ids: torch.Tensor, batch: int, n: int) -> bool:
    """Tell whether ``position_ids`` pack sequences: one is 0 behind others in its row.

    The host waits for the device, once for all layers. While a graph is captured nobody can look: yes for those that were
    looked at before, an input whose boundaries the graph then follows; no for others, which the model makes itself.
    """
    if n == 1 or position_ids.shape not in ((1, n), (batch, n)) or not has_values(position_ids):
        return False
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return hasattr(position_ids, "_kernelbook_anew")
    version = None if position_ids.is_inference() else position_ids._version
    looked_at, found = getattr(position_ids, "_kernelbook_anew", ((), False))
    if looked_at != version:
        found = bool(jumps(position_ids, batch).any())
        position_ids._kernelbook_anew = version, found  # type: ignore[attr-defined]
    return found


def jumps(position_ids: torch.Tensor, batch: int) -> torch.Tensor:
    """Return (B, N): where a position is 0 again, as transformers' FlashAttention has it: others may be left out or repeated."""
    found = position_ids == 0
    found[:, 0] = False
    return found.expand(batch, -1)


def _read(mask: torch.Tensor, window: int | None, anew: torch.Tensor | None) -> Sequences:
    batch, n, s = mask.shape
    own = torch.arange(s - n, s, device=mask.device)
    first, count = mask.to(torch.uint8).argmax(2), mask.sum(2)
    is_token = mask.gather(2, own.expand(batch, n)[..., None])[..., 0]
    anew = torch.zeros_like(is_token) if anew is None else anew
    first, count, is_token, anew = torch.stack((first, count, is_token.long(), anew.long())).cpu()  # the wait
    tokens, index = is_token.bool(), torch.arange(n)
    begins = tokens & ((count == 1) | ~F.pad(tokens[:, :-1], (1, 0)))
    for b, i in (anew.bool() & tokens & ~begins).nonzero().tolist():
        raise ValueError(PACKED.format(f"a new sequence at query {i} of batch {b}"))
    if s > n and window is not None and bool((begins & (count >= window)).any()):
        raise ValueError("attention_mask: within same_bits() keys before a window must be known, got their mask only")
    low = first.gather(1, torch.where(begins, index, 0).cummax(1).values)  # of the token's sequence
    place = s - n + index
    low = low if window is None else torch.maximum(low, place - window + 1)
    for b, i in (tokens & ((first != low) | (count != place - low + 1))).nonzero().tolist():
        raise ValueError(
            f"attention_mask: within same_bits() it must be causal within sequences that lie together, got "
            f"one whose query {i} of sequence {b} sees {count[b, i]} keys from {first[b, i]} on"
        )
    queries = (begins.flatten().cumsum(0) - 1)[tokens.flatten()].bincount(minlength=int(begins.sum()))
    parts = zip(begins.nonzero().tolist(), queries.tolist(), first[begins].tolist(), strict=True)
    return _placed([(b, begin, many, key) for (b, begin), many, key in parts], batch, n, s, window, mask.device)


def _placed(
    found: list[tuple[int, int, int, int]], batch: int, n: int, s: int, window: int | None, device: torch.device
) -> Sequences:
    """``found``: of each sequence its row of the batch, first query, number of queries, and first key."""
    whole = all(begin + s - n == key for _, begin, _, key in found)  # from the first token of each on
    most = max((queries for _, _, queries, _ in found), default=1)
    spans = [s - n + begin + queries - key for _, begin, queries, key in found]
    longest = most if whole else max(spans, default=1)
    rows = torch.zeros(len(found), most, dtype=torch.int64)
    keys = torch.zeros(len(found), longest, dtype=torch.int64)
    places = torch.full((batch * n,), len(found) * most, dtype=torch.int64)
    for r, (b, begin, queries, key) in enumerate(found):
        at = 0 if whole else most - queries
        rows[r, at : at + queries] = torch.arange(b * n + begin, b * n + begin + queries)
        keys[r, : spans[r]] = torch.arange(b * s + key, b * s + key + spans[r])
        places[b * n + begin : b * n + begin + queries] = torch.arange(r * most + at, r * most + at + queries)
    lengths = None if whole else torch.tensor(spans, dtype=torch.int64, device=device)
    return Sequences(rows.to(device), keys.to(device), lengths, places.to(device), window)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, where: Sequences, **how: Any) -> torch.Tensor:
    """query (B, H, N, D), key and value (B, H_kv, S, D) -> (B, N, H, D), zeros for padding; ``how``: of ``flash_attention``.

    Sequences are gathered into rows of a batch, each from its first key on, so that it does not matter what they lay beside.
    """
    batch, heads, n, d = query.shape

    def gathered(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        flat = t.transpose(1, 2).reshape(-1, t.shape[1], d)
        return flat.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)

    if where.queries.numel() == 0:
        return torch.zeros_like(query).transpose(1, 2).contiguous()
    q, k, v = gathered(query, where.queries), gathered(key, where.keys), gathered(value, where.keys)
    out = flash_attention(q, k, v, causal=True, lengths=where.lengths, window=where.window, **how)
    rows = out.transpose(1, 2).reshape(-1, heads, d)
    rows = torch.cat((rows, rows.new_zeros(1, heads, d)))
    return rows.index_select(0, where.places).view(batch, n, heads, d)
