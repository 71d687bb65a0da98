"""Neighbouring chunks of an arena."""

from typing import NamedTuple


class Span(NamedTuple):
    """Chunks `start … stop - 1`."""

    start: int
    stop: int

    @property
    def chunks(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def holds(self, chunk: int) -> bool:
        """Whether `chunk` is one of them."""
        return self.start <= chunk < self.stop
