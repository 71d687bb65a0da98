"""Probation in a run whose voters must have shown work: final verdicts let a member decide, not names in sets.

Noise of legal size is named by as many final sets as work is. So an author decides only after verdicts of those
that decide already leave no doubt that it works. Verdicts of all others do not count: made-up identities would
vouch for each other. The run's owner decides first. Pure, in integers, of the sets of a chain: docs/finality.md.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from atoll.protocols.audits.standing import (
    FEW_DECIDERS,
    MANY_AUDITORS,
    OWNER_ROUNDS,
    SHOWN,
    Named,
    audited_by,
    named,
)
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.probation import Members, Tally
from atoll.protocols.run.run_spec import RunSpec

DEVIATION = 16
"""Units of a verdict in a deviation of verdicts on no work."""
_FINE = 256


class Awaited(NamedTuple):
    """A verdict that a decider was asked for, and that is in no final set yet."""

    round: int
    """Of the contribution."""
    author: PeerId
    auditor: PeerId
    entry: Digest


class FinalVerdict(NamedTuple):
    """A final verdict of a decider."""

    round: int
    """Of the contribution."""
    author: PeerId
    auditor: PeerId
    excess: int


class ShownWork(Tally, frozen=True, dict=True):
    """The tally of a run whose RunSpec has `audit.voters`."""

    owner: PeerId = PeerId("")
    each: int = 1
    """Contributions of a round that each of its authors audits."""
    memory: int = 32
    """So many rounds are looked back at."""
    shown: frozenset[PeerId] = frozenset()
    """Those that may decide."""
    # Of authors that may not decide yet, sorted. Nothing follows from any other, so a summary is small.
    awaited: tuple[Awaited, ...] = ()
    found: tuple[FinalVerdict, ...] = ()
    asked: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """The newest round in which each decider audits; of the rounds that are looked back at."""

    def proven(self, authors: Collection[PeerId], voters: Collection[PeerId] = ()) -> frozenset[PeerId]:
        """Those of the authors that decide the next round, if these are the authors of the next final set.

        `voters`: those that decide the set. They go on if none of its authors may decide: else whoever sends
        anything would have the run as soon as its few deciders pause.
        """
        everybody = frozenset(authors)
        if self.rounds == 0:
            return everybody.intersection([self.owner]) or everybody
        return everybody & self.shown or frozenset(voters) or super().proven(authors)

    def missing(self, author: PeerId) -> int:
        """In how many more final sets in a row the author must be at least until it decides; 0: it may."""
        return 0 if author in self.shown else max(1, self.probation - self.counts.get(author, 0))

    def trial(self, author: PeerId) -> tuple[int, int]:
        """Deviations of work that deciders' verdicts show of an author, 0 at least, and how many there are."""
        found = self._about.get(author, [])
        return shown_deviations(found, self._deciders) if found else 0, len(found)

    def after(
        self, authors: Collection[PeerId], members: Members = (), deciding: Collection[PeerId] = ()
    ) -> "ShownWork":
        """The tally after a final set of these contributions, whose authors `deciding` decide the next round."""
        read = [named(*each) for each in members]
        found, awaited = self._with_verdicts(read)
        new = self._asked(read, frozenset(deciding))
        recent = {auditor: last for auditor, last in self.asked.items() if last >= self._first}
        known = replace(
            self,
            rounds=self.rounds + 1,
            counts={**self.counts, **{author: self.counts.get(author, 0) + 1 for author in authors}},
            shown=frozenset(deciding) if self.rounds == 0 else self.shown,
            awaited=(*awaited, *new),
            found=found,
            asked={**recent, **{one.auditor: self.rounds for one in new}},
        )
        return known._with_shown(known.shown | known._newly_shown())

    @property
    def at_fork(self) -> "ShownWork":
        """Without verdicts: another epoch's set at this round says who decides next, and none after it."""
        return replace(self, awaited=(), found=(), asked={})

    @property
    def _first(self) -> int:
        """The first round that the next set looks back at."""
        return self.rounds - self.memory + 1

    def _with_shown(self, shown: frozenset[PeerId]) -> "ShownWork":
        """The tally where these may decide: nothing about them is remembered."""
        return replace(
            self,
            shown=shown,
            awaited=tuple(sorted(one for one in self.awaited if one.author not in shown)),
            found=tuple(sorted(one for one in self.found if one.author not in shown)),
        )

    def _with_verdicts(self, members: Collection[Named]) -> tuple[tuple[FinalVerdict, ...], list[Awaited]]:
        """All that was found about the rounds that are looked back at, and what is awaited still."""
        given: dict[tuple[PeerId, Digest], int] = {}
        for each in members:
            for verdict in each.verdicts:
                given.setdefault((each.author, verdict.contribution), verdict.excess)
        recent = [one for one in self.awaited if one.round >= self._first]
        new = [
            FinalVerdict(one.round, one.author, one.auditor, given[one.auditor, one.entry])
            for one in recent
            if (one.auditor, one.entry) in given
        ]
        found = (*(one for one in self.found if one.round >= self._first), *new)
        return found, [one for one in recent if (one.auditor, one.entry) not in given]

    def _asked(self, members: Collection[Named], deciding: frozenset[PeerId]) -> list[Awaited]:
        """What deciders are asked for by the draw of a set, in the order of entries."""
        author_of = {each.entry: each.author for each in members}
        return [
            Awaited(self.rounds, author_of[about], author_of[entry], about)
            for entry, drawn in sorted(audited_by(author_of, self.each).items())
            if author_of[entry] in deciding
            for about in drawn
        ]

    def _newly_shown(self) -> frozenset[PeerId]:
        """Who may decide from now on, as the verdicts in this tally say."""
        # Nobody that decides stops by verdicts: a few deciders that lie would need luck only once to put an honest
        # one out. Members that do harm are removed (docs/removal.md).
        return frozenset(
            author
            for author, found in self._about.items()
            if self.counts[author] >= self.probation and self._leaves_no_doubt(found)
        )

    def _leaves_no_doubt(self, found: Collection[FinalVerdict]) -> bool:
        """Whether the verdicts on an author that count could hardly be those on no work."""
        # Of two or three deciders one that lies is no small share, and whom it lets in decides for good. The owner
        # is trusted: until it let the first ones in it decided alone.
        if (
            self._deciders < FEW_DECIDERS
            and self.asked.get(self.owner, -OWNER_ROUNDS) >= self.rounds - OWNER_ROUNDS
        ):
            return leaves_no_doubt([one for one in found if one.auditor == self.owner], 1)
        return leaves_no_doubt(found, self._deciders)

    @cached_property
    def _deciders(self) -> int:
        """How many deciders audit."""
        return len(self.asked)

    @cached_property
    def _about(self) -> Mapping[PeerId, list[FinalVerdict]]:
        """The verdicts on those that may not decide, by author."""
        about: dict[PeerId, list[FinalVerdict]] = {}
        for one in self.found:
            if one.author not in self.shown:
                about.setdefault(one.author, []).append(one)
        return about


def leaves_no_doubt(found: Collection[FinalVerdict], deciders: int) -> bool:
    """Whether these verdicts on one author could hardly be those on no work. `deciders`: how many audit."""
    return shown_deviations(found, deciders) >= SHOWN


def shown_deviations(found: Collection[FinalVerdict], deciders: int) -> int:
    """How many deviations of work these verdicts on one author show together, rounded down; 0 at least."""
    by_auditor: dict[PeerId, list[int]] = {}
    for one in found:
        by_auditor.setdefault(one.auditor, []).append(one.excess)
    # By sums: a liar with many verdicts could lie just below the mean of an honest auditor with one.
    ranked = sorted(by_auditor, key=lambda auditor: (sum(by_auditor[auditor]), auditor))
    believed = ranked[: max(0, len(ranked) - _disbelieved(len(ranked), deciders))]
    by_round: dict[int, list[int]] = {}
    for one in found:
        if one.auditor in believed:
            # Clipped below: else one liar among the auditors would keep an honest member out.
            by_round.setdefault(one.round, []).append(max(-DEVIATION, one.excess))
    # One number a round: its auditors look at the same windows of the author, so they err together.
    total = max(0, sum(map(_mean, by_round.values())))
    return isqrt(total**2 // ((DEVIATION * _FINE) ** 2 * len(by_round))) if by_round else 0


def _disbelieved(auditors: int, deciders: int) -> int:
    """How many of an author's auditors do not count, those that found most."""
    # As many as may lie among the deciders, so that no number of verdicts of theirs is of any use. Where there are
    # too many for that, half: an author has a sample of them as its auditors.
    may_lie = (deciders - 1) // 3
    return may_lie if may_lie <= MANY_AUDITORS else max(MANY_AUDITORS, auditors // 2)


def _mean(values: Collection[int]) -> int:
    return sum(values) * _FINE // len(values)


def first_tally(spec: RunSpec) -> Tally:
    """The tally before round 0."""
    if not spec.audit or not spec.audit.voters:
        return Tally(spec.probation)
    return ShownWork(
        spec.probation,
        newcomers=spec.audit.newcomers or 0,
        owner=spec.owner,
        each=spec.audit.per_round,
        memory=spec.audit.memory,
    )
