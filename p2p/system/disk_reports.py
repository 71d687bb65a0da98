"""When a disk that refused is asked again, and which refusals become lines of the log and the journal. Pure."""

from dataclasses import dataclass, field

DISK_RETRY_S = 2.0
"""Seconds before work that the disk refused is tried again."""
REPEAT_S = 60.0
"""A refusal of one kind is reported once in so many seconds, whatever succeeded meanwhile."""


@dataclass(slots=True)
class DiskReports:
    """What was reported lately. A full disk refuses several kinds of work, each every other second."""

    is_open: bool = False
    """A refusal was reported, and its end was not."""
    _told_s: dict[str, float] = field(default_factory=dict)

    def is_due(self, refusal: str, now: float) -> bool:
        """Return whether this refusal is to be reported now, and count it as reported then."""
        # Of one kind: what the disk said, without the path before it. Each blob has a path of its own.
        kind = refusal.rpartition(": ")[2]
        self._told_s = {each: at for each, at in self._told_s.items() if now - at < REPEAT_S}
        if kind in self._told_s:
            return False
        self._told_s[kind] = now
        self.is_open = True
        return True

    def end(self) -> bool:
        """The disk works again. Returns whether it did not before."""
        was_open, self.is_open = self.is_open, False
        return was_open
