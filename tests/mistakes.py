"""Honest mistakes: a right solution of ``tests/solutions`` with a line made wrong, and what the judge has to say of it.

Each is the task, what stands there, what is written instead, words of the sentence, and the kind that the hint follows.
"""

MISTAKES = {
    # --- what the interpreter does not show: the compiler says it
    "a_python_global": ("rms_norm", "EPS = tl.constexpr(1e-6)", "EPS = 1e-6", "Cannot access global variable EPS", "compile"),
    "a_dot_of_8_by_8": ("matmul", "BLOCK_M=32, BLOCK_N=32, BLOCK_K=32", "BLOCK_M=8, BLOCK_N=8, BLOCK_K=8", "tl.dot takes tiles of at least 16", "compile", "triton.cdiv(M, 32), triton.cdiv(N, 32)\n        _matmul", "triton.cdiv(M, 8), triton.cdiv(N, 8)\n        _matmul"),
    "a_break": (
        "logsumexp", "        biggest = larger\n", "        biggest = larger\n        if start + BLOCK_N >= N:\n            break\n",
        "A kernel is no Python", "compile",
    ),
    "a_dict": (
        "row_sum", "    tl.store(out_ptr + row, tl.sum(x)", "    parts = {0: x}\n    tl.store(out_ptr + row, tl.sum(parts[0])", "A kernel is no Python", "compile",
    ),
    "numpy_in_a_kernel": (
        "row_sum", "    tl.store(out_ptr + row, tl.sum(x)", "    tl.store(out_ptr + row, tl.sum(x * abs(float(np.float32(1))))", "does not compile", "compile",
    ),
    "a_size_that_is_no_constant": ("copy", "n, BLOCK: tl.constexpr):", "n, BLOCK):", "BLOCK: tl.constexpr", "compile"),
    "a_tile_of_96": ("copy", "BLOCK=1024)", "BLOCK=96)", "power of 2", "compile"),
    "a_root_of_16_bits": ("rms_norm", "tl.sum(x * x) / N + EPS)", "(tl.sum(x * x) / N + EPS).to(x_ptr.dtype.element_ty))", "fp32", "compile"),
    # --- masks and what lies beyond
    "no_mask_on_the_load": ("vector_add", "y_ptr + offs * stride_y, mask=mask, other=0.0", "y_ptr + offs * stride_y", "a load of 4 bytes out of bounds", "mask"),
    "no_mask_on_the_store": ("vector_add", "out_ptr + offs, x + y, mask=mask", "out_ptr + offs, x + y", "a store of 4 bytes out of bounds", "mask"),
    "no_other": ("row_sum", "mask=offs_n < N, other=OTHER", "mask=offs_n < N", "NaN", "tail"),
    "zeros_before_the_exponential": ("softmax", 'N, -float("inf"), BLOCK_N)', "N, 0.0, BLOCK_N)", "is off by", "tail"),
    "a_masked_zero_is_the_largest": ("row_argmax", 'N, -float("inf"), BLOCK_N)', "N, 0.0, BLOCK_N)", "is wrong in", "tail"),
    "a_mean_by_the_tile": ("rms_norm", "tl.sum(x * x) / N + EPS", "tl.sum(x * x) / BLOCK_N + EPS", "is off by", "tail"),
    "a_program_too_few": ("copy", "triton.cdiv(len(x), 1024)", "max(len(x) // 1024, 1)", "NaN in 3 of 4099 elements", "tail"),
    "one_tile_for_all_rows": ("row_sum", "BLOCK_N=triton.next_power_of_2(N)", "BLOCK_N=1024", "is off by", "tail"),
    "an_atomic_without_a_mask": ("expert_counts", "1, mask=offs < T", "1", "is wrong in", ""),
    # --- strides
    "rows_of_N": ("softmax", "_softmax_kernel[(M,)](x, *x.stride()", "_softmax_kernel[(M,)](x, N, 1", "", "stride"),
    "the_weight_is_contiguous": ("rms_norm", "x, *x.stride(), weight, weight.stride(0), y", "x, *x.stride(), weight, 1, y", "", "stride"),
    "the_residual_lies_as_x_does": ("residual_relu", "*residual.stride()", "*x.stride()", "mixed", "stride"),
    "the_addend_lies_as_x_does": ("vector_add", "y, y.stride(0)", "y, x.stride(0)", "mixed", "stride"),
    "ids_are_contiguous": ("topk_gather", "slot // k * stride_t + slot % k * stride_k", "slot", "", "stride"),
    "dy_is_contiguous": ("softmax_autograd", "dy, *dy.stride(), y", "dy, dy.shape[1], 1, y", "", "dy"),
    "the_result_lies_as_x_does": ("softmax", "y = torch.empty(M, N, dtype=x.dtype, device=x.device)", "y = torch.empty_like(x)", "is off by", "stride"),
    "a_view_for_a_copy": ("transposed_copy", "    if M:\n        _transpose", "    return x.t().clone()\n    if M:\n        _transpose", "copying is the task", "rule"),
    "not_contiguous": (
        "transposed_copy", "y_ptr + offs_n[:, None] * M + offs_m[None, :]", "y_ptr + offs_n[:, None] + offs_m[None, :] * N", "is not contiguous", "contiguous",
        "    y = torch.empty(N, M, dtype=x.dtype, device=x.device)", "    y = torch.empty(M, N, dtype=x.dtype, device=x.device).t()",
    ),
    "the_stride_of_the_other_side": ("transposed_copy", "y_ptr + offs_n[:, None] * M + offs_m", "y_ptr + offs_n[:, None] * N + offs_m", "out of bounds", "mask"),
    # --- digits
    "a_sum_in_bfloat16": (
        "column_sum", "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.bfloat16 if x_ptr.dtype.element_ty == tl.bfloat16 else tl.float32)", "bfloat16", "dtype",
        "BLOCK_M=32, BLOCK_N=32", "BLOCK_M=1, BLOCK_N=32", "other=0.0).to(tl.float32)\n    tl.store(out_ptr + offs_n, tl.sum(acc", "other=0.0).to(acc.dtype)\n    tl.store(out_ptr + offs_n, tl.sum(acc",
    ),
    "squares_in_16_bits": ("rms_norm", "other=0.0).to(tl.float32)", "other=0.0)", "float16, numbers around 300", "scale"),
    "sums_in_16_bits": ("vector_add", "out_ptr + offs, x + y", "out_ptr + offs, (x.to(tl.float16) + y.to(tl.float16)).to(x.dtype)", "float32", "dtype"),
    "products_in_tf32": ("matmul", ', input_precision="ieee"', "", "float32", "dtype"),
    "no_maximum": ("softmax", "tl.exp(x - tl.max(x))", "tl.exp(x)", "numbers around 300", "scale"),
    "no_maximum_in_16_bits": (
        "softmax", "x = tl.exp(x - tl.max(x))", "x = tl.exp(x - (tl.max(x) if x_ptr.dtype.element_ty == tl.float32 else 0.0))", "float16", "scale",
    ),
    "no_maximum_before_a_gradient": ("softmax_autograd", "tl.exp(x - tl.max(x))", "tl.exp(x)", "numbers around 300", "scale"),
    "the_last_of_equal_ones": ("row_argmax", "tl.argmax(x, axis=0)", "tl.max(tl.where(x == tl.max(x), tl.arange(0, BLOCK_N), -1))", "is wrong in", "scale"),
    "rows_dropped_in_float16": ("rms_norm_dw", "partial, M, N,\n", "partial, min(M, 32) if x.dtype == torch.float16 else M, N,\n", "float16", "dtype"),
    # --- 32 bits
    "a_row_of_32_bits": ("softmax", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", ".to(tl.int64)", "overflow"),
    "columns_of_32_bits": ("row_sum", "offs_n = tl.arange(0, BLOCK_N).to(tl.int64)", "offs_n = tl.arange(0, BLOCK_N)", "an offset is a product", "overflow"),
    "a_row_of_32_bits_in_a_loop": ("rms_norm_dw", "row = tl.cast(i, tl.int64)", "row = i", ".to(tl.int64)", "overflow"),
    # --- programs and threads
    "a_race": ("expert_counts", "tl.atomic_add(counts_ptr + ids, 1, mask=offs < T)", "tl.store(counts_ptr + ids, tl.load(counts_ptr + ids, mask=offs < T, other=0) + 1, mask=offs < T)", "", ""),
    "no_zeros_to_add_to": ("expert_counts", "torch.zeros(num_experts", "torch.empty(num_experts", "is wrong in", ""),
    "no_barrier": (
        "strided_copy", "    tl.store(out_ptr + row * N + offs, x, mask=offs < N)",
        "    tl.store(out_ptr + row * N + offs, x, mask=offs < N)\n    y = tl.load(out_ptr + row * N + N - 1 - offs, mask=offs < N, other=0.0)\n    tl.store(out_ptr + row * N + N - 1 - offs, y, mask=offs < N)",
        "without a barrier", "barrier",
    ),
    # --- what comes back
    "no_return": ("row_sum", "    return out\n\n\n@triton.jit\ndef _row_argmax", "\n\n@triton.jit\ndef _row_argmax", "returned None: is its `return` missing?", "return"),
    "in_float32": ("row_sum", "out = torch.empty(M, dtype=x.dtype, device=x.device)\n    if M:\n        _row_sum", "out = torch.empty(M, device=x.device)\n    if M:\n        _row_sum", "is torch.float32, expected torch.float16", "return"),
    "in_place": ("copy", "out = torch.empty_like(x)", "out = x", "lies in the memory of an input", "return"),
    "an_exclusive_scan": ("running_sum", "tl.cumsum(x, axis=0)", "tl.cumsum(x, axis=0) - x", "is off by", ""),
    "a_gradient_forgotten": ("softmax_autograd", "return softmax_backward(dy, *ctx.saved_tensors)", "return None", "no gradient by x", "grads"),
    "no_autograd": ("softmax_autograd", "return Softmax.apply(x)", "return softmax(x)", "has no gradient", "grads"),
    "a_result_that_is_kept": (
        "copy", "def copy(x):\n    out = torch.empty_like(x)", "KEPT = {}\n\n\ndef copy(x):\n    out = KEPT.setdefault((len(x), x.dtype), torch.empty_like(x))", "of several calls", "kept",
    ),
    "every_second_call": ("copy", "    if len(x):\n        _copy", "    KEPT.append(x.shape)\n    if len(KEPT) % 2:\n        _copy", "called once more, it is right", "again", "def copy(x):", "KEPT = []\n\n\ndef copy(x):"),
    # --- not judged
    "pytorch_sums": ("row_sum", "    if M:\n        _row_sum_kernel", "    return x.sum(-1)\n    if M:\n        _row_sum_kernel", "PyTorch computes in it: sum", "rule"),
    "the_host_waits": ("row_sum", "    if M:\n        _row_sum_kernel", "    if M and x.max().item() > -1e9:\n        _row_sum_kernel", "PyTorch computes in it", "rule"),
    "a_driver_at_import": ("copy", "import triton.language as tl\n", "import triton.language as tl\n\nDEVICE = triton.runtime.driver.active.get_active_torch_device()\n", "take the device of the inputs", "load"),
    "another_name": ("copy", "def copy(", "def copies(", "defines no function copy", "load"),
    "no_python": ("copy", "def copy(x):", "def copy(x)", "SyntaxError", "load"),
}  # fmt: skip
