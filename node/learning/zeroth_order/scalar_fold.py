"""Payloads of scalars: written, checked, and folded into θ + U in exact integers.

    U(i) = −α · unit · Σ_m w_m · D_m(i) · s_m(i mod 512) / Σ_m w_m        one rounded division, units of 2⁻²⁴

s_m is the Walsh sum of member m's scalars (`directions`). Every member sends all values, so the divisor is all
weight, and a share of it (`outer.floor_256`) is never above it.

Bounds: |s| ≤ 127·512 < 2¹⁶, weight < 2⁸, members ≤ 2¹⁰: |Σ| < 2³⁴. α·256 ≤ 2¹⁰ and unit < 2¹⁶: |α·unit·Σ| < 2⁶⁰.
The divisor is Σw · 2⁸ · 2⁶ < 2³²; 2·|…| + divisor < 2⁶² < 2⁶³. One member moves a weight by no more
than α·512·127·unit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from atoll.node.learning.kernels.compiled import Fresh, Ints, Ints32, compiled, each_range, fresh_like
from atoll.node.learning.zeroth_order.directions import WALSH, WORD_BITS, WORDS, sign_word, walsh_sums
from atoll.protocols.errors import MODEL_LOST, DecodeError, Divergence
from atoll.protocols.ledger.records import MAX_SET, MAX_WEIGHT
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import HEADER_BYTES, TOP_SCALAR, Layout, check_frame

_SCALE = 1 << 14
"""α counts 256ths and the unit counts 2⁻³⁰: together 2¹⁴ to a step of 2⁻²⁴."""


class ScalarStep(NamedTuple):
    """How scalars become an outer step; from the RunSpec."""

    alpha_256: int
    unit: int
    """How far a scalar of 1 moves a weight, in steps of 2⁻³⁰."""


def write_scalars(scalars: Sequence[int], layout: Layout) -> bytearray:
    """The payload of a round's scalars, in the order of its steps; those of steps that were not taken are 0."""
    codes = np.zeros(layout.k, np.int8)
    codes[: len(scalars)] = scalars
    return bytearray(layout.header + codes.tobytes())


def read_scalars(payload: bytes | memoryview, layout: Layout) -> npt.NDArray[np.int64]:
    """Scalars of a payload, int64 `[k]`. Raises DecodeError unless these bytes are a legal payload."""
    check_frame(payload, layout)
    codes = np.frombuffer(payload, np.int8, layout.k, HEADER_BYTES)
    # −128 has no counterpart above; nobody writes it.
    if bool((codes < -TOP_SCALAR).any()):
        raise DecodeError("payload: a scalar that nobody writes")
    return codes.astype(np.int64)


def apply_scalars(
    theta_C4096: Tensor,
    weights: Sequence[int],
    payloads: Sequence[bytes | memoryview],
    seeds: Sequence[int],
    layout: Layout,
    step: ScalarStep,
    *,
    threads: int = 1,
    fresh: Fresh = fresh_like,
) -> Tensor:
    """θ + U, a new int32 array, of one round's set; `seeds`: of each payload's author in the round.

    Raises DecodeError for an illegal payload or weight and for more than 1024 members; Divergence where a weight
    leaves ±128. Padding is left to the caller.
    """
    if len(weights) > MAX_SET or not all(1 <= weight <= MAX_WEIGHT for weight in weights):
        raise DecodeError("a set with too many members, or with an illegal weight")
    sums = [w * walsh_sums(read_scalars(each, layout)) for w, each in zip(weights, payloads, strict=True)]
    sum_M512 = np.array(sums, np.int64).reshape(len(sums), WALSH)
    seed_M = np.array(seeds, np.uint64)
    out_C4096, rule = fresh(theta_C4096), (step.alpha_256 * step.unit, sum(weights) * _SCALE)
    if not weights:
        return out_C4096.copy_(theta_C4096)
    theta, out = theta_C4096.numpy(), out_C4096.numpy()

    def work(start: int, stop: int) -> bool:
        return bool(fold_scalars(sum_M512, seed_M, (start, stop), rule, theta, out, np.zeros(CHUNK, np.int64)))

    if not all(each_range(layout.chunks, threads, work)):
        raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
    return out_C4096


@compiled
def fold_scalars(
    sums: Ints, seeds: Any, span: tuple[int, int], rule: tuple[int, int], theta: Ints32, out: Ints32, total: Ints
) -> bool:
    """θ + U of chunks `span` into `out`; False where a weight leaves its range. `rule`: α·unit and the divisor."""
    wrong = np.int64(0)
    for chunk in range(span[0], span[1]):
        total[:] = 0
        for member in range(len(seeds)):
            own = sums[member]
            for word in range(WORDS):
                signs = sign_word(seeds[member], chunk * WORDS + word)
                base = word * WORD_BITS
                part = total[base : base + WORD_BITS]
                held = own[base & (WALSH - 1) : (base & (WALSH - 1)) + WORD_BITS]
                for bit in range(WORD_BITS):
                    # −v is ~v + 1: no branch, so that the loop is vectorised.
                    flip = -np.int64((signs >> np.uint64(bit)) & np.uint64(1))
                    part[bit] += (held[bit] ^ flip) - flip
        for i in range(CHUNK):
            # Twice both, and half of the divisor added to round halves away from zero.
            top, bottom = 2 * rule[0] * abs(total[i]) + rule[1], 2 * rule[1]
            # Division of int64 is slow. That of float64 is off by at most one, as the quotient is below 2³⁰, and
            # the exact remainder corrects it.
            size = np.int64(np.float64(top) / np.float64(bottom))
            rest = top - size * bottom
            size += np.int64(rest >= bottom) - np.int64(rest < 0)
            moved = np.int64(theta[chunk, i]) + (-size if total[i] > 0 else size)
            out[chunk, i] = np.int32(moved)
            # What the narrowing changed, gathered without a branch: 0 in the end means that every value fitted.
            wrong |= moved ^ np.int64(out[chunk, i])
    return bool(wrong == 0)
