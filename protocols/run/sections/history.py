"""HistorySpec: summaries of old rounds that final rounds certify, for newcomers (docs/history.md)."""

from typing import Annotated

import msgspec
from msgspec import Meta


class HistorySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often the voters of a run certify what its old rounds say about later ones."""

    every: Annotated[int, Meta(ge=8, le=4096)] = 64
    """Rounds between two certified summaries. The first proposal of a round that is a multiple of it names the
    summary of the rounds before."""

    def summarized(self, number: int) -> int | None:
        """The newest round of the summary that proposals of round `number` may name; None where they name none."""
        return number - 1 if number and number % self.every == 0 else None
