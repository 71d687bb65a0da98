"""Whose turn with a ballot passed unused: in the next rounds nobody waits for that owner. Pure.

Leader reputation, as in Carousel (Cohen et al., 2022) and DiemBFT v4: the final rounds say who kept the others
waiting. Ownership of ballots never depends on it, so safety does not either. Rules in words: docs/finality.md.
"""

from typing import NamedTuple

import msgspec

from atoll.protocols.ids import PeerId

TERM = 2
"""So many rounds for each voter last the time without turns: nearly all own a first ballot in them."""
MOST_TERMS = 8
"""The second turn that passes begins a term; each further one doubles it, up to so many terms."""
KEPT = 1024
"""Passed turns that are remembered, the newest: as many as a set has authors."""


class Passed(NamedTuple):
    """An owner's turn passed unused in a final round."""

    peer: PeerId
    until: int
    """Newest round in which nobody waits for it."""
    forgotten: int
    """Newest round in which another one makes the term longer."""
    terms: int
    """So many terms it has no turn."""


class OwnerTurns(msgspec.Struct, frozen=True):
    """What the final rounds of a chain say about turns."""

    passed: tuple[Passed, ...] = ()
    """The newest first."""
    without: frozenset[PeerId] = frozenset()
    """Voters of the next round for whose turns nobody waits: a third of them at most, less one."""

    def after(
        self, number: int, voters: tuple[PeerId, ...], attempt: int, following: tuple[PeerId, ...]
    ) -> "OwnerTurns":
        """The turns after round `number` was decided in a ballot of this attempt. `following`: the next voters."""
        failed = [peer for peer in voters[:attempt] if peer not in self.without]
        if len(failed) > _most(voters):
            return OwnerTurns()  # liars alone are fewer: the network failed, and nobody is to blame
        if not failed and not self.passed:
            return self
        passed = tuple(one for one in self.passed if one.forgotten >= number)
        passed = (*(_passed(peer, number, len(voters), passed) for peer in failed), *passed)[:KEPT]
        there = dict.fromkeys(one.peer for one in passed if one.until > number and one.peer in following)
        return OwnerTurns(passed, frozenset([*there][: _most(following)]))


def _most(voters: tuple[PeerId, ...]) -> int:
    # So more than two thirds have turns, and honest owners do not cut off one another's ballots for ever.
    return max(0, len(voters) - 1) // 3


def _passed(peer: PeerId, number: int, count: int, before: tuple[Passed, ...]) -> Passed:
    terms = [one.terms for one in before if one.peer == peer]
    # Once is bad luck: an honest owner's messages were late. Twice in 2 * TERM rounds of each voter is not, and
    # who did so is remembered for longer.
    now = min(MOST_TERMS, 2 * max(terms) or 1) if terms else 0
    return Passed(peer, number + TERM * count * now, number + TERM * count * (2 * MOST_TERMS if now else 2), now)
