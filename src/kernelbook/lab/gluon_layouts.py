"""What a layout of Gluon says, asked of the layout object itself: who owns which element, and what an access costs.

Triton turns any layout into a linear one: the place of an element is a sum of one vector for each bit of the register, of the
lane and of the warp that own it. That needs no GPU. Everything here is computed from those vectors.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernelbook import runtime  # noqa: F401  before Triton, which it sets up

# isort: split
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language

BANKS, BANK_BYTES, SECTOR_BYTES, VECTOR_BYTES = 32, 4, 32, 16


@functools.cache
def _builder() -> Any:
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    builder.keeps = context  # which it needs for as long as it lives
    return builder


@dataclasses.dataclass(frozen=True)
class Owners:
    """Who owns each element of a tile; integers of the tile's shape. Of several owners the first."""

    register: np.ndarray
    lane: np.ndarray
    warp: np.ndarray


def _places(bases: Sequence[Sequence[int]]) -> np.ndarray:
    """(2 ** bits, dimensions): where each number leads."""
    places = np.zeros((1, len(bases[0]) if bases else 1), np.int64)
    for basis in bases:
        places = np.concatenate([places, places ^ np.asarray(basis)])
    return places


def owners(layout: Any, shape: Sequence[int]) -> Owners:
    """Who owns which element of a tile.

    Args:
        layout: a layout of tiles in registers, such as ``BlockedLayout``, ``NVMMADistributedLayout``, ``DotOperandLayout``.
        shape: of the tile.
    """
    builder = _builder()
    linear = builder.to_linear_layout(layout._to_ir(builder), [*shape])
    found = [np.full(shape, -1) for _ in range(3)]
    parts = [_places(bases) if bases else np.zeros((1, len(shape)), np.int64) for bases in
             (linear.reg_bases, linear.lane_bases, linear.warp_bases)]  # fmt: skip
    for w, of_warp in enumerate(parts[2]):
        for t, of_lane in enumerate(parts[1]):
            for r, of_register in enumerate(parts[0]):
                at = tuple(of_warp ^ of_lane ^ of_register)
                if found[2][at] < 0:
                    for array, number in zip(found, (r, t, w), strict=True):
                        array[at] = number
    return Owners(*found)


def _accesses(layout: Any, shape: Sequence[int], offset: np.ndarray, itemsize: int) -> list[np.ndarray]:
    """What the first warp does: for each of its instructions the byte at which each lane's vector begins, and its bytes."""
    who = owners(layout, shape)
    lanes = [np.flatnonzero((who.warp == 0) & (who.lane == t)) for t in range(32)]
    lanes = [lane[np.argsort(who.register.flat[lane])] for lane in lanes if len(lane)]
    places = np.stack([offset.flat[lane] for lane in lanes]) * itemsize  # (lanes, registers)
    width = 1
    while width * itemsize < VECTOR_BYTES and 2 * width <= places.shape[1]:
        vectors = places.reshape(len(lanes), -1, 2 * width)
        steps = vectors - vectors[..., :1]
        aligned = vectors[..., 0] % (2 * width * itemsize) == 0
        if not (aligned.all() and (steps == itemsize * np.arange(2 * width)).all()):
            break
        width *= 2
    size = np.full(len(lanes), width * itemsize)
    return [np.stack([places[:, first], size]) for first in range(0, places.shape[1], width)]


def sectors(layout: Any, shape: Sequence[int], *, stride: int, itemsize: int = 2) -> tuple[int, int]:
    """How many sectors of 32 bytes the first load of a warp touches in global memory, and how many its bytes would fill.

    Args:
        layout, shape: of the tile that is loaded.
        stride: elements from one row of the matrix to the next.
        itemsize: bytes of an element.
    """
    rows, columns = np.indices(shape)
    first, size = _accesses(layout, shape, rows * stride + columns, itemsize)[0]
    touched = {int(b) // SECTOR_BYTES for begin, n in zip(first, size, strict=True) for b in (begin, begin + n - 1)}
    return len(touched), -(-int(size.sum()) // SECTOR_BYTES)


def offsets(shared: Any, shape: Sequence[int], itemsize: int = 2) -> np.ndarray:
    """At which element of shared memory each element of a tile lies.

    Args:
        shared: a ``SwizzledSharedLayout`` of rows, or an ``NVMMASharedLayout`` that is not transposed.
        shape: of the tile, (rows, columns).
        itemsize: bytes of an element.

    Raises:
        ValueError: another layout.
    """
    rows, columns = np.indices(shape)
    width = shape[1]
    if isinstance(shared, language.NVMMASharedLayout) and not shared.transposed:
        line = min(width, shared.swizzle_byte_width // itemsize)  # so many columns lie below each other
        vec = VECTOR_BYTES // itemsize
        block, inside = columns // line, columns % line
        per_phase = max(1, 128 // (line * itemsize))
        swizzled = inside // vec ^ (rows // per_phase) % max(1, line // vec)
        return block * shape[0] * line + rows * line + swizzled * vec + inside % vec
    if isinstance(shared, language.SwizzledSharedLayout) and [*shared.order] == [1, 0]:
        swizzled = columns // shared.vec ^ rows // shared.per_phase % shared.max_phase
        return rows * width + swizzled * shared.vec + columns % shared.vec
    raise ValueError(f"offsets: shared must be a layout of rows in shared memory, got {shared}")


def bank_conflicts(layout: Any, shared: Any, shape: Sequence[int], itemsize: int = 2) -> int:
    """How many turns more than its bytes need a warp takes for its first access to shared memory.

    Shared memory has 32 banks of 4 bytes. In one turn each bank gives one word, which any number of lanes may have.

    Args:
        layout: of the tile in registers.
        shared: see :func:`offsets`.
        shape, itemsize: of the tile, and the bytes of an element.
    """
    first, size = _accesses(layout, shape, offsets(shared, shape, itemsize), itemsize)[0]
    words = max(1, int(size[0]) // BANK_BYTES)
    together = len(first) // words  # lanes that one turn serves: 32, 16 or 8
    turns = 0
    for lane in range(0, len(first), together):
        asked = {int(begin) // BANK_BYTES + i for begin in first[lane : lane + together] for i in range(words)}
        turns += max(np.bincount([word % BANKS for word in asked]))
    return int(turns - words)


def drawing(
    numbers: np.ndarray,
    words: Sequence[Sequence[str]],
    *,
    title: str,
    cell: tuple[int, int] = (26, 18),
    columns: str = "column",
) -> str:
    """A tile as a table of coloured cells, in SVG that follows the page's colours and scrolls on a phone.

    Args:
        numbers: (rows, columns) integers: cells of one number have one colour.
        words: (rows, columns) what stands in each cell; neighbours in a row with one word and one number become one cell.
        title: what it shows, for those who do not see it.
        cell: width and height of a cell.
        columns: what they are.
    """
    (high, wide), (w, h) = numbers.shape, cell
    left, top, hues = 44, 22, [210, 30, 150, 330, 265, 90, 0, 180]
    parts = [f'<text x="{left}" y="13">{columns} 0</text>']
    parts.append(f'<text x="{left + wide * w}" y="13" text-anchor="end">{wide - 1}</text>')
    for i in range(high):
        if i in (0, high - 1):
            text = "row 0" if i == 0 else str(i)
            parts.append(f'<text x="{left - 5}" y="{top + i * h + h - 5}" text-anchor="end">{text}</text>')
        j = 0
        while j < wide:
            end = j
            while end < wide and (numbers[i, end], words[i][end]) == (numbers[i, j], words[i][j]):
                end += 1
            x, y, width = left + j * w, top + i * h, (end - j) * w
            color = f"hsl({hues[int(numbers[i, j]) % 8]} 70% 55% / 0.3)"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width}" height="{h}" fill="{color}" stroke="currentColor" stroke-opacity="0.35"/>'
            )
            parts.append(f'<text x="{x + width / 2}" y="{y + h - 5}" text-anchor="middle">{words[i][j]}</text>')
            j = end
    size = (left + wide * w + 2, top + high * h + 2)
    style = (
        f"min-width:{min(size[0], 480)}px;max-width:{size[0]}px;width:100%;height:auto;font-size:11px;fill:currentColor"
    )
    svg = (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{title}" style="{style}">{"".join(parts)}</svg>'
    )
    return f'<div style="overflow-x:auto" tabindex="0" role="group" aria-label="a drawing">{svg}</div>'
