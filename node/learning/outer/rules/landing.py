"""Compiled: the step of a rule of one chunk, while the mean that it is made of is still in the cache.

A fold that ends so reads and writes each array of a state once, and stores no Θ + U. The bits are those of
`MomentumRule.step` of Θ + U, also in what is Divergence.

Rules are coded twice. Their own kernels are in int64. The loops here are in int32, with twice as many values in a
vector, for blocks in which every value of U and of the momenta is small: below 2²¹ steps of 2⁻²⁴, an eighth; Θ is
below 2³⁰ of them, and α, β and 256/Λ are at most 256. Then no sum and no product leaves int32: the largest is
256·Δ + β·v < 2²⁹ + 2³⁰. Of any other block the rule's own kernel makes the step, and what a loop made is dropped.
tests/node/learning/compress/test_landing.py compares both.
"""

from typing import Any, NamedTuple

import numpy as np

from atoll.node.learning.kernels.compiled import Ints, Ints32, compiled, inlined, stream
from atoll.node.learning.outer.rules.co2 import co2_step
from atoll.node.learning.outer.rules.momentum import MomentumRule
from atoll.node.learning.outer.rules.nesterov import nesterov_step
from atoll.node.learning.outer.rules.slowmo import slowmo_step
from atoll.protocols.ledger.coverage import Cover
from atoll.protocols.run.arena import CHUNK

_STEPS = (nesterov_step, slowmo_step, co2_step)
_SLOWMO, _CO2 = 2, 3
_WHOLE = 256
"""α·256 and 256/Λ of 1."""
_NARROW = 256
"""The largest α·256 of the loops in int32; β and 1/Λ are at most 1 in every run."""
_SMALL, _FAR = 1 << 21, 1 << 30
"""Limits of a momentum or a move, and of a weight, in those loops: −limit ≤ value < limit."""
BLOCK = 512
"""Values that are made and written at once: what a chunk has of all arrays would not fit into the first cache."""


class Landing(NamedTuple):
    """What a fold does with the moves of a chunk: a rule's step, and where in the state; and room for it."""

    kind: int
    """Place of the rule in `_STEPS`, from 1 on; 0: Θ + U."""
    numbers: tuple[int, int, int, int]
    """α·256, β·256, and of `co2` 256/Λ and φ."""
    row_C: Ints
    """Row of each chunk of the round in Θ."""
    chunks: int
    """Rows of Θ, behind which those of v begin."""
    moved: Ints32
    after: Ints32

    def own(self) -> "Landing":
        """For one thread."""
        return self._replace(moved=np.empty(BLOCK, np.int32), after=np.empty((3, BLOCK), np.int32))


_NO_ROOM = np.empty(0, np.int32), np.empty((0, BLOCK), np.int32)
PLAIN = Landing(0, (0, 0, 0, 0), np.empty(0, np.int64), 0, *_NO_ROOM)


def landing_of(rule: MomentumRule, cover: Cover, chunks: int) -> Landing:
    """The rule's step for rounds of this cover, of states with so many chunks in each array."""
    gap, most = rule.more or (0, 0)
    row_C = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for span in cover])
    kind = 1 + _STEPS.index(rule.kernel)
    return Landing(kind, (rule.alpha_256, rule.beta_256, gap, most), row_C, chunks, *_NO_ROOM)


@inlined
def _decayed(value: Any, factor: Any) -> Any:
    """As `momentum.towards_zero` of factor · value."""
    return np.int32(np.int32(np.int32(factor * value) + np.int32(np.int32(value >> 31) & 255)) >> 8)


@inlined
def _rounded(value: Any, factor: Any) -> Any:
    """As `momentum.nearest` of factor · value and 8 bits."""
    return np.int32(np.int32(np.int32(factor * value) + np.int32(128 + np.int32(value >> 31))) >> 8)


@inlined
def _are_small(thetas: Any, others: Any) -> bool:
    """Whether bits gathered of value + limit say that no value was out of its limits."""
    return bool(thetas >= 0 and others & np.int32(-2 * _SMALL) == 0)


@compiled
def _land_ball(after: Ints32, theta: Ints32, v: Ints32, moves: Ints32, alpha: int, beta: int, ahead: bool) -> bool:
    """`nesterov` where `ahead`, else `slowmo`, of one block; False where a value is not small."""
    a, b = np.int32(alpha), np.int32(beta)
    thetas = others = np.int32(0)
    for i in range(BLOCK):
        thetas = np.int32(thetas | np.int32(theta[i] + np.int32(_FAR)))
        others = np.int32(others | np.int32(v[i] + np.int32(_SMALL)) | np.int32(moves[i] + np.int32(_SMALL)))
        mean = np.int32(-moves[i])
        speed = np.int32(mean + _decayed(v[i], b))
        if ahead:
            # α of 256·Δ + β·v, / 2¹⁶: its low 8 bits apart, because the product has 38
            pull = np.int32(np.int32(mean << 8) + np.int32(b * speed))
            low = np.int32(np.int32(a * np.int32(pull & 255)) + np.int32((1 << 15) + np.int32(pull >> 31)))
            size = np.int32(np.int32(np.int32(a * np.int32(pull >> 8)) + np.int32(low >> 8)) >> 8)
        else:
            size = _rounded(speed, a)
        after[0, i], after[1, i] = np.int32(theta[i] - size), speed
    return _are_small(thetas, others)


@compiled
def _land_stale(
    after: Ints32, theta: Ints32, v: Ints32, stale: Ints32, moves: Ints32, numbers: tuple[int, int, int, int]
) -> bool:
    """`co2` of one block; False where a value is not small."""
    a, b, gap, most = np.int32(numbers[0]), np.int32(numbers[1]), np.int32(numbers[2]), np.int32(numbers[3])
    least, thetas = np.int32(-most), np.int32(0)
    others = thetas
    for i in range(BLOCK):
        thetas = np.int32(thetas | np.int32(theta[i] + np.int32(_FAR)))
        others = np.int32(others | np.int32(v[i] + np.int32(_SMALL)) | np.int32(moves[i] + np.int32(_SMALL)))
        others = np.int32(others | np.int32(stale[i] + np.int32(_SMALL)))
        # A product with 1 is left out: as published both are, and a multiplication takes as long as four sums.
        new = stale[i] if gap == _WHOLE else _decayed(stale[i], gap)
        speed = min(max(np.int32(_decayed(v[i], b) + new), least), most)
        size = speed if a == _WHOLE else _rounded(speed, a)
        after[0, i], after[1, i], after[2, i] = np.int32(theta[i] - size), speed, np.int32(-moves[i])
    return _are_small(thetas, others)


@compiled
def _land_widely(landing: Landing, theta: Ints32, v: Ints32, stale: Ints32, moves: Ints32) -> bool:
    """Any rule of one block, by its own kernel; False where a value does not fit int32."""
    (alpha, beta, gap, most), moved, after = landing.numbers, landing.moved, landing.after
    wrong = np.int64(0)
    for i in range(BLOCK):
        total = np.int64(theta[i]) + np.int64(moves[i])
        moved[i] = np.int32(total)
        wrong |= total ^ np.int64(np.int32(total))
    if landing.kind == _CO2:
        fits = co2_step(after[0], after[1], after[2], theta, v, stale, moved, alpha, beta, gap, most)
    elif landing.kind == _SLOWMO:
        fits = slowmo_step(after[0], after[1], theta, v, moved, alpha, beta)
    else:
        fits = nesterov_step(after[0], after[1], theta, v, moved, alpha, beta)
    return bool(fits and wrong == 0)


@compiled
def land(landing: Landing, out: Ints32, state: Ints32, moves: Ints32, c: int) -> bool:
    """The rows of chunk `c` of the round in `out`, and moves ← 0. False where a value does not fit int32."""
    (alpha, beta, _, _), row, chunks = landing.numbers, landing.row_C[c], landing.chunks
    after, is_stale, is_narrow = landing.after, landing.kind == _CO2, alpha <= _NARROW
    for first in range(0, CHUNK, BLOCK):
        stop = first + BLOCK
        theta, v, mean = state[row, first:stop], state[row + chunks, first:stop], moves[first:stop]
        stale = state[row + 2 * chunks, first:stop] if is_stale else v
        fits = is_narrow
        if fits and is_stale:
            fits = _land_stale(after, theta, v, stale, mean, landing.numbers)
        elif fits:
            fits = _land_ball(after, theta, v, mean, alpha, beta, landing.kind != _SLOWMO)
        if not (fits or _land_widely(landing, theta, v, stale, mean)):
            return False
        stream(out, row, first, after[0], BLOCK)
        stream(out, row + chunks, first, after[1], BLOCK)
        if is_stale:
            stream(out, row + 2 * chunks, first, after[2], BLOCK)
    moves[:] = 0
    return True
