"""Who may not reduce for a while, because its Reductions missed final sets: a pure fold over the final rounds.

All members fold the same final sets in the same order, so all name the same reducers, and nobody's opinion of a
reducer enters. Who was proven to lie, or answers nobody, misses final sets; it is passed over twice as long each
time (truncated binary exponential back-off). A Reduction in a final set clears the member.

If finality is slow, a round may close before the final set that names its reducers is known. Then nobody reduces,
or only those that closed it last. So a set counts misses if at least half of its reducers are in it.

Where slices are far fewer than members, mute liars may be more than half of the reducers. So misses count, too, if
most contributions say that their authors knew the reducers: from the second such round in a row on, because one
liar that proposes a set may leave out the Reductions of a round.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from atoll.node.daemon.certificates.reducers import Decided, Missed, ReducerHistory
from atoll.protocols.ids import PeerId

MOST_DOUBLINGS = 5
"""A member that misses again and again tries once in `gap` · 2⁵ rounds: each try costs the others a slice raw."""


class BackOff(NamedTuple):
    """A member that is done without up to round `until`, `times` in a row; 0: it is suspected only."""

    times: int
    until: int


def history_of(misses: Mapping[PeerId, BackOff], decided: Collection[Decided]) -> ReducerHistory:
    """Return both in one form: equal final sets give equal bytes."""
    missed = tuple(Missed(peer, *misses[peer]) for peer in sorted(misses))
    return ReducerHistory(missed, tuple(sorted(decided, key=lambda each: each.round)))


def misses_of(history: ReducerHistory) -> dict[PeerId, BackOff]:
    """Return the misses that a history holds, by member; see `after`."""
    return {each.peer: BackOff(each.times, each.until) for each in history.missed}


def longer(before: BackOff | None, first: int, rounds: int, most_doublings: int) -> BackOff:
    """Return the time that begins with round `first`: `rounds` long at first, twice as long each time after."""
    times = before.times + 1 if before is not None else 1
    return BackOff(times, first - 1 + (rounds << min(times - 1, most_doublings)))


def after(
    misses: Mapping[PeerId, BackOff],
    number: int,
    reducers: Collection[PeerId],
    present: Collection[PeerId],
    gap: int,
    *,
    is_known: bool = False,
) -> dict[PeerId, BackOff]:
    """Return the misses after round `number` became final.

    `reducers` were to reduce it, and the Reductions of `present` are in its final set. `gap` rounds lie between a
    final set and the round whose reducers it names. `is_known`: by its contributions most members knew them.
    """
    found = dict(misses)
    # A liar that proposes its late Reduction, in a round that the others closed without a plan, would else be the
    # only reducer left. Less than a third of the members lie, so where nearly all reduce liars are never half.
    counts_misses = 2 * len({*present}.intersection(reducers)) >= len(reducers)
    for peer in reducers:
        before = found.get(peer)
        # Its reducers were named before the last miss was known: neither a miss nor a Reduction says anything new.
        if before is not None and number <= before.until:
            continue
        # One Reduction that counts is enough: a reducer that was away is no worse than any other.
        if peer in present:
            found.pop(peer, None)
        elif counts_misses or (is_known and before is not None):
            found[peer] = longer(before, number, gap, MOST_DOUBLINGS)
        elif is_known:
            found[peer] = BackOff(0, number - 1)
    return found


def passed_over(misses: Mapping[PeerId, BackOff], number: int) -> frozenset[PeerId]:
    """Return the members that the final set of round `number` names for no slice."""
    return frozenset(peer for peer, missed in misses.items() if number <= missed.until)
