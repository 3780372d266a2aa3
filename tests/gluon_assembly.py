"""What the inline assembly of our kernels in Gluon gives, for ``kernelbook.lab.gluon``: tables of 4-bit codes, turns of programs."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from kernelbook.attention import kernels_hopper
from kernelbook.lab.gluon_memory import GluonError, Program, make_tensor
from kernelbook.packed import kernels

# A matrix has fewer than 2^31 elements (``products.plan``), and they are counted from its first one; strides that ``op`` checks.
BOUNDED = ("N", "K")


def _words(tables: Sequence[np.ndarray], words: np.ndarray) -> list[np.ndarray]:
    """Eight elements of each word by sixteen values of 16 bits, whose low bytes are in four registers, the high ones in four."""
    registers = [np.asarray(t).astype(np.int64) & 0xFFFFFFFF for t in tables]

    def value(code: np.ndarray) -> np.ndarray:
        low, high = (
            np.choose(code // 4, np.broadcast_arrays(*part, code)[:4]) >> (code % 4 * 8) & 0xFF
            for part in (registers[:4], registers[4:])
        )
        return low | high << 8

    words = words.astype(np.int64) & 0xFFFFFFFF
    # The even element is the high half of its byte.
    elements = [value(words >> 4 * (j ^ 1) & 15) for j in range(8)]
    return [elements[2 * i] | elements[2 * i + 1] << 16 for i in range(4)]


def _int32(bits: np.ndarray) -> np.ndarray:
    return (bits & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def _scaled(pairs: list[np.ndarray], first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
    def half(bits: np.ndarray, h: int) -> np.ndarray:
        return (np.asarray(bits).astype(np.int64) >> 16 * h & 0xFFFF).astype(np.uint16).view(np.float16).astype(float)

    found = []
    for pair in pairs:
        bits = []
        for h in range(2):  # two fused multiplications and additions in float16
            rest = (half(pair, h) * half(second, h)).astype(np.float16).astype(float)
            value = (half(pair, h) * half(first, h) + rest).astype(np.float16)
            bits.append(value.view(np.uint16).astype(np.int64))
        found.append(_int32(bits[0] | bits[1] << 16))
    return found


def _decode_scaled(word: np.ndarray, first: np.ndarray, second: np.ndarray, *tables: np.ndarray) -> list[np.ndarray]:
    return _scaled(_words(tables, word), first, second)


def _e2m1(kind: str, far: bool, word: np.ndarray, first: np.ndarray, second: Any = 0) -> list[np.ndarray]:
    bias = 2.0**-14 if kind == "e4m3 alone" else 1.0
    magnitudes = (np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6)) * bias).astype(np.float16)
    bits = np.concatenate([magnitudes, -magnitudes]).view(np.uint16).astype(np.int64)
    tables = [sum((bits[4 * i + j] >> shift & 0xFF) << 8 * j for j in range(4)) for shift in (0, 8) for i in range(4)]
    near = [pair.astype(np.int64) for pair in _words([np.asarray(t) for t in tables], word)]
    elements = [pair >> shift & 0xFFFF for pair in near for shift in (0, 16)]
    pairs = [elements[i] | elements[i + 4] << 16 for i in range(4)] if far else near
    return _scaled(pairs, first, np.asarray(second))


def _table(*values: np.ndarray) -> list[np.ndarray]:
    *code, scale = values
    bits = [(c * scale).astype(np.float32).astype(np.float16).view(np.uint16).astype(np.int64) for c in code]
    return [
        _int32(functools.reduce(operator.or_, ((bits[4 * i + j] >> shift & 0xFF) << 8 * j for j in range(4))))
        for shift in (0, 8)
        for i in range(4)
    ]


def _ask(counter: Any) -> Any:
    """Programs run one after the other: what a counter is not yet, it never becomes."""
    here, asked = Program.current.here.notes, counter.handle.data.item()
    if here.get("asked", 0) == asked:
        raise GluonError("deadlock", "a program waits for a turn that nobody will pass on to it")
    here["asked"] = asked
    return tl.atomic_add(counter, 0, sem="acquire", _semantic=interpreter.interpreter_semantic)


def _pass(counter: Any, turn: Any) -> Any:
    passed = turn.handle.data >= 0 if isinstance(turn, tl.tensor) else turn >= 0
    if not passed:
        return turn
    return tl.atomic_xchg(counter, turn, sem="release", _semantic=interpreter.interpreter_semantic)


_TURNS: dict[str, Callable[..., Any]] = {
    kernels_hopper.ASK.value: _ask,
    kernels_hopper.PASS.value: _pass,
}


_ASSEMBLY: dict[str, Callable[..., list[np.ndarray]]] = {
    **{
        asm: functools.partial(_e2m1, kind, far)
        for (kind, is_bf16, far), asm in kernels.E2M1.value.items()
        if not is_bf16
    },
    kernels.DECODE_FP16.value: _decode_scaled,
    kernels.TABLE_FP16.value: _table,
    kernels.LOOKUP.value: lambda words, *tables: [_int32(p) for p in _words(tables, words)],
}


def assembly(asm: str, args: Sequence[Any], dtype: Any) -> Any:
    """What ``inline_asm_elementwise`` returns."""
    if asm in _TURNS:
        return _TURNS[asm](*args)
    data = np.broadcast_arrays(*(arg.handle.data for arg in args))
    layout = next((arg.type.layout for arg in args if arg.type.is_block()), False)
    found = [make_tensor(d, tl.int32, layout) for d in _ASSEMBLY[asm](*data)]
    return tuple(found) if isinstance(dtype, tuple) else found[0]
