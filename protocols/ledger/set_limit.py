"""Which contributions of a round its set names, where more were made than one set may name. Pure.

Identities cost nothing, so anybody can make more authors of a round than MAX_SET, each with a legal payload. Those
that worked before come first, by what all nodes find alike: how many of the newest final sets name them, then
whether any did. The rest is drawn by a hash of round and author, which nobody can make good for all rounds. Rules
in words: docs/rounds.md.
"""

from collections.abc import Collection, Mapping

import msgspec

from atoll.protocols.ids import Digest, PeerId, RunId, digest
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


def first_places(
    run: RunId, number: int, authors: Mapping[Digest, PeerId], seniority: Seniority, most: int = MAX_SET
) -> tuple[Digest, ...]:
    """The contributions to round `number` that its set names, sorted: all of them, or the first `most`.

    `authors`: their authors by entry id, each author once.
    """
    # By author, not by entry: of entries anybody could make as many as it takes.
    first = first_authors(run, number, authors.values(), seniority, most)
    return tuple(sorted(name for name, author in authors.items() if author in first))
