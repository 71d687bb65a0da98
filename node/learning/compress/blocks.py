"""Chunks where they stand: blocks of matrices in the model's memory, which the encoder reads without a copy.

Rows of the arena `[N, 4096]` are such a matrix too, with one block in each row of blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from torch import Tensor

from atoll.node.learning.kernels.compiled import Floats, Ints, Ints32, Made, compiled, in_llvm, inlined
from atoll.protocols.run.arena import CHUNK, SIDE

LARGE = np.float32(2.0**64)
"""With weights below it a finite residual stays finite for more rounds than anybody trains."""
LARGEST = 0x5F800000
"""Its bits."""
_INT, _WORD = ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), SIDE), ir.VectorType(_INT, SIDE)
_ADDRESS, _STRIDE, _ROWS, _COLS, _ACROSS, _FIRST, _END, _SHIFT = range(8)
"""Columns of a table: address of the matrix, values from row to row, its size, blocks in a row of blocks, number
of the block that chunk 0 would be, the chunk behind its last one, and its chunks' rows in the arrays of e and the
anchor less their numbers."""


class Blocks(NamedTuple):
    """Chunks that are blocks of float32 matrices; `table` has a row for each matrix."""

    table: Ints
    kept: Sequence[Tensor]
    """The matrices: the table has addresses only."""


def is_readable(matrix: Tensor) -> bool:
    """Whether the blocks of a matrix can be read where they stand."""
    return matrix.device.type == "cpu" and matrix.dtype == torch.float32 and matrix.stride(1) == 1


class MatrixPart(NamedTuple):
    """Blocks of a matrix that are consecutive chunks."""

    matrix: Tensor
    first: int
    """Number of the first block in the matrix."""
    chunks: int
    row: int
    """Row of the first one in the arrays of e and the anchor."""


def blocks_of(parts: Sequence[MatrixPart]) -> Blocks:
    """Chunks of readable matrices, one after the other."""
    rows, end = [], 0
    for matrix, first, count, row in parts:
        height, width = matrix.shape
        rows.append(
            (
                matrix.data_ptr(),
                matrix.stride(0),
                height,
                width,
                -(-width // SIDE),
                first - end,
                end + count,
                row - end,
            )
        )
        end += count
    return Blocks(np.array(rows, np.int64), [part.matrix for part in parts])


def blocks_of_rows(rows_N4096: Tensor) -> Blocks:
    """Contiguous float32 rows of the arena as blocks."""
    return blocks_of([MatrixPart(rows_N4096.view(-1, SIDE), 0, len(rows_N4096), 0)])


def _vector(context: Any, builder: Any, signature: Any, args: Any, number: int, at: Any) -> Any:
    """Pointer to SIDE values of an array from `at` on."""
    array = context.make_array(signature.args[number])(context, builder, args[number])
    place = cgutils.get_item_pointer(context, builder, signature.args[number], array, (at,))
    return builder.bitcast(place, _FLOATS.as_pointer())


@in_llvm
def _add_row(_: Any, e: Any, anchor: Any, at: Any, address: Any, beta: Any, moves: Any) -> Made:
    """SIDE values from `at` on: e ← β·e + (anchor − local), with local weights at an address.

    `moves`: anchor ← local.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ours = _vector(context, builder, signature, args, 0, args[2])
        theirs = _vector(context, builder, signature, args, 1, args[2])
        local = builder.load(builder.inttoptr(args[3], _FLOATS.as_pointer()), align=4)
        betas: Any = ir.Constant(_FLOATS, ir.Undefined)
        for lane in range(SIDE):
            betas = builder.insert_element(betas, args[4], _INT(lane))
        # Rounded after each operation, in this order: a fused multiply-add would give other bits elsewhere.
        kept = builder.fmul(builder.load(ours, align=4), betas)
        gained = builder.fsub(builder.load(theirs, align=4), local)
        builder.store(builder.fadd(kept, gained), ours, align=4)
        with builder.if_then(args[5]):
            builder.store(local, theirs, align=4)
        return context.get_dummy_value()

    return types.void(e, anchor, types.int64, types.int64, types.float32, types.boolean), code


@in_llvm
def _mark_large(_: Any, marks: Any, address: Any) -> Made:
    """Set the sign of int32 `marks` `[SIDE]` where the float32 value at the address is 2⁶⁴ or more, or NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = builder.bitcast(_vector(context, builder, signature, args, 0, _WORD(0)), _INTS.as_pointer())
        bits = builder.load(builder.inttoptr(args[1], _INTS.as_pointer()), align=4)
        size = builder.and_(bits, ir.Constant(_INTS, [0x7FFFFFFF] * SIDE))
        left = builder.sub(ir.Constant(_INTS, [LARGEST - 1] * SIDE), size)
        builder.store(builder.or_(builder.load(into, align=4), left), into, align=4)
        return context.get_dummy_value()

    return types.void(marks, types.int64), code


@in_llvm
def _value(_: Any, address: Any) -> Made:
    """The float32 value at an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)

    return types.float32(types.int64), code


@inlined
def extent(matrix: Ints, at: int) -> tuple[int, int, int]:
    """Address of the first value of chunk `at` of a matrix, a row of the table; its rows and columns there."""
    row, col = SIDE * ((matrix[_FIRST] + at) // matrix[_ACROSS]), SIDE * ((matrix[_FIRST] + at) % matrix[_ACROSS])
    start = matrix[_ADDRESS] + 4 * (row * matrix[_STRIDE] + col)
    return start, min(SIDE, matrix[_ROWS] - row), min(SIDE, matrix[_COLS] - col)


@inlined
def add_up(e: Floats, anchor: Floats, matrix: Ints, at: int, beta: Any, moves: bool) -> None:
    """e ← β·e + (anchor − local) of chunk `at`; padding of local is zero. `moves`: anchor ← local."""
    start, height, width = extent(matrix, at)
    for y in range(SIDE):
        here = start + 4 * y * matrix[_STRIDE]
        if y < height and width == SIDE:
            _add_row(e, anchor, SIDE * y, here, beta, moves)
        else:
            for x in range(SIDE):
                i = SIDE * y + x
                local = _value(here + 4 * x) if y < height and x < width else np.float32(0)
                e[i] = e[i] * beta + (anchor[i] - local)
                if moves:
                    anchor[i] = local


@inlined
def clear_padding(matrix: Ints, at: int, chunk: Floats) -> None:
    """Set what the matrix does not have of chunk `at` to zero."""
    _, height, width = extent(matrix, at)
    if height < SIDE or width < SIDE:
        for i in range(CHUNK):
            if i // SIDE >= height or i % SIDE >= width:
                chunk[i] = np.float32(0)


@compiled
def are_sound(table: Ints, marks: Ints32) -> bool:
    """Whether every magnitude is below 2⁶⁴; false for NaN. `marks`: zeros `[SIDE]` to work in."""
    at = 0
    for part in range(len(table)):
        matrix = table[part]
        while at < matrix[_END]:
            # All blocks of a row of blocks at once, because a matrix is read faster along its rows.
            block = matrix[_FIRST] + at
            across = min(matrix[_ACROSS] - block % matrix[_ACROSS], matrix[_END] - at)
            start, height, _ = extent(matrix, at)
            width = min(SIDE * across, matrix[_COLS] - SIDE * (block % matrix[_ACROSS]))
            for y in range(height):
                here = start + 4 * y * matrix[_STRIDE]
                for x in range(0, width - SIDE + 1, SIDE):
                    _mark_large(marks, here + 4 * x)
                for x in range(width // SIDE * SIDE, width):
                    if not abs(_value(here + 4 * x)) < LARGE:
                        return False
            at += across
    seen = np.int32(0)
    for lane in range(SIDE):
        seen |= marks[lane]
    return bool(seen >= 0)


@inlined
def chunks_in(table: Ints) -> int:
    """Number of chunks of all matrices."""
    return int(table[len(table) - 1, _END])


@inlined
def row_of(matrix: Ints, at: int) -> int:
    """Row of chunk `at` of a matrix in the arrays of e and the anchor."""
    return int(matrix[_SHIFT] + at)


@inlined
def part_of(table: Ints, part: int, at: int) -> int:
    """The matrix that chunk `at` is of: `part` or one behind it."""
    while at >= table[part, _END]:
        part += 1
    return part
