"""Prediction of the norms of chunks by their neighbours, choice of the largest, and AdamW by chunks.

Chunks of several layers lie one after the other: layer ``l`` has chunks ``starts[l]`` to ``starts[l + 1]``. Nothing here
tells the host anything, so that a whole training step can be enqueued ahead, or captured in a CUDA graph.

    neighbours    BLOCK_Q chunks against all of their layer: a tile of squared distances, its smallest entry K times
    top chunks    the rank of a chunk is the number of better ones; those whose rank is small enough write their id there
    AdamW         one program a chunk and BLOCK elements; reads 16 and writes 12 bytes an element of those chunks that move

Not handled: layers of more than 4,096 chunks in the neighbour kernel, whose tile has a column for each.
"""

from kernelbook import runtime  # noqa: F401  before Triton, which it sets up

# isort: split
import triton
import triton.language as tl

KNN_TILE = 8192  # distances that one program of the neighbour kernel holds
TOP_BLOCK = 64  # chunks that one program ranks, against as many at a time
ADAMW_CONFIG = triton.Config({"BLOCK": 2048}, num_warps=8)
BLOCK_A = 128  # ids looked at in a step


@triton.jit
def _knn_scores_kernel(
    features_ptr,  # (R, N) features of all chunks
    norms_ptr,  # (N,) norms as observed last
    seen_ptr,  # (N,) when that was; negative: never
    step_ptr,  # (1,) now
    scores_ptr,  # (N,) out
    starts_ptr,  # (L + 1,)
    N, R, window,
    K: tl.constexpr, EPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1)
    first, last = tl.load(starts_ptr + layer), tl.load(starts_ptr + layer + 1)
    now = tl.load(step_ptr)
    offs_q = first + tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offs_c = first + tl.arange(0, BLOCK_C)
    mask_q, mask_c = offs_q < last, offs_c < last
    distance = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    for r in range(R):
        fq = tl.load(features_ptr + r * N + offs_q, mask=mask_q, other=0.0)
        fc = tl.load(features_ptr + r * N + offs_c, mask=mask_c, other=0.0)
        difference = fq[:, None] - fc[None, :]
        distance += difference * difference
    seen_q = tl.load(seen_ptr + offs_q, mask=mask_q, other=-1)
    seen_c = tl.load(seen_ptr + offs_c, mask=mask_c, other=-1)
    fresh_q = (seen_q >= 0) & (now - seen_q <= window)
    fresh_c = (seen_c >= 0) & (now - seen_c <= window)
    known = tl.load(norms_ptr + offs_c, mask=mask_c, other=0.0)
    another = offs_q[:, None] != offs_c[None, :]
    distance = tl.where(fresh_c[None, :] & another, distance, float("inf"))
    total = tl.zeros((BLOCK_Q,), tl.float32)
    weights = tl.zeros((BLOCK_Q,), tl.float32)
    for _ in tl.static_range(K):
        nearest = tl.min(distance, axis=1)
        # The first of those that are equally near.
        equal = distance == nearest[:, None]
        at = tl.min(tl.where(equal, offs_c[None, :], 2**30), axis=1)
        chosen = offs_c[None, :] == at[:, None]
        weight = tl.where(nearest < float("inf"), 1.0 / (nearest + EPS), 0.0)
        norm = tl.sum(tl.where(chosen, known[None, :], 0.0), axis=1)
        total += weight * norm
        weights += weight
        distance = tl.where(chosen, float("inf"), distance)
    own = tl.load(norms_ptr + offs_q, mask=mask_q, other=0.0)
    # Without a neighbour: what was observed long ago; what never was comes first.
    fallback = tl.where(seen_q >= 0, own, float("inf"))
    predicted = total / tl.where(weights > 0, weights, 1.0)
    predicted = tl.where(weights > 0, predicted, fallback)
    tl.store(scores_ptr + offs_q, tl.where(fresh_q, own, predicted), mask=mask_q)


@triton.jit
def _rank_keys(
    scores_ptr, taken_ptr, offs, mask, seed, now, N,
    RANDOM: tl.constexpr, HAS_TAKEN: tl.constexpr,
):  # fmt: skip
    """Scores, or random numbers; negative infinity where taken."""
    if RANDOM:
        keys = tl.rand(seed, now * N + offs)
    else:
        keys = tl.load(scores_ptr + offs, mask=mask, other=0.0)
        # NaN: a gradient that overflowed is a large one.
        keys = tl.where(keys == keys, keys, float("inf"))
    if HAS_TAKEN:
        taken = tl.load(taken_ptr + offs, mask=mask, other=1)
        keys = tl.where(taken != 0, float("-inf"), keys)
    return keys


@triton.jit(do_not_specialize=["seed"])
def _top_chunks_kernel(
    scores_ptr,  # (N,), if not RANDOM
    taken_ptr,  # (N,) chunks that are not to be chosen, if HAS_TAKEN
    chosen_ptr,  # (N,) out: taken or chosen now
    ids_ptr,  # (total,) out: ids within their layer, best first
    starts_ptr,  # (L + 1,) first chunk of each layer
    slots_ptr, counts_ptr,  # (L,) where in ids to write, and how many
    step_ptr,  # (1,) now
    seed, N, longest,
    RANDOM: tl.constexpr, HAS_TAKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1)
    first, last = tl.load(starts_ptr + layer), tl.load(starts_ptr + layer + 1)
    now = tl.load(step_ptr)
    offs = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < last
    mine = _rank_keys(
        scores_ptr, taken_ptr, offs, mask, seed, now, N, RANDOM, HAS_TAKEN
    )  # fmt: skip
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, longest, BLOCK):
        offs_j = first + start + tl.arange(0, BLOCK)
        mask_j = offs_j < last
        other = _rank_keys(
            scores_ptr, taken_ptr, offs_j, mask_j, seed, now, N, RANDOM, HAS_TAKEN
        )  # fmt: skip
        equal = other[None, :] == mine[:, None]
        earlier = offs_j[None, :] < offs[:, None]
        better = (other[None, :] > mine[:, None]) | (equal & earlier)
        rank += tl.sum((better & mask_j[None, :]).to(tl.int32), axis=1)
    chosen = mask & (rank < tl.load(counts_ptr + layer))
    ids_ptrs = ids_ptr + tl.load(slots_ptr + layer) + rank
    tl.store(ids_ptrs, (offs - first).to(ids_ptr.dtype.element_ty), mask=chosen)
    if HAS_TAKEN:
        chosen |= tl.load(taken_ptr + offs, mask=mask, other=0) != 0
    tl.store(chosen_ptr + offs, chosen.to(tl.int32), mask=mask)


# Hyperparameters are no constants: each step of a schedule would compile a kernel.
@triton.jit(do_not_specialize=["A"])
def _adamw_chunks_kernel(
    rows_ptr,  # (A * CHUNK,) if SPARSE: to which row each of the gradient belongs
    grad_ptr,  # (A * CHUNK, D) if SPARSE, else (rows, D); contiguous, as what follows
    param_ptr, exp_avg_ptr, exp_avg_sq_ptr,  # (rows, D) float32, changed in place
    counts_ptr,  # (chunks,) updates of each chunk, this one included
    lr_ptr, scale_ptr,  # (1,) learning rate; what the gradient is multiplied with
    rows, D, A,
    beta1, rest1, beta2, rest2,  # rest = 1 - beta, which would lose digits here
    log2_beta1: tl.float64, log2_beta2: tl.float64,
    eps, weight_decay,
    CHUNK: tl.constexpr, SPARSE: tl.constexpr, DECAY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    chunk = slot
    if SPARSE:
        if DECAY:  # a program for each chunk, which looks for its gradient
            found = tl.full((BLOCK_A,), -1, tl.int32)
            for start in range(0, A, BLOCK_A):
                offs_a = start + tl.arange(0, BLOCK_A)
                mask_a = offs_a < A
                row = tl.load(rows_ptr + offs_a * CHUNK, mask=mask_a, other=-1)
                found = tl.maximum(found, tl.where(row == chunk * CHUNK, offs_a, -1))
            slot = tl.max(found, axis=0)
        else:  # a program for each chunk that has a gradient
            row = tl.load(rows_ptr + slot * CHUNK)
            chunk = tl.where((row >= 0) & (row < rows), row // CHUNK, -1).to(tl.int32)
    within = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = chunk.to(tl.int64) * CHUNK * D + within
    mask = (within < CHUNK * D) & (offs < tl.cast(rows, tl.int64) * D) & (chunk >= 0)
    grad_ptrs = grad_ptr + slot.to(tl.int64) * CHUNK * D + within
    grad = tl.load(grad_ptrs, mask=mask & (slot >= 0), other=0.0)
    grad *= tl.load(scale_ptr)
    exp_avg = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)
    param = tl.load(param_ptr + offs, mask=mask, other=0.0)
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
    # In float64: in float32 1 - beta^count loses digits when beta is close to 1.
    inside = (chunk >= 0) & (chunk * CHUNK < rows)
    count = tl.load(counts_ptr + chunk, mask=inside, other=1.0).to(tl.float64)
    correction1 = (1.0 - tl.exp2(count * log2_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp2(count * log2_beta2)).to(tl.float32)
    lr = tl.load(lr_ptr)
    update = (exp_avg / correction1) / (tl.sqrt(exp_avg_sq / correction2) + eps)
    param = param * (1.0 - lr * weight_decay) - lr * update
    tl.store(param_ptr + offs, param, mask=mask)
    tl.store(exp_avg_ptr + offs, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offs, exp_avg_sq, mask=mask)
