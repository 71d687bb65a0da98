"""MergeSpec: when, and how far, the experts of a mixture move towards those most like them (docs/models.md)."""

import msgspec

from atoll.protocols.errors import ConfigError

ALPHA_BITS = 24
"""α is in units of 2⁻²⁴ in the arithmetic."""
_SPEC_BITS = 12
_MOST_ROUNDS = 1 << 24


class MergeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Expert merging (SPES, arXiv 2602.11543): θ_e += α · mean_j(θ_j − θ_e), α falling to 0."""

    every: int
    """After so many rounds, again and again."""
    until: int
    """α has fallen to 0 after so many rounds."""
    alpha_4096: int
    """α before it begins to fall."""
    donors: int = 4
    """Nearest others that an expert moves to; in smaller mixtures all others."""

    def alpha(self, number: int) -> int:
        """α after round `number`, in units of 2⁻²⁴; 0: nothing is merged."""
        done = number + 1
        whole = self.alpha_4096 << (ALPHA_BITS - _SPEC_BITS)
        return whole * max(0, self.until - done) // self.until if done % self.every == 0 else 0

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that no run can have."""
        bounds = {
            "every": (1, _MOST_ROUNDS),
            "until": (1, _MOST_ROUNDS),
            "alpha_4096": (1, 1 << _SPEC_BITS),
            "donors": (1, 64),
        }
        for key, (low, high) in bounds.items():
            if not low <= getattr(self, key) <= high:
                raise ConfigError(f"outer.merge.{key} = {getattr(self, key)} is outside {low} … {high}")
