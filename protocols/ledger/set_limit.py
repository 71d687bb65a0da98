"""Which contributions of a round its set names, where more were made than one set may name. Pure.

Identities cost nothing, so anybody can make more authors of a round than MAX_SET, each with a legal payload. Those
that worked before come first, by what all nodes find alike: how many of the newest final sets name them, then
whether any did. The rest is drawn by a hash of round and author, which nobody can make good for all rounds. Rules
in words: docs/rounds.md.
"""

import ipaddress
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from atoll.protocols.ids import Digest, PeerId, RunId, digest
from atoll.protocols.layered_map import put
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import MAX_SET

ARRIVALS_KEPT = LINES_KEPT = 8192
"""Authors of which a node remembers how they came, and lines and wide blocks of which it remembers the turns."""
VIA = "via "
"""Before the line of an author that another neighbour brought: nobody is charged for what it passes on."""


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
    """The author's address block, or behind VIA that of the neighbour that brought it."""


class Arrivals(msgspec.Struct, frozen=True):
    """How the authors of verified payloads came, and what was found of them; empty where nothing is bounded."""

    by_author: Mapping[PeerId, Arrival] = msgspec.field(default_factory=dict)
    """The oldest first."""
    turns: Mapping[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Of the newcomers of each line and wide block, while verdicts show no work of them: audits, and final sets
    that name them; since this node's start."""

    def of(self, author: PeerId) -> Arrival:
        """How an author came; who is not known is a line of its own."""
        return self.by_author.get(author) or Arrival(-1, VIA + author)

    def noted(self, author: PeerId, arrival: Arrival, needed: Callable[[], Collection[PeerId]]) -> "Arrivals":
        """With the author, unless it is known. `needed` returns those that are not forgotten for it."""
        if author in self.by_author:
            return self
        known = self.by_author
        if len(known) >= ARRIVALS_KEPT:
            oldest = frozenset([*known][: ARRIVALS_KEPT // 2]).difference(needed())
            known = {peer: each for peer, each in known.items() if peer not in oldest}
        return replace(self, by_author=put(known, author, arrival))

    def after(self, before: Tally, tally: Tally) -> "Arrivals":
        """What is known after the final sets between two tallies."""
        if tally.rounds == before.rounds:
            return self
        turns = dict(self.turns)
        for author, arrival in self.by_author.items():
            shown, audits = tally.trial(author)
            is_audited = audits > before.trial(author)[1]
            is_named = tally.counts.get(author, 0) > before.counts.get(author, 0)
            if tally.missing(author) and not shown and (is_audited or is_named):
                # By wide block, too: who has all of a /16 has 256 lines, each as good as new.
                for where in dict.fromkeys((arrival.line, wide_block(arrival.line))):
                    in_vain, sets = turns.pop(where, (0, 0))
                    turns[where] = in_vain + is_audited, sets + is_named
        return Arrivals(self.by_author, dict([*turns.items()][-LINES_KEPT:]))


class NewcomerOrder(msgspec.Struct, frozen=True):
    """Which newcomers a node names first in the rounds after the newest final one, where it knows too many.

    What is agreed on is how many (`Tally.places`): each proposer chooses whom. Rules in words: docs/ledger.md.
    """

    tally: Tally = Tally()
    voters: frozenset[PeerId] = frozenset()
    """Of the round that is decided next."""
    seed: bytes = b""
    """Digest of the newest final set."""

    def named(self, authors: Collection[PeerId], arrivals: Arrivals) -> frozenset[PeerId]:
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
        arrivals: Arrivals,
        draw: Mapping[PeerId, bytes],
        trials: Mapping[PeerId, tuple[int, int]],
    ) -> list[PeerId]:
        """One of each wide block, a second one, and so on; in a block by line."""
        # By line: anybody can make up as many identities as it takes, not as many addresses. Who was seen only
        # after the seed was known may have been made to fit it, so it waits for the next one.
        lines: dict[str, list[tuple[bool, int, bytes, PeerId]]] = {}
        for peer in new:
            known = arrivals.of(peer)
            is_late = known.rounds >= self.tally.rounds
            lines.setdefault(known.line, []).append((is_late, trials[peer][1], draw[peer], peer))
        blocks: dict[str, list[tuple[int, tuple[int, int], bool, int, bytes, PeerId]]] = {}
        for line, waiting in lines.items():
            turns = [(at, arrivals.turns.get(line, (0, 0)), *one) for at, one in enumerate(sorted(waiting))]
            blocks.setdefault(wide_block(line), []).extend(turns)
        # Blocks that had a turn let the others have theirs: a flood's blocks are many, and as new as any. Who is
        # brought waits for equals: else each address had two turns, its own and one for those that it brings.
        order = sorted(
            (at, arrivals.turns.get(block, (0, 0)), block.startswith(VIA), *one)
            for block, turns in blocks.items()
            for at, one in enumerate(sorted(turns))
        )
        return [peer for *_, peer in order]


@lru_cache(maxsize=1 << 14)
def wide_block(line: str) -> str:
    """The /16 (IPv4) or /32 (IPv6) that a line is in, or the line: a /64 costs nothing, where one has a /48."""
    try:
        network = ipaddress.ip_network(line.removeprefix(VIA))
    except ValueError:
        return line
    wide = str(network.supernet(new_prefix=_WIDE_BITS[network.version]))
    return VIA + wide if line.startswith(VIA) else wide


_WIDE_BITS = {4: 16, 6: 32}
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
