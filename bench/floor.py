"""The floor under a function that is bound by memory: a kernel that reads the same bytes and does nothing else."""

from collections.abc import Sequence

import torch

from kernelbook import runtime  # noqa: F401  (before Triton, which it sets up)

# isort: split
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["L"])
def _read_rows_kernel(
    rows_ptr,  # (L,) integers, if LISTED
    a_ptr, b_ptr, c_ptr,  # (rows, W) int32; grid axis 1 chooses
    out_ptr,  # (programs,) int32
    L, W,
    LISTED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    base = a_ptr
    if tl.program_id(1) == 1:
        base = b_ptr
    if tl.program_id(1) == 2:
        base = c_ptr
    pos = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    rows = pos.to(tl.int64)
    if LISTED:
        rows = tl.load(rows_ptr + pos, mask=pos < L, other=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_W)
    words = base + rows[:, None] * W + offs[None, :]
    found = tl.zeros((BLOCK_L, BLOCK_W), tl.int32)
    for w in range(0, W, BLOCK_W):
        mask = (pos < L)[:, None] & (w + offs < W)[None, :]
        found ^= tl.load(words + w, mask=mask, other=0, eviction_policy="evict_first")
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr + program, tl.xor_sum(tl.reshape(found, (BLOCK_L * BLOCK_W,)), axis=0))


def _words(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(torch.int32)


def read_rows(matrices: Sequence[torch.Tensor], rows: torch.Tensor | None = None) -> torch.Tensor:
    """Reads rows of up to three contiguous matrices, whose rows are of one length, a multiple of 4 bytes.

    Args:
        matrices: (N, K) each, any dtype.
        rows: (L,) integers, all of them rows of the matrices, or ``None``: every row.

    Returns:
        (programs,) int32: exclusive ors of the words that were read; :func:`fold` joins them.
    """
    a, *others = (_words(matrix) for matrix in matrices)
    count = len(a) if rows is None else len(rows)
    # 2,048 words a program at least: eight loads of 16 bytes under way in each thread of two warps.
    block_w = max(32, min(2048, triton.next_power_of_2(a.shape[1])))
    block_l = max(1, 2048 // block_w)
    grid = (triton.cdiv(count, block_l), len(matrices))
    out = torch.empty(grid[0] * grid[1], dtype=torch.int32, device=a.device)
    _read_rows_kernel[grid](
        rows, *(a, *others, a, a)[:3], out, count, a.shape[1],
        LISTED=rows is not None, BLOCK_L=block_l, BLOCK_W=block_w, num_warps=2,
    )  # fmt: skip
    return out


def fold(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The exclusive or of all int32 words in ``parts``, as float64, which holds it exactly."""
    words = torch.cat([_words(part).flatten() for part in parts])
    while len(words) > 1:
        half = len(words) // 2
        words = torch.cat([words[:half] ^ words[half : 2 * half], words[2 * half :]])
    return words.double()
