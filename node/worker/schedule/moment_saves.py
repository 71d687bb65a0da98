"""When the optimizer's moments go to the disk: with every eighth trained round, and with a stop.

They change in every value in every step, 8 bytes of a parameter with AdamW, and a restart can do without the
newest ones: nothing that was sent depends on those on the disk. A kill sets the moments back by at most seven
rounds, and neither weights nor error feedback. Moments of a peer, or of other experts, are saved at once.
"""

from collections.abc import Hashable
from typing import Final

ROUNDS: Final = 8
"""Trained rounds from one save of the moments to the next."""


class MomentSaves:
    """How old the moments on the disk are, in trained rounds. Pure."""

    def __init__(self) -> None:
        """Before the first save of a process the disk has none: those of an earlier one are read and written."""
        self._age = ROUNDS
        self._saved: Hashable = None
        self._begun: Hashable = None

    def trained_round(self) -> None:
        """A round has ended, whose steps are in the moments. No save is under way."""
        self._age += 1

    @property
    def are_old(self) -> bool:
        """Whether a round has ended since this process saved them."""
        return self._saved is not None and self._age > 0

    def begin(self, kind: Hashable, *, forced: bool = False) -> bool:
        """A save begins; whether it writes them. The one before has ended, or did not get to the disk.

        `kind` is equal as long as nothing but steps changed them. `forced`: they are written in any case.
        """
        writes = forced or self._age >= ROUNDS or kind != self._saved
        self._begun = kind if writes else None
        return writes

    def end(self) -> None:
        """The save that was begun is on the disk."""
        if self._begun is not None:
            self._age = 0
            self._saved = self._begun
