"""Compiled: the step of a rule of one chunk, while the mean that it is made of is still in the cache.

A fold that ends so reads and writes each array of a state once, and stores no Θ + U. The bits are those of
`MomentumRule.step` of Θ + U, also in what is Divergence.

Rules are coded twice. Their own kernels are in int64. The loops here are in int32, with twice as many values in a
vector: a product is taken in parts, of v = 256·(v >> 8) + (v & 255). They need α, β and 256/Λ of at most 256 and
|U| < 2³¹. Where a sum of a chunk might leave int32, what they made of it is dropped and the rule's own kernel is
used. tests/node/learning/compress/test_landing.py compares both.
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
_NARROW = 256
"""The largest α·256 of the loops in int32; β and 1/Λ are at most 1 in every run."""


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
        return self._replace(moved=np.empty(CHUNK, np.int32), after=np.empty((3, CHUNK), np.int32))


_NO_ROOM = np.empty(0, np.int32), np.empty((0, CHUNK), np.int32)
PLAIN = Landing(0, (0, 0, 0, 0), np.empty(0, np.int64), 0, *_NO_ROOM)


def landing_of(rule: MomentumRule, cover: Cover, chunks: int) -> Landing:
    """The rule's step for rounds of this cover, of states with so many chunks in each array."""
    gap, most = rule.more or (0, 0)
    row_C = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for span in cover])
    kind = 1 + _STEPS.index(rule.kernel)
    return Landing(kind, (rule.alpha_256, rule.beta_256, gap, most), row_C, chunks, *_NO_ROOM)


@inlined
def _scaled(value: Any, factor: Any, more: Any) -> Any:
    """⌊(factor · value + more) / 256⌋ in int32, of factor ≤ 256 and more < 256."""
    low = np.int32(factor * np.int32(value & 255))
    return np.int32(np.int32(factor * np.int32(value >> 8)) + np.int32(np.int32(low + more) >> 8))


@inlined
def _decayed(value: Any, factor: Any) -> Any:
    """As `momentum.towards_zero` of factor · value."""
    return _scaled(value, factor, np.int32(np.int32(value >> 31) & 255))


@inlined
def _rounded(value: Any, factor: Any) -> Any:
    """As `momentum.nearest` of factor · value and 8 bits."""
    return _scaled(value, factor, np.int32(128 + np.int32(value >> 31)))


@inlined
def _left(first: Any, second: Any, total: Any) -> Any:
    """Negative where first + second is not `total`, its int32."""
    return np.int32((first ^ total) & (second ^ total))


@compiled
def _land_ball(after: Ints32, theta: Ints32, v: Ints32, moves: Ints32, alpha: int, beta: int, ahead: bool) -> bool:
    """`nesterov` where `ahead`, else `slowmo`, of one chunk; False where it might not fit int32."""
    a, b, wrong = np.int32(alpha), np.int32(beta), np.int32(0)
    for i in range(CHUNK):
        mean, moved = np.int32(-moves[i]), np.int32(theta[i] + moves[i])
        wrong = np.int32(wrong | _left(theta[i], moves[i], moved))
        old = _decayed(v[i], b)
        speed = np.int32(mean + old)
        wrong = np.int32(wrong | _left(mean, old, speed))
        if ahead:
            # 256·high + low is 256·Δ + β·v, so `size` is α of it, / 2¹⁶
            pull, low = _scaled(speed, b, np.int32(0)), np.int32(np.int32(b * np.int32(speed & 255)) & 255)
            high = np.int32(mean + pull)
            wrong = np.int32(wrong | _left(mean, pull, high))
            part = np.int32(a * np.int32(np.int32(np.int32(high & 255) << 8) + low))
            part = np.int32(np.int32(part + np.int32((1 << 15) + np.int32(high >> 31))) >> 16)
            size = np.int32(np.int32(a * np.int32(high >> 8)) + part)
        else:
            size = _rounded(speed, a)
        ended = np.int32(theta[i] - size)
        wrong = np.int32(wrong | _left(ended, size, theta[i]))
        after[0, i], after[1, i] = ended, speed
    return bool(wrong >= 0)


@compiled
def _land_stale(
    after: Ints32, theta: Ints32, v: Ints32, stale: Ints32, moves: Ints32, numbers: tuple[int, int, int, int]
) -> bool:
    """`co2` of one chunk; False where it might not fit int32."""
    a, b, gap, most = np.int32(numbers[0]), np.int32(numbers[1]), np.int32(numbers[2]), np.int32(numbers[3])
    least, wrong = np.int32(-most), np.int32(0)
    for i in range(CHUNK):
        moved = np.int32(theta[i] + moves[i])
        wrong = np.int32(wrong | _left(theta[i], moves[i], moved))
        old, new = _decayed(v[i], b), _decayed(stale[i], gap)
        speed = np.int32(old + new)
        wrong = np.int32(wrong | _left(old, new, speed))
        speed = min(max(speed, least), most)
        size = _rounded(speed, a)
        ended = np.int32(theta[i] - size)
        wrong = np.int32(wrong | _left(ended, size, theta[i]))
        after[0, i], after[1, i], after[2, i] = ended, speed, np.int32(-moves[i])
    return bool(wrong >= 0)


@compiled
def _land_widely(landing: Landing, theta: Ints32, v: Ints32, stale: Ints32, moves: Ints32) -> bool:
    """Any rule of one chunk, by its own kernel; False where a value does not fit int32."""
    (alpha, beta, gap, most), moved, after = landing.numbers, landing.moved, landing.after
    wrong = np.int64(0)
    for i in range(CHUNK):
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
    after, theta, v = landing.after, state[row], state[row + chunks]
    stale = state[row + 2 * chunks] if landing.kind == _CO2 else v
    fits = alpha <= _NARROW
    if fits and landing.kind == _CO2:
        fits = _land_stale(after, theta, v, stale, moves, landing.numbers)
    elif fits:
        fits = _land_ball(after, theta, v, moves, alpha, beta, landing.kind != _SLOWMO)
    if not (fits or _land_widely(landing, theta, v, stale, moves)):
        return False
    stream(out, row, after[0])
    stream(out, row + chunks, after[1])
    if landing.kind == _CO2:
        stream(out, row + 2 * chunks, after[2])
    moves[:] = 0
    return True
