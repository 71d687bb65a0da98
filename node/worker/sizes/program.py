"""Which k each tensor has: L-GreCo's dynamic program, in whole numbers, so that all machines choose the same.

Source: L-GreCo, arXiv 2210.17357: the fewest bytes under the error of the uniform choice, on a grid. Here
the errors are the lower median of what the members of a round measured, so half of them must lie to move it. What
they can move is which tensors have the bytes: the sum is never above that of `compress.k` everywhere.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.protocols.run.sized_payload import SizedLayout, part_bytes

GRID = 8192
"""Steps of the grid of errors, from none to that of the uniform choice."""
LOG_UNITS = 16
_FRACTION = tuple(round(2 ** (16 + at / LOG_UNITS)) for at in range(LOG_UNITS))
"""2^(at/16) in units of 2⁻¹⁶."""
_HEADROOM = 40
"""Bits of the largest error above 1: what is 2⁴⁰ times smaller counts as 0."""
_NEVER = 1 << 62

Errors = NDArray[np.int64]
"""`[tensors, ks]`."""


def median_errors(members: Sequence[Sequence[Sequence[int]]]) -> Errors:
    """The lower median over members of the logarithms that they said, for each tensor and k."""
    said_MTK = np.sort(np.array(members, np.int64), axis=0)
    median_TK: Errors = said_MTK[(len(said_MTK) - 1) // 2]
    return median_TK


def linear(logs_TK: Errors) -> list[list[int]]:
    """Errors as whole numbers of one unit, the largest about 2⁴⁰, of 16ths of log2."""
    top = int(logs_TK.max())
    shifts = [[(top - int(log)) for log in logs_K] for logs_K in logs_TK]
    return [[_power(-below) for below in row] for row in shifts]


def _power(sixteenths: int) -> int:
    """2^(40 + sixteenths/16), rounded down, of sixteenths ≤ 0."""
    whole, part = divmod(sixteenths, LOG_UNITS)
    left = _HEADROOM + whole
    return (_FRACTION[part] << left >> 16) if left >= 0 else 0


def chosen(logs_TK: Errors, layout: SizedLayout, goal: str) -> tuple[int, ...]:
    """k of each tensor: `bytes`, the fewest with no more error than the uniform choice; `error`, the reverse.

    The grid rounds errors up, so the bound holds exactly. Without a better choice it is the uniform one.
    """
    errors_TK, at = linear(logs_TK), layout.ks.index(layout.uniform)
    budget = sum(errors_K[at] for errors_K in errors_TK)
    uniform_bytes = sum(part_bytes(chunks, layout.uniform) for chunks in layout.chunks_T)
    if not budget:
        return layout.wanted_T
    # ⌈error · GRID / budget⌉: a sum of these within GRID is a sum of errors within the budget.
    cells_TK = [[-(-error * GRID // budget) for error in errors_K] for errors_K in errors_TK]
    bytes_TK = [[part_bytes(chunks, k) for k in layout.ks] for chunks in layout.chunks_T]
    fewest_E, choice_TE = _fewest_bytes(cells_TK, bytes_TK)
    end = GRID if goal == "bytes" else int(np.argmax(fewest_E <= uniform_bytes))
    if fewest_E[end] > uniform_bytes:
        return layout.wanted_T
    numbers = _walked_back(choice_TE, cells_TK, end)
    return tuple(layout.ks[number] for number in numbers)


def _fewest_bytes(
    cells_TK: Sequence[Sequence[int]], bytes_TK: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Fewest bytes of all tensors with at most so many cells of error, and what the last tensor then has."""
    fewest_E = np.zeros(GRID + 1, np.int64)
    choice_TE = np.zeros((len(cells_TK), GRID + 1), np.uint8)
    for tensor, (cells_K, bytes_K) in enumerate(zip(cells_TK, bytes_TK, strict=True)):
        options_KE = np.full((len(cells_K), GRID + 1), _NEVER, np.int64)
        for number, (cells, size) in enumerate(zip(cells_K, bytes_K, strict=True)):
            if cells <= GRID:
                options_KE[number, cells:] = np.minimum(fewest_E[: GRID + 1 - cells] + size, _NEVER)
        choice_TE[tensor] = np.argmin(options_KE, axis=0)  # the smaller k where bytes are equal
        fewest_E = np.min(options_KE, axis=0)
    return fewest_E, choice_TE


def _walked_back(choice_TE: NDArray[np.uint8], cells_TK: Sequence[Sequence[int]], end: int) -> tuple[int, ...]:
    """Number of the k of each tensor in the choice that ends with `end` cells of error."""
    found = list[int]()
    for tensor in reversed(range(len(cells_TK))):
        number = int(choice_TE[tensor, end])
        found.append(number)
        end -= cells_TK[tensor][number]
    return tuple(reversed(found))
