"""Compiled: the directions of SPSA, signs that follow from a seed by integer arithmetic alone.

Step t of one author's round moves along z_t, with a sign for each value i of the arena:

    z_t(i) = D(i) · W_t(i mod 512)        W_t(j) = (−1)^popcount(t & j)

D(i) is bit i mod 64 of word i div 64 of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), counted from the author's
seed; a set bit is −1. W_t is row t of a Walsh-Hadamard matrix. Each z_t alone is uniform over all signs, because D
is, which is all that SPSA asks of it; two of one round are orthogonal in every 512 values. That structure is what
makes rounds cheap: the sum of all steps is D(i) · s(i mod 512), where s has 512 values and is computed once, so a
payload costs one pass over the model however many steps it holds, and not one for each. (Products of Hadamard
matrices and random signs in the place of independent directions: Choromanski et al., arXiv 1804.02395.)
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.learning.kernels.compiled import Floats, Ints32, compiled, inlined
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import MAX_SCALARS

WALSH = MAX_SCALARS
"""Length of the Walsh functions; a power of two."""
WORD_BITS = 64
WORDS = CHUNK // WORD_BITS
"""Words of signs of one chunk."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def walsh_sums(scalars_k: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """s(j) = Σ_t scalar_t · W_t(j), int64 `[512]`, by the fast Walsh-Hadamard transform; exact."""
    sums = np.zeros(WALSH, np.int64)
    sums[: len(scalars_k)] = scalars_k
    half = 1
    while half < WALSH:
        pairs = sums.reshape(-1, 2, half)
        sums = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        half *= 2
    return sums


def walsh_row(step: int) -> npt.NDArray[np.int64]:
    """W_t of one step, ±1, int64 `[512]`."""
    return walsh_sums(np.eye(1, step + 1, step, dtype=np.int64)[0])


@inlined
def sign_word(seed: Any, at: int) -> Any:
    """Word `at` of D of an author's round: 64 signs, uint64."""
    # A counter, not a state: any thread may begin at any chunk, and all get the same bits.
    mixed = np.uint64(seed) + (np.uint64(at) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


@compiled
def perturb(theta: Ints32, first: int, seed: Any, shift: Floats, out: Floats) -> None:
    """out ← θ + D · shift of chunks `first …`, float32 `[N, 4096]`; θ is int32 in steps of 2⁻²⁴.

    `shift` `[512]`: how far a value moves where its sign is +1; it is what the round moved so far, ±ε of a step.
    """
    for row in range(len(theta)):
        for word in range(WORDS):
            signs = sign_word(seed, (first + row) * WORDS + word)
            base = word * WORD_BITS
            for bit in range(WORD_BITS):
                at = base + bit
                moved = shift[at & (WALSH - 1)]
                value = np.float32(theta[row, at]) * np.float32(2.0**-24)
                out[row, at] = value - moved if (signs >> np.uint64(bit)) & np.uint64(1) else value + moved
