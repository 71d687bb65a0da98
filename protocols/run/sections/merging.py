"""MergeSpec: when, and how far, the experts of a mixture move towards their nearest others (docs/experts.md)."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

ALPHA_BITS = 24
"""α is in units of 2⁻²⁴ in the arithmetic."""
_SPEC_BITS = 12
_Rounds: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]


class MergeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Expert merging (SPES, arXiv 2602.11543): θ_e += α · mean_j(θ_j − θ_e), α falling to 0."""

    every: _Rounds
    """Number of rounds between two merges."""
    until: _Rounds
    """Number of rounds after which α has fallen to 0."""
    alpha_4096: Annotated[int, Meta(ge=1, le=1 << _SPEC_BITS)]
    """α at the first round, in 4096ths."""
    donors: Annotated[int, Meta(ge=1, le=64)] = 4
    """Number of nearest other experts that an expert moves towards; in smaller mixtures all others."""

    def alpha(self, number: int) -> int:
        """α after round `number`, in units of 2⁻²⁴; 0: no merge after this round."""
        done = number + 1
        whole = self.alpha_4096 << (ALPHA_BITS - _SPEC_BITS)
        return whole * max(0, self.until - done) // self.until if done % self.every == 0 else 0
