"""Which contributions of a round its set names, where more were made than one set may name. Pure.

Identities cost nothing, so anybody can make more authors of a round than MAX_SET, each with a legal payload. Those
that worked before come first, by what all nodes find alike: how many of the newest final sets name them, then
whether any did. The rest is drawn by a hash of round and author, which nobody can make good for all rounds. Rules
in words: docs/rounds.md.
"""

from collections.abc import Collection, Mapping

import msgspec

from atoll.protocols.ids import Digest, PeerId, RunId, digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import MAX_SET


class Seniority(msgspec.Struct, frozen=True):
    """What the final sets of a chain, up to one round, say of the authors of later rounds."""

    newest: tuple[frozenset[PeerId], ...] = ()
    """Voters of the round that is decided next, and proven authors of the newest final sets."""
    accepted: frozenset[PeerId] = frozenset()
    """Authors of all final sets, and members of epochs."""

    def rank(self, author: PeerId) -> tuple[int, bool]:
        """The lower, the earlier."""
        # Whoever is in each of the newest sets always has a place, however many others were accepted: those sets
        # had no more places. So a flood that gets in once takes no place of a member that goes on.
        return -sum(author in authors for authors in self.newest), author not in self.accepted


def first_authors(
    run: RunId, number: int, authors: Collection[PeerId], seniority: Seniority, most: int = MAX_SET
) -> frozenset[PeerId]:
    """All of the authors of round `number`, each of which is named once, or the first `most`."""
    if len(authors) <= most:
        return frozenset(authors)
    seed = digest(b"atoll/set/1\0", run, number.to_bytes(8, "little"))

    def place(author: PeerId) -> tuple[int, bool, bytes]:
        return *seniority.rank(author), digest(seed, author.encode())

    return frozenset(sorted(authors, key=place)[:most])


class Arrival(msgspec.Struct, frozen=True):
    """How this node came to know an author: local, and the same on no other node."""

    rounds: int
    """How many rounds were final here when its work was verified first."""
    line: str
    """The address block of the neighbour that brought the author."""


class NewcomerOrder(msgspec.Struct, frozen=True):
    """Which newcomers a node names first in the rounds after the newest final one, where it knows too many.

    What is agreed on is how many (`Tally.places`): each proposer chooses whom. Rules in words: docs/ledger.md.
    """

    tally: Tally = Tally()
    voters: frozenset[PeerId] = frozenset()
    """Of the round that is decided next."""
    seed: bytes = b""
    """Digest of the newest final set."""

    def named(self, authors: Collection[PeerId], arrivals: Mapping[PeerId, Arrival]) -> frozenset[PeerId]:
        """Those of the authors of a round that its set names: all but the newcomers without a place."""
        new = self.tally.newcomers_of(authors, self.voters)
        places = self.tally.places(len(authors) - len(new))
        if len(new) <= places:
            return frozenset(authors)
        draw = {peer: digest(_DRAW, self.seed, peer.encode()) for peer in new}
        trials = {peer: self.tally.trial(peer) for peer in new}
        # Half for those of whom verdicts show some work: they go on, and soon decide. Noise shows a deviation by
        # chance only, so it is not most of them for long.
        promising = [peer for peer in new if trials[peer][0]]
        first = sorted(promising, key=lambda peer: (-trials[peer][0], draw[peer]))[: places // 2]
        rest = self._in_turn(new.difference(first), arrivals, draw, trials)[: places - len(first)]
        return frozenset(authors).difference(new) | frozenset(first) | frozenset(rest)

    def _in_turn(
        self,
        new: Collection[PeerId],
        arrivals: Mapping[PeerId, Arrival],
        draw: Mapping[PeerId, bytes],
        trials: Mapping[PeerId, tuple[int, int]],
    ) -> list[PeerId]:
        """One of each line, then a second one, and so on; in a line those first that were audited least."""
        # By line: anybody can make up as many identities as it takes, not as many addresses. Who was seen only
        # after the seed was known may have been made to fit it, so it waits for the next one.
        lines: dict[str, list[tuple[bool, int, bytes, PeerId]]] = {}
        for peer in new:
            known = arrivals.get(peer, Arrival(-1, peer))
            is_late = known.rounds >= self.tally.rounds
            lines.setdefault(known.line, []).append((is_late, trials[peer][1], draw[peer], peer))
        turns = [(at, *one) for line in lines.values() for at, one in enumerate(sorted(line))]
        return [peer for *_, peer in sorted(turns)]


_DRAW = b"atoll/newcomers/1\0"


def first_places(
    run: RunId, number: int, authors: Mapping[Digest, PeerId], seniority: Seniority, most: int = MAX_SET
) -> tuple[Digest, ...]:
    """The contributions to round `number` that its set names, sorted: all of them, or the first `most`.

    `authors`: their authors by entry id, each author once.
    """
    # By author, not by entry: of entries anybody could make as many as it takes.
    first = first_authors(run, number, authors.values(), seniority, most)
    return tuple(sorted(name for name, author in authors.items() if author in first))
