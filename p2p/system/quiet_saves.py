"""A disk that refuses what is saved from time to time is a line in the log once, and not each minute."""

import logging
from collections.abc import Callable

from atoll.protocols.errors import DiskFault

log = logging.getLogger(__name__)


class QuietSaves:
    """Saves of one thing without which the node goes on."""

    def __init__(self, what: str) -> None:
        """`what`: begins the line, `the newest leases are not saved`."""
        self._what, self._refusal = what, ""

    def does(self, save: Callable[[], None]) -> bool:
        """Save. False: the disk refuses it, which is logged once, until it works again or gives another reason."""
        try:
            save()
        except DiskFault as fault:
            if fault.line() != self._refusal:
                self._refusal = fault.line()
                log.warning("%s: %s", self._what, self._refusal)
            return False
        self._refusal = ""
        return True
