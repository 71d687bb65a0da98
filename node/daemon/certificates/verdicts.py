"""What a summary says of verdicts, where voters must have shown work (docs/audits.md#who-decides). Pure.

Who decides later rounds follows from verdicts of up to `audit.memory` rounds before. A summary has those of them
from which something follows: verdicts on authors that do not decide yet.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from atoll.protocols.audits.shown_work import Awaited, FinalVerdict, ShownWork
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import MAX_EXCESS, MAX_SET

Place: TypeAlias = Annotated[int, Meta(ge=0)]
"""A member, by its place in the list of counts: a name takes 53 bytes, and most have several verdicts."""
Number: TypeAlias = Annotated[int, Meta(ge=0)]
"""A round."""
Excess: TypeAlias = Annotated[int, Meta(ge=-MAX_EXCESS, le=MAX_EXCESS)]


class Verdicts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the tally of such a run has beside its counts. Lists are sorted."""

    shown: tuple[Place, ...]
    """Those that may decide."""
    asked: tuple[tuple[Place, Number], ...]
    """The deciders that audit, and the newest round in which each does."""
    found: tuple[tuple[Number, Place, Place, Excess], ...]
    """Final verdicts: round, author, auditor."""
    awaited: tuple[tuple[Number, Place, Place, Digest], ...]
    """Those that are in no final set yet: round, author, auditor, and the entry that they are about."""


def verdicts_of(tally: Tally) -> Verdicts:
    """What a summary says of the verdicts in a tally."""
    assert isinstance(tally, ShownWork)
    places = {peer: place for place, peer in enumerate(sorted(tally.counts))}
    return Verdicts(
        shown=tuple(sorted(places[peer] for peer in tally.shown)),
        asked=tuple(sorted((places[peer], number) for peer, number in tally.asked.items())),
        found=tuple((each.round, places[each.author], places[each.auditor], each.excess) for each in tally.found),
        awaited=tuple(
            (each.round, places[each.author], places[each.auditor], each.entry) for each in tally.awaited
        ),
    )


def with_verdicts(first: Tally, counted: Tally, verdicts: Verdicts) -> ShownWork:
    """The tally that has these counts and verdicts; `first`: that of the run before round 0."""
    assert isinstance(first, ShownWork)
    peers = sorted(counted.counts)
    return replace(
        first,
        probation=counted.probation,
        rounds=counted.rounds,
        counts=counted.counts,
        shown=frozenset(peers[place] for place in verdicts.shown),
        asked={peers[place]: number for place, number in verdicts.asked},
        found=tuple(
            FinalVerdict(number, peers[author], peers[auditor], excess)
            for number, author, auditor, excess in verdicts.found
        ),
        awaited=tuple(
            Awaited(number, peers[author], peers[auditor], entry)
            for number, author, auditor, entry in verdicts.awaited
        ),
    )


def check_verdicts(first: Tally, rounds: int, members: int, verdicts: Verdicts) -> None:
    """Raise DecodeError for more than the final sets of a run can say, or for members without a count.

    `rounds`: final rounds; `members`: those that have a count.
    """
    assert isinstance(first, ShownWork)
    each_round = min(members, MAX_SET) * first.each
    if len(verdicts.found) + len(verdicts.awaited) > first.memory * each_round:
        raise DecodeError("a summary with more verdicts than the run has audits")
    about = [(number, who) for number, *both, _ in (*verdicts.found, *verdicts.awaited) for who in both]
    places = [*verdicts.shown, *(place for place, _ in verdicts.asked), *(place for _, place in about)]
    numbers = [*(number for number, _ in about), *(number for _, number in verdicts.asked)]
    if max(places, default=0) >= max(members, 1):
        raise DecodeError("a summary with verdicts of members that are in no final set")
    if numbers and not rounds - first.memory <= min(numbers) <= max(numbers) < rounds:
        raise DecodeError("a summary with verdicts of rounds that are not looked back at")
