"""What a chain's final sets up to one round say about the rounds after it, in a few bytes. Pure.

The records of old rounds are read in a replay only, and of them only this is left at its end: who decides the next
round, what each author has done, which epochs decided, whom voters excluded. All of it follows from the final sets
and the chain. So a replay that begins with a summary ends in the state of one that begins with round 0, as
tests/node/daemon/certificates/test_summary.py shows. A node believes its own summary only; what it would take to
believe another one's: docs/decisions/0025-ledgers-may-be-cut.md.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec.structs import asdict, replace

from atoll.node.daemon.certificates.verdicts import Verdicts, check_verdicts, verdicts_of, with_verdicts
from atoll.node.daemon.consensus.chains.epochs import ROOT, Electorate, EpochId, Segment
from atoll.node.daemon.consensus.types import RECENT_ROUNDS, FinalityState
from atoll.protocols import codec
from atoll.protocols.audits.shown_work import ShownWork, first_tally
from atoll.protocols.errors import DecodeError, LocalFault
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import Epoch, epoch_id
from atoll.protocols.run.run_spec import RunSpec

VERSION, AUDITED_VERSION = 1, 2
"""Of summaries, and of those that hold verdicts: of runs with `audit.voters`."""
MAX_BYTES = 1 << 24
"""Largest summary: some 100,000 authors, each in a few of these lists. No node makes a larger one."""

Counts: TypeAlias = tuple[tuple[PeerId, int], ...]
Peers: TypeAlias = tuple[PeerId, ...]


class _Tally(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    probation: int
    rounds: int
    counts: Counts


class _Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: EpochId
    first: int
    voters: Peers
    recent: Peers
    tally: _Tally


class _Decided(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    round: int
    voters: Peers
    authors: Peers


class Summary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that the records of the rounds up to `round` decide about later ones. Lists are sorted, so that equal
    chains have equal bytes."""

    version: int
    round: int
    """The newest round whose records it stands for."""
    voters: Peers
    """Voters of the round after, in the order of their ballots."""
    tally: _Tally
    chain: tuple[_Segment, ...]
    """The epochs that decided up to this round."""
    decided: tuple[_Decided, ...]
    """Voters and proven authors of the newest rounds."""
    voted_out: Counts
    """First round without each member that voters excluded."""
    authors: Peers
    """Authors of all final sets, and members of epochs: they are no newcomers."""

    @property
    def forks(self) -> tuple[int, ...]:
        """Rounds at which an epoch begins: what others write about them may still change the chain."""
        return tuple(segment.first for segment in self.chain[1:])

    @property
    def work(self) -> Tally:
        """How many of the final sets name each author."""
        return _tally(self.tally)

    def tallies(self, first: Tally) -> list[Tally]:
        """The tally, and that of each epoch of the chain; `first`: that of the run before round 0."""
        return [self.work, *(_tally(each.tally) for each in self.chain)]


class AuditedSummary(Summary, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The summary of a run whose voters must have shown work."""

    verdicts: tuple[Verdicts, ...]
    """Of the tally, then of that of each epoch after the first, before which there was no round."""

    @property
    def counted(self) -> list[_Tally]:
        """Those that the verdicts are of."""
        return [self.tally, *(each.tally for each in self.chain[1:])]

    def tallies(self, first: Tally) -> list[Tally]:
        """The tally, and that of each epoch of the chain; `first`: that of the run before round 0."""
        counted = zip(self.counted, self.verdicts, strict=True)
        tally, *later = (with_verdicts(first, _tally(each), verdicts) for each, verdicts in counted)
        return [tally, _tally(self.chain[0].tally), *later]


def summarize(state: FinalityState) -> Summary | None:
    """The summary of all final rounds; None where an epoch decides the next one: it follows from no final set."""
    if state.last_final < 0 or state.chain[-1].first > state.last_final:
        return None
    newest = range(max(0, state.last_final + 1 - RECENT_ROUNDS), state.last_final + 1)
    made = Summary(
        version=VERSION,
        round=state.last_final,
        voters=state.voters,
        tally=_counted(state.tally),
        chain=tuple(
            _Segment(
                each.epoch,
                each.first,
                each.electorate.voters,
                tuple(sorted(each.electorate.recent)),
                _counted(each.tally),
            )
            for each in state.chain
        ),
        decided=tuple(
            _Decided(at, state.decided[at][0], tuple(sorted(state.decided[at][1])))
            for at in newest
            if at in state.decided
        ),
        voted_out=_sorted(state.epochs.voted_out),
        authors=tuple(sorted(state.accepted)),
    )
    if not isinstance(state.tally, ShownWork):
        return made
    tallies = state.tally, *(each.tally for each in state.chain[1:])
    values = {**asdict(made), "version": AUDITED_VERSION}
    return AuditedSummary(**values, verdicts=tuple(map(verdicts_of, tallies)))


def resumed(state: FinalityState, summary: Summary, chosen: tuple[Epoch, ...] | None) -> FinalityState:
    """The state before the first entry (`begin`), as if the rounds of the summary had been replayed.

    `chosen`: the epochs that this node entered before it ended; None: it never chose one, and goes on where the
    summary ends. Raises LocalFault if they leave the summary's chain: then what is gone would have to be decided
    anew.
    """
    tally, *before = summary.tallies(state.tally)
    chain = tuple(
        Segment(each.epoch, each.first, Electorate(each.voters, frozenset(each.recent)), counted)
        for each, counted in zip(summary.chain, before, strict=True)
    )
    entered = tuple(each.epoch for each in chain if each.epoch != ROOT)
    planned = () if chosen is None else chosen[len(entered) :]
    parts = chosen is not None and tuple(map(epoch_id, chosen[: len(entered)])) != entered
    if parts or any(body.round <= summary.round for body in planned):
        raise _other_chain(summary)
    return replace(
        state,
        last_final=summary.round,
        voters=summary.voters,
        tally=tally,
        chain=chain,
        planned=planned,
        accepted=frozenset(summary.authors),
        decided={each.round: (each.voters, frozenset(each.authors)) for each in summary.decided},
        epochs=replace(state.epochs, voted_out=dict(summary.voted_out)),
    )


def _other_chain(summary: Summary) -> LocalFault:
    return LocalFault(
        f"another chain of the run is to be followed, which parts from this one before round {summary.round}; "
        "the records of those rounds are gone here (ledger_history)",
        hint="move the run's ledger.sqlite away; the node gets all of it from peers that keep all records",
    )


def encode_summary(summary: Summary) -> bytes:
    """Canonical bytes of a summary."""
    return codec.encode(summary)


def decode_summary(data: bytes) -> Summary:
    """The summary in bytes that this node wrote. Raises DecodeError, LocalFault."""
    return codec.decode(data, AuditedSummary if is_audited(data) else Summary, max_bytes=MAX_BYTES)


def is_audited(data: bytes) -> bool:
    """Whether a summary holds verdicts, by its version. Raises LocalFault for one that this node does not read."""
    version = data[1] if len(data) > 1 else VERSION  # the byte before it is the number of fields
    if version not in (VERSION, AUDITED_VERSION):
        raise LocalFault(
            f"the summary of old rounds in the ledger has version {version}; this node reads {VERSION} and "
            f"{AUDITED_VERSION}",
            hint="use the version of atoll that wrote it; or move ledger.sqlite away: peers have the records",
        )
    return version == AUDITED_VERSION


def check_sizes(spec: RunSpec, summary: Summary) -> None:
    """Raise DecodeError for a summary with more verdicts than final sets of this run can make."""
    first, audited = first_tally(spec), isinstance(summary, AuditedSummary)
    if audited != isinstance(first, ShownWork):
        raise DecodeError("a summary with verdicts, or without, of a run that has no such summaries")
    if not isinstance(summary, AuditedSummary):
        return
    if len(summary.counted) != len(summary.verdicts) or not summary.chain:
        raise DecodeError("a summary without the verdicts of an epoch")
    for tally, verdicts in zip(summary.counted, summary.verdicts, strict=True):
        check_verdicts(first, tally.rounds, len(tally.counts), verdicts)


def _counted(tally: Tally) -> _Tally:
    return _Tally(tally.probation, tally.rounds, _sorted(tally.counts))


def _tally(tally: _Tally) -> Tally:
    return Tally(tally.probation, tally.rounds, dict(tally.counts))


def _sorted(counts: Mapping[PeerId, int]) -> Counts:
    return tuple(sorted(counts.items()))
