"""The one place that says how a function becomes a Triton kernel, and how all of them are launched.

Triton comes with torch's CUDA builds for Linux and is imported by nobody else: `compress.gpu` is loaded only
where a device is to be used. With TRITON_INTERPRET=1 (read when a kernel is defined) the same kernels run on
CPU tensors, operation by operation in numpy: so the tests hold their bits against the CPU's without a GPU.
"""

import subprocess
from collections.abc import Callable
from typing import Any

import triton
from triton.errors import TritonError

EXACT = {"enable_fp_fusion": False}
"""Launch option: a product and a sum stay two rounded operations, as they are on the CPU."""
FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    subprocess.SubprocessError, TritonError,
)  # fmt: skip
"""What may come out of a first launch: no driver, no C compiler, a compiler of another version, no memory."""


def kernel(function: Callable[..., Any]) -> Any:
    """A kernel, or a part of one. Its module's constants must be `tl.constexpr`."""
    return triton.jit(function)


def kernel_for_any(*numbers: str, anywhere: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A kernel with one machine code for all values of these arguments, and all addresses of those `anywhere`.

    Triton makes others for 1, multiples of 16 and aligned addresses: in a round that would be the first such slab.
    """
    made: Callable[[Callable[..., Any]], Any] = triton.jit(
        do_not_specialize=numbers, do_not_specialize_on_alignment=anywhere
    )
    return made


def grid_of(items: int, block: int) -> tuple[int]:
    """So many programs that each takes `block` items."""
    return (triton.cdiv(items, block),)


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`: lengths of vectors in a kernel."""
    return int(triton.next_power_of_2(size))


def check_together(*tensors: Any) -> None:
    """Raise ValueError unless these tensors lie on one device, each in one piece: kernels are given addresses."""
    if len({tensor.device for tensor in tensors}) != 1 or not all(t.is_contiguous() for t in tensors):
        raise ValueError("kernels take contiguous tensors of one device")
