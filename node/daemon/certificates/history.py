"""When a node cuts its ledger, and what a replay begins with afterwards. Settings: `ledger_history` in NodeConfig.

A node that keeps recent records only makes a summary every STEP_ROUNDS final rounds, and puts it in place of the
records once these are KEPT_ROUNDS old: an epoch that leaves the chain earlier is looked at by no node anyway, so
this node finds the same chain as all others.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import UNSET

from atoll.node.daemon.certificates.full_summary import SummaryMaker, decode_full, encode_full
from atoll.node.daemon.certificates.links import extended
from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.certificates.summary import (
    MAX_BYTES,
    Summary,
    decode_summary,
    encode_summary,
    resumed,
    summarize,
)
from atoll.node.daemon.consensus.machine import DECIDED_KEPT
from atoll.node.daemon.consensus.types import FinalityState
from atoll.p2p.ledger.history import Cut, StoredLink
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.records import Epoch, Follow, Proposal, SummaryProposal, Vote
from atoll.protocols.run.run_spec import RunSpec

KEPT_ROUNDS = DECIDED_KEPT
"""Newest rounds whose records stay in any ledger."""
STEP_ROUNDS = 64
"""Final rounds between two cuts: each deletes as many rounds, while nothing else is written."""


def needs_all_records(spec: RunSpec) -> bool:
    """Whether what follows from the oldest sets of a run is in no summary, so that nodes keep all records."""
    # Who is passed over as a reducer, and whose work was taken out, follows from all sets. Certified
    # summaries hold the former, and such a run has no excisions.
    return not spec.history and (spec.reduce is not None or spec.pace.excise_rounds is not UNSET)


class _Made(NamedTuple):
    """A summary that may take the place of records once it is old enough."""

    data: bytes
    summary: Summary
    name: Digest = Digest(b"")
    """Its blob id, of a summary that voters certify; empty: only this node believes it."""
    floors: Mapping[PeerId, Digest] | None = None
    """Where feeds go on then."""
    links: tuple[StoredLink, ...] = ()


@dataclass(slots=True)
class LedgerHistory:
    """One node's part in the history of its run."""

    ledger: Ledger
    keeps_all: bool = True
    """Cut nothing. What was cut before stays away."""
    kept_rounds: int = KEPT_ROUNDS
    step_rounds: int = STEP_ROUNDS
    spec: RunSpec | None = None
    """The run, if its voters certify summaries, which every node makes at the same rounds; None: they do not."""
    summary: Summary | None = field(init=False)
    """What stands for the rounds that are gone; None: none are."""
    reducers: ReducerHistory = field(default_factory=ReducerHistory, init=False)
    """What the rounds that are gone say about later reducers."""
    _made: deque[_Made] = field(default_factory=deque, init=False)
    """Summaries whose rounds are not old enough, the oldest first."""
    _maker: SummaryMaker = field(init=False)
    _links: tuple[StoredLink, ...] = field(init=False)
    """The chain to the newest summary of which others can be convinced."""

    def __post_init__(self) -> None:
        """Raises DecodeError or LocalFault for a summary that this node cannot read."""
        data = self.ledger.history.summary
        self._maker = SummaryMaker(self.ledger.history)
        self._links = self.ledger.history.links
        self.summary = None
        if data is not None and self.certifies:
            full = decode_full(data)
            self.summary, self.reducers = full.summary, full.reducers
            self._maker.resume(full)
        elif data is not None:
            self.summary = decode_summary(data)

    @property
    def certifies(self) -> bool:
        """Whether the voters of the run certify summaries."""
        return self.spec is not None

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
        # Who began with another's summary follows the epochs that it found there, and writes that down only then.
        has_chosen = any(self.ledger.entries(kind=kind, author=state.me) for kind in (Epoch, Follow))
        return resumed(state, self.summary, chosen if has_chosen or not self.certifies else None)

    def is_proposed(self, number: int, state: Digest) -> bool:
        """Whether the ledger has a proposal with this state of the round, of any chain."""
        bodies = (entry.body for entry in self.ledger.entries(number=number))
        return any(isinstance(body, Proposal) and body.state == state for body in bodies)

    def on_counted(self, named: Iterable[tuple[PeerId, Digest]]) -> None:
        """A final set names these contributions."""
        if self.certifies:
            self._maker.on_counted(named)

    def certify(self, state: FinalityState, reducers: ReducerHistory | None) -> Digest | None:
        """The blob id of the summary of all final rounds (`Summarize`); None where this node cannot make it."""
        if reducers is None:
            return None
        # Not those of the state: a replay makes the summaries before it learns of proofs.
        proven = self.ledger.equivocators()
        full = self._maker.make(state, reducers, proven)
        if full is None:
            return None
        if not self.keeps_all:
            self._made.append(_Made(encode_full(full), full.summary, full.blob, full.places))
        return full.blob

    def on_final(self, state: FinalityState) -> None:
        """A round became final, and all of its authors are known here. Makes a summary if one is due."""
        newest = self._made[-1].summary.round if self._made else self.last_gone
        if self.keeps_all or self.certifies or state.last_final < newest + self.step_rounds:
            return
        summary = summarize(state)
        if summary is not None and len(data := encode_summary(summary)) <= MAX_BYTES:
            self._made.append(_Made(data, summary))

    def cut(self, state: FinalityState, applied: int) -> bool:
        """Cut the ledger if rounds are old enough, in Θ_final of this node too (`applied`). Raises DiskFault."""
        due: _Made | None = None
        newest = min(applied, state.last_final)
        while state.live and self._made and self._made[0].summary.round + self.kept_rounds <= newest:
            # Without a link a newcomer could not begin there: the records stay until there is a later summary.
            due = self._linked(self._made.popleft()) or due
        if due is None:
            return False
        summary = due.summary
        self.ledger.cut(Cut(due.data, summary.round, summary.forks, due.floors, due.links))
        self.summary = summary
        return True

    def _linked(self, made: _Made) -> _Made | None:
        """The summary with the chain of links that proves it to others; None if nobody could believe it."""
        if self.spec is None:
            return made
        number = made.summary.round + 1
        votes = self.ledger.entries(kind=Vote, number=number)
        for proposal in self.ledger.entries(kind=SummaryProposal, number=number):
            body = proposal.body
            if isinstance(body, SummaryProposal) and body.summary == made.name and is_lawful(self.spec, proposal):
                links = extended(self.spec, self._links, proposal, votes, made.data)
                if links is not None:
                    self._links = links
                    return made._replace(links=links)
        return None
