"""How a round's contributions are judged before their mean is taken: `outer.aggregate` of the RunSpec.

A rule is a pure function of integers: of squared norms and inner products that `compress/measuring.py` takes of
the payloads. What it decides is linear in the contributions: a weight for each, and how far each is clipped in
each atom. So equal sets still give equal bits, and the fold is one pass as before.

    clip   in each atom, no contribution is longer than the median one (median over those who sent something there)
    edit   in each atom, weights by length; then the mean is clipped (`edit.py`)
    others clip, then groups of near copies count once, then the weights of `judging.py`

With `outer.by_weight` a contribution has as many votes as its weight in the fold, else one.

Whatever the rule, no contribution to an atom is longer than `outer.most_256` allows, even alone in its round. With
a divisor of at least a share φ of all weight the step of an atom is then at most α·√(1/φ) times as long as the
limit: by Cauchy and Schwarz, for any contributions.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from torch import Tensor

from atoll.node.learning.kernels.compiled import Ints, Ints32
from atoll.node.learning.outer.edit import edit_weights, shorten_step
from atoll.node.learning.outer.judging import RULES, Weigh, shares_of, weighted_median
from atoll.protocols.audits.standing import FULL
from atoll.protocols.ids import Digest, digest
from atoll.protocols.ledger.coverage import Cover, cover_of
from atoll.protocols.ledger.records import MAX_WEIGHT
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.model_spec import ModelSpec, expert_of
from atoll.protocols.run.moments import is_orthogonalized
from atoll.protocols.run.payload import VALUE_BITS
from atoll.protocols.run.run_spec import RunSpec

WHOLE_BITS = 16
WHOLE = 1 << WHOLE_BITS
"""What is left of a contribution that is not clipped."""
_LIARS_256 = 64
_MOST_256 = 256
_STEP_MOST_256 = 10 << 8
_LEAST_SAMPLE = 64
_DOMAIN = b"atoll/aggregate/1\0"
_REST = ""


class Atom(NamedTuple):
    """What is clipped as one: a matrix, all matrices of one expert, or all vectors."""

    values: int
    is_expert: bool
    is_rest: bool
    """Whether these are the vectors."""
    is_projection: bool = False
    """Whether Muon moves these, in a run that it trains."""


class Aggregation:
    """The judge of one round of one set (`compress.measuring.Judge`)."""

    def __init__(
        self,
        weigh: Weigh | None,
        liars_256: int,
        atom_C: Ints32,
        limit2_A: Sequence[int],
        seed: int,
        step_most_256: int | None = None,
        by_weight: bool = False,
    ) -> None:
        """`limit2_A`: largest squared norm in each atom, in units of 2⁻⁵²; `seed`: which chunks are compared.

        `step_most_256`: with it the weights in each atom are EDiT's, and no mean may be longer there, in 256ths.
        `by_weight`: contributions have votes by their weights.
        """
        self.atom_C = atom_C
        self._step_most_256 = step_most_256
        self._longest2 = 0
        self.compares = weigh is not None
        self._weigh = weigh
        self._liars_256 = liars_256
        self._limit2_A = limit2_A
        self._seed = seed
        self._by_weight = by_weight

    def clip(self, atom: int, weight_P: Sequence[int], norm2_P: Sequence[int]) -> list[int]:
        """WHOLE for those that are short enough, else what makes them as long as the limit."""
        limit2 = self._limit2_A[atom]
        if self._step_most_256 is None:  # EDiT leaves out what is too long; the limit holds nevertheless
            norm2_N = np.array(norm2_P, object)  # Python's integers: they do not fit an int64
            vote_N = self._votes(weight_P) * (norm2_N > 0)
            # The upper one of two: of two members none is clipped, and fewer than half of all votes cannot raise
            # it above the longest of the others, nor push it below the shortest.
            limit2 = min(weighted_median(norm2_N, vote_N), limit2) if vote_N.any() else 0
        return [WHOLE if norm2 <= limit2 else isqrt((limit2 << 2 * WHOLE_BITS) // norm2) for norm2 in norm2_P]

    def weigh(self, atom: int, weight_P: Sequence[int], norm2_P: Sequence[int]) -> Sequence[int]:
        if self._step_most_256 is None:
            return weight_P
        # A mean of values is at most the largest of them, so its squared norm is below the sum of theirs.
        self._longest2 = max(self._longest2, sum(norm2_P))
        return edit_weights(weight_P, norm2_P)

    def sample(self, members: int, k: int) -> Ints:
        return sampled(members, k, len(self.atom_C), self._seed)

    def shorten(self, moved_N4096: Tensor, theta_N4096: Tensor, alpha_256: int, threads: int = 1) -> None:
        """With EDiT, make α·mean = moved − θ as short as is allowed in each atom; `moved` is changed in place."""
        if self._step_most_256 is None:
            return
        # α times the mean in steps of 2⁻²⁴, as U has it. Each value was rounded, by less than a step.
        limit = self._step_most_256 * alpha_256 << 8
        rounding = isqrt(len(self.atom_C) * CHUNK) + 1
        if (isqrt(self._longest2) + 1) * alpha_256 >> 10 > limit - rounding - 1:
            shorten_step(moved_N4096, theta_N4096, self.atom_C, limit, threads)

    def weights(self, weight_P: Ints, gram_PP: Ints) -> Ints:
        assert self._weigh is not None
        share_P = shares_of(self._weigh, gram_PP, self._liars_256, self._votes(weight_P))
        scaled_P = weight_P * share_P
        most = int(scaled_P.max())
        # Only their ratios matter, and the sums' bounds have room for MAX_WEIGHT.
        found: Ints = (2 * MAX_WEIGHT * scaled_P + most) // (2 * most)
        return found

    def _votes(self, weight_P: Sequence[int] | Ints) -> Ints:
        """Votes of each contribution in medians and groups."""
        # FULL at most: whoever claims four rounds of work has one member's votes. It also bounds all products.
        return np.minimum(np.array(weight_P, np.int64), FULL if self._by_weight else 1)


def aggregation_of(spec: RunSpec, number: int, entries: Iterable[Digest]) -> Aggregation:
    """The judge of a round's set of these contributions, given in any order, in a run that has a rule."""
    outer = spec.outer
    assert outer.aggregate is not UNSET
    atom_C, names = atoms_of(spec.model, cover_of(spec, number))
    liars_256 = _LIARS_256 if outer.liars_256 is UNSET else outer.liars_256
    # Nobody knows the set before it is made, so nobody can lie in the chunks that will not be compared.
    seed = int.from_bytes(digest(_DOMAIN, *sorted(entries))[:8], "little")
    step_most_256 = None
    if outer.aggregate == "edit":
        step_most_256 = _STEP_MOST_256 if outer.step_most_256 is UNSET else outer.step_most_256
    weigh = RULES.get(outer.aggregate)
    return Aggregation(
        weigh,
        liars_256,
        atom_C,
        limits(spec, number, names),
        seed,
        step_most_256=step_most_256,
        by_weight=bool(outer.by_weight),
    )


def limits(spec: RunSpec, number: int, atoms: Sequence[Atom]) -> list[int]:
    """Largest squared norm of a contribution in each atom, in units of 2⁻⁵²."""
    inner, outer = spec.inner, spec.outer
    # A fragment is exchanged every so many rounds, with the progress of all of them.
    steps = spec.steps(number) * outer.fragments * Fraction(spec.pace.most_256, 256)
    share = Fraction(_MOST_256 if outer.most_256 is UNSET else outer.most_256, 256)
    found: list[int] = []
    for atom in atoms:
        rate = Fraction(inner.lr) * Fraction(inner.expert_lr if atom.is_expert else 1)
        if atom.is_rest and spec.model.experts is not None:
            rate = max(rate, Fraction(spec.model.experts.bias_rate))
        if atom.is_projection and inner.optimizer == "muon":
            # A move has the norm 0.2·√max(M, N)·√min(M, N), as singular values are about 1: at most 1.25.
            rate *= Fraction(inner.muon_lr) / 4
        # AdamW moves a value by about its rate a step: m / √v is at most about 1 where gradients last.
        most = int(rate * steps * share * (1 << VALUE_BITS))
        found.append(most * most * atom.values)
    return found


def sampled(members: int, k: int, chunks: int, seed: int) -> Ints:
    """Every n-th chunk from a place that the seed names: so many that comparing costs a part of a fold."""
    pairs, fold = members * (members + 1) // 2 * k, CHUNK + 4 * members * k
    every = max(1, min(-(-4 * pairs // fold), chunks // _LEAST_SAMPLE))
    return np.arange(seed % every, chunks, every, dtype=np.int64)


@lru_cache(maxsize=64)
def atoms_of(model: ModelSpec, cover: Cover) -> tuple[Ints32, tuple[Atom, ...]]:
    """Number of the atom of each chunk of a cover, and the atoms; those that are not in the cover, too."""
    arena = arena_of(model)
    of_chunk, numbers, values = np.empty(arena.chunks, np.int32), dict[str, int](), list[int]()
    for place in arena.placements:
        expert = expert_of(place.name)
        is_matrix = len(place.shape) == 2
        # One per expert and not three for each of its layers: there may be thousands of experts.
        name = _REST if not is_matrix else place.name if expert is None else str(expert)
        number = numbers.setdefault(name, len(numbers))
        values += [0] * (number + 1 - len(values))
        values[number] += math.prod(place.shape)
        stop = place.first_chunk + math.prod(place.blocks) if is_matrix else arena.chunks
        of_chunk[place.first_chunk : stop] = number
    atom_C = np.concatenate([of_chunk[span.start : span.stop] for span in cover])
    atom_C.setflags(write=False)
    found = (
        Atom(values[at], name.isdecimal(), name == _REST, name.isdecimal() or is_orthogonalized("muon", name))
        for name, at in numbers.items()
    )
    return atom_C, tuple(found)
