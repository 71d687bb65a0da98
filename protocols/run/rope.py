"""Rotary positions whose slow turns are slower still: the scaling of Llama 3.1 and later (arXiv 2407.21783)."""

import math
from collections.abc import Sequence

import msgspec

from atoll.protocols.errors import ConfigError


class RopeStretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Turns that come round less than `low` times in `original` tokens are slowed by `factor`, those that come
    round more than `high` times are not, and those between in part. `llama3` in transformers.
    """

    factor: float
    low: float
    high: float
    original: int
    """Tokens of the context before it was stretched."""

    def check(self) -> None:
        """Raise ConfigError for values that make no rotations."""
        if not (1 <= self.factor <= 1 << 16 and 0 < self.low < self.high <= 1 << 16):
            raise ConfigError("model.rope_stretch needs a factor within 1 … 65536, and 0 < low < high ≤ 65536")
        if not 1 <= self.original <= 1 << 22:
            raise ConfigError(f"model.rope_stretch.original = {self.original} is outside 1 … {1 << 22}")

    def stretched(self, turns: Sequence[float]) -> list[float]:
        """Radians per token of each pair, from those without the scaling. Pure."""
        return [turn * self._share(turn * self.original / (2 * math.pi)) for turn in turns]

    def _share(self, rounds: float) -> float:
        """Of the speed that stays. `rounds`: how often the pair comes round in `original` tokens."""
        kept = min(1.0, max(0.0, (rounds - self.low) / (self.high - self.low)))
        return kept + (1 - kept) / self.factor
