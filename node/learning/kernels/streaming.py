"""Sums that go past the caches: what compiled loops cannot say in numba's Python, in LLVM's terms.

A fold writes every weight once and reads none of what it wrote. An ordinary store first fetches the line that it
overwrites; a non-temporal one does not, which is a third of the memory traffic of θ + U.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from atoll.protocols.run.arena import CHUNK

ALIGN_BYTES = 64
"""Alignment of a row that is written: streaming stores to others fault. Rows are 16 KiB, so that of the array."""
_LANES = ALIGN_BYTES // 4
_INT = ir.IntType(32)
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_INT, _LANES)
_ZERO = ir.Constant(_VECTOR, [0] * _LANES)

Made = tuple[Any, Callable[..., Any]]


def _in_llvm(function: Callable[..., Made]) -> Callable[..., Any]:
    """A function that writes the LLVM code of its own call; numba hands it its context first, then the types."""
    made: Callable[..., Any] = intrinsic(function)
    return made


@_in_llvm
def add_to(_: Any, out: Any, theta: Any, moves: Any, row: Any) -> Made:
    """out[row] ← θ[row] + moves, and moves ← 0; int32 of 4096. False where a sum does not fit int32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def vectors(number: int, *index: Any) -> Any:
            array = context.make_array(signature.args[number])(context, builder, args[number])
            at = cgutils.get_item_pointer(context, builder, signature.args[number], array, index)
            return builder.bitcast(at, _VECTOR.as_pointer())

        wrong = cgutils.alloca_once_value(builder, _ZERO)
        with cgutils.for_range(builder, _WORD(CHUNK // _LANES)) as loop:
            first = builder.mul(loop.index, _WORD(_LANES))
            own = vectors(2, first)
            before = builder.load(vectors(1, args[3], first), align=4)
            gain = builder.load(own, align=4)
            after = builder.add(before, gain)
            # Overflow flips the sign of both addends at once: the sign bits of `left` gather that for all lanes.
            left = builder.and_(builder.xor(before, after), builder.xor(gain, after))
            builder.store(builder.or_(builder.load(wrong), left), wrong)
            builder.store(_ZERO, own, align=4)
            # Aligned by the row and the caller's check: an unaligned streaming store faults.
            past = builder.store(after, vectors(0, args[3], first), align=ALIGN_BYTES)
            past.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
        lanes = builder.load(wrong)
        signs = [builder.extract_element(lanes, _INT(lane)) for lane in range(_LANES)]
        worst = signs[0]
        for sign in signs[1:]:
            worst = builder.or_(worst, sign)
        return builder.icmp_signed(">=", worst, _INT(0))

    return types.boolean(out, theta, moves, types.int64), code


@_in_llvm
def fence(_: Any) -> Made:
    """Make all earlier stores, streaming ones too, visible to other threads before any later one."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code
