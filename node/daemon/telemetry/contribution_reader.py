"""Reads from the ledger who contributed to a round, for the web page: nothing is read while no page is open.

A round's set names the contributions that count. What else the ledger has of a round came too late, or could not
be folded.
"""

from collections.abc import Callable, Sequence

from atoll.node.daemon.web.page_data import RoundWork
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.ledger.records import (
    AuditedContribution,
    Contribution,
    PartContribution,
    PlannedContribution,
    SlicedContribution,
    StaleContribution,
)

KINDS = (
    Contribution,
    PartContribution,
    StaleContribution,
    SlicedContribution,
    PlannedContribution,
    AuditedContribution,
)
"""The ledger finds entries by their exact kind."""
AUTHORS_MAX = 256
"""Most authors that are shown of one round."""
READ_S = 2.0
"""A round is read again after so many seconds: with many members a reading takes milliseconds."""
ROUNDS_MAX = 64
"""Most rounds that are remembered between two readings."""


class ContributionReader:
    """The contributions to rounds, at most READ_S old."""

    def __init__(self, ledger: Ledger, now: Callable[[], float]) -> None:
        """`now`: a clock in seconds."""
        self._ledger = ledger
        self._now = now
        self._read: dict[int, tuple[float, RoundWork]] = {}
        """When a round was read, and what was found, the newest reading last."""

    def work(self, numbers: Sequence[int]) -> list[RoundWork]:
        """What the ledger has of these rounds; rounds without contributions are left out. Raises DiskFault."""
        found = map(self._work, numbers)
        return [work for work in found if work.peers]

    def _work(self, number: int) -> RoundWork:
        read_at, work = self._read.get(number, (0.0, None))
        if work is None or self._now() - read_at >= READ_S:
            work = self._query(number)
            self._read.pop(number, None)
            self._read[number] = (self._now(), work)
            for oldest in list(self._read)[:-ROUNDS_MAX]:
                del self._read[oldest]
        return work

    def _query(self, number: int) -> RoundWork:
        entries = [entry for kind in KINDS for entry in self._ledger.entries(kind=kind, number=number)]
        bodies = {entry.author: entry.body for entry in entries if isinstance(entry.body, Contribution)}
        peers = sorted(bodies)[:AUTHORS_MAX]
        return RoundWork(
            round=number,
            peers=tuple(peers),
            loss=tuple(bodies[peer].loss for peer in peers),
            tokens=tuple(bodies[peer].tokens for peer in peers),
        )
