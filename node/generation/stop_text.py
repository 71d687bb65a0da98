"""Ends a stream of text before the first stop text. Pure."""

from collections.abc import Sequence


class StopText:
    """Passes text on up to the stop text that is complete first, whatever the pieces it comes in."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(filter(None, stops))
        self._kept = ""
        self.found = False
        """Whether a stop text was seen; nothing is passed on after it."""

    def feed(self, text: str) -> str:
        """What is certain to stand before any stop text. The rest is kept: a stop text may begin in it."""
        if self.found:
            return ""
        self._kept += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._kept.find(stop)) >= 0]
        if ends:
            self.found = True
            out, self._kept = self._kept[: min(ends)[1]], ""
            return out
        begun = max((self._begun(stop) for stop in self._stops), default=0)
        cut = len(self._kept) - begun
        out, self._kept = self._kept[:cut], self._kept[cut:]
        return out

    def rest(self) -> str:
        """What was kept, at the end of the stream."""
        out, self._kept = self._kept, ""
        return out

    def _begun(self, stop: str) -> int:
        """How many of the last letters are the beginning of this stop text."""
        longest = min(len(stop) - 1, len(self._kept))
        return next((size for size in range(longest, 0, -1) if self._kept.endswith(stop[:size])), 0)
