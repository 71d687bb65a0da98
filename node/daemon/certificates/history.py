"""When a node cuts its ledger, and what a replay begins with afterwards. Settings: `ledger_history` in NodeConfig.

A node that keeps recent records only makes a summary every STEP_ROUNDS final rounds, and puts it in place of the
records once these are KEPT_ROUNDS old: an epoch that leaves the chain earlier is looked at by no node anyway, so
this node finds the same chain as all others.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import UNSET

from atoll.node.daemon.certificates.summary import (
    Summary,
    decode_summary,
    encode_summary,
    resumed,
    summarize,
)
from atoll.node.daemon.consensus.machine import DECIDED_KEPT
from atoll.node.daemon.consensus.types import FinalityState
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import Epoch
from atoll.protocols.run.run_spec import RunSpec

KEPT_ROUNDS = DECIDED_KEPT
"""Newest rounds whose records stay in any ledger."""
STEP_ROUNDS = 64
"""Final rounds between two cuts: each deletes as many rounds, while nothing else is written."""


def needs_all_records(spec: RunSpec) -> bool:
    """Whether what follows from the oldest sets of a run is in no summary, so that nodes keep all records."""
    # Who is passed over as a reducer, and whose work was asked to be taken out, follows from all sets.
    return spec.reduce is not None or spec.pace.excise_rounds is not UNSET


@dataclass(slots=True)
class LedgerHistory:
    """One node's part in the history of its run."""

    ledger: Ledger
    keeps_all: bool = True
    """Cut nothing. What was cut before stays away."""
    kept_rounds: int = KEPT_ROUNDS
    step_rounds: int = STEP_ROUNDS
    summary: Summary | None = field(init=False)
    """What stands for the rounds that are gone; None: none are."""
    _authors: set[PeerId] = field(init=False)
    """Authors of all final sets, and members of epochs."""
    _made: deque[Summary] = field(default_factory=deque, init=False)
    """Summaries whose rounds are not old enough, the oldest first."""

    def __post_init__(self) -> None:
        """Raises DecodeError or LocalFault for a summary that this node cannot read."""
        data = self.ledger.history.summary
        self.summary = decode_summary(data) if data is not None else None
        self._authors = set(self.authors)

    @property
    def authors(self) -> tuple[PeerId, ...]:
        """Authors that are no newcomers, as the rounds say that are gone."""
        return self.summary.authors if self.summary is not None else ()

    @property
    def last_gone(self) -> int:
        """The newest round whose records are gone; -1: none are."""
        return self.summary.round if self.summary is not None else -1

    def begin(self, state: FinalityState, chosen: tuple[Epoch, ...]) -> FinalityState:
        """The state that the replay of what is here begins with. Raises LocalFault, see `resumed`."""
        if self.summary is None:
            return state
        return resumed(state, self.summary, chosen)

    def on_accepted(self, authors: Iterable[PeerId]) -> None:
        """A final set, or an epoch, names these authors."""
        if not self.keeps_all:
            self._authors.update(authors)

    def on_final(self, state: FinalityState) -> None:
        """A round became final, and all of its authors are known here. Makes a summary if one is due."""
        newest = self._made[-1].round if self._made else self.last_gone
        if self.keeps_all or state.last_final < newest + self.step_rounds:
            return
        summary = summarize(state, self._authors)
        if summary is not None:
            self._made.append(summary)

    def cut(self, state: FinalityState, applied: int) -> bool:
        """Cut the ledger if rounds are old enough, in Θ_final of this node too (`applied`). Raises DiskFault."""
        due: Summary | None = None
        while (
            state.live and self._made and self._made[0].round + self.kept_rounds <= min(applied, state.last_final)
        ):
            due = self._made.popleft()
        if due is None:
            return False
        self.ledger.cut(encode_summary(due), due.round, due.forks)
        self.summary = due
        return True
