"""What a ledger on disk keeps of old rounds: all records, or a summary in their place.

A node may cut its ledger: records up to a round go, and one summary of them, which the node made itself, takes
their place (node/daemon/certificates/summary.py). Each feed then has a floor: below it entries are missing, from
it on none is. Entries above it are linked as before, so two histories of an author still contradict each other in
every entry that both have there. All of it happens in one transaction, or nothing of it. Why, and which records
stay for good: docs/decisions/0025-ledgers-may-be-cut.md.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import Meta

from atoll.p2p.ledger.database import Database, damaged
from atoll.protocols import codec
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import Digest, PeerId, digest, short
from atoll.protocols.ledger.records import (
    ENTRY_MAX_BYTES,
    MAX_SET,
    Admit,
    Entry,
    EpochBody,
    Solved,
    encode_entry,
)

_SEAL_BYTES = 8
_SUMMARY = "summary"
_FLOOR = "floor/"
_LINK = "link/"
"""All are rows of `meta`: a new table would need a page, which a full ledger of an older version has not."""
_STAYS = tuple(str(body.__struct_config__.tag) for body in (*get_args(EpochBody), Admit, Solved))
"""Kinds of records that stay: who joins, leaves, opens an epoch or excludes. They are few, and read in every
replay."""
_HEADLESS = "seq < (SELECT MAX(seq) FROM entries h WHERE h.author = entries.author)"


SignedEntry: TypeAlias = Annotated[bytes, Meta(max_length=ENTRY_MAX_BYTES)]


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why a summary is to be believed by who knows the voters of an earlier round."""

    proposal: SignedEntry
    votes: Annotated[tuple[SignedEntry, ...], Meta(max_length=MAX_SET)]


class StoredLink(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A link of this ledger's chain, with the summary that it proves."""

    link: Link
    name: Digest
    """Blob id of the summary."""
    summary: bytes


class Cut(NamedTuple):
    """What a ledger lets go of, and what stands for it."""

    summary: bytes
    last: int
    """Newest round whose records go."""
    forks: Collection[int] = ()
    """Rounds whose records all stay."""
    floors: Mapping[PeerId, Digest] | None = None
    """Entries from which on a feed stays whole; feeds without one stay. None: each is cut as far as it goes."""
    links: tuple[StoredLink, ...] = ()
    """Why others may believe the summary; the last link proves it."""


class Below(NamedTuple):
    """A record below a floor that outlives a cut."""

    id: Digest
    round: int
    is_lasting: bool
    """It stays for good; else only where its round is newer, or one at which an epoch begins."""

    def stays(self, last: int, forks: Collection[int]) -> bool:
        """Whether a cut up to round `last` leaves it."""
        return self.is_lasting or self.round > last or self.round in forks


class FeedEnd(NamedTuple):
    """One author's feed in this ledger."""

    next: int
    """Next sequence number."""
    head: bytes
    """Id of the newest entry; empty where there is none."""
    size_bytes: int
    """Size of the entries that are here."""


class RecordHistory:
    """The floors and the summary of one ledger."""

    def __init__(self, database: Database) -> None:
        """Raises DiskFault, or CorruptFault for a summary that does not verify."""
        self._db = database
        self.floors: Mapping[PeerId, int] = self._read_floors()
        """The first sequence number of each cut feed from which on no entry is missing."""
        self.links = self._read_links()
        """Why others may believe the summary; empty: they may not."""
        self.summary = self._read_summary()
        """What stands for the records that are gone; None: none are."""

    def read_feeds(self) -> dict[PeerId, FeedEnd]:
        """All feeds, without gaps above their floors. Raises CorruptFault, DiskFault."""
        rows = self._db.rows(
            "SELECT e.author, SUM(seq >= IFNULL(f.value, 0)), IFNULL(f.value, 0), MAX(seq), SUM(LENGTH(data)), "
            "(SELECT id FROM entries h WHERE h.author = e.author ORDER BY seq DESC LIMIT 1) "
            f"FROM entries e LEFT JOIN meta f ON f.name = '{_FLOOR}' || e.author GROUP BY e.author"
        )
        for author, count, floor, last, _, _ in rows:
            if count != last + 1 - floor:
                raise damaged(self._db.path, f"the feed of {short(author)} has gaps")
        return {PeerId(author): FeedEnd(last + 1, head, size) for author, _, _, last, size, head in rows}

    def floor(self, author: PeerId) -> int:
        """The first sequence number of this author's feed from which on no entry is missing."""
        return self.floors.get(author, 0)

    def cut(self, cut: Cut, entries: Collection[Entry] = ()) -> None:
        """Put a summary in place of the records of old rounds; all or nothing. Raises DiskFault.

        `entries`: verified ones that a summary of others names, with the floors: this ledger may lack them.
        Every author's newest entry stays, because the next one is linked to it, and so do all records about the
        rounds `forks`, at which an epoch of this node's chain begins.
        """
        old = (
            f"round <= ? AND kind NOT IN ({_marks(_STAYS)}) AND round NOT IN ({_marks(cut.forks)}) AND {_HEADLESS}"
        )
        values = (cut.last, *_STAYS, *cut.forks)
        with self._db.transaction():
            for entry in entries:
                self._insert(entry)
            # First, so that a full file has the pages that the rest needs.
            for author, floor in sorted(self._floors_after(cut, old, values).items()):
                self._db.write(
                    f"DELETE FROM entries WHERE author = ? AND seq < ? AND {old}", author, floor, *values
                )
                highest = max(floor, self.floor(author))
                self._db.write("INSERT OR REPLACE INTO meta VALUES (?, ?)", _FLOOR + author, highest)
            self._write_links(cut.links)
            self._db.write("INSERT OR REPLACE INTO meta VALUES (?, ?)", _SUMMARY, _seal(cut.summary) + cut.summary)
        self.floors, self.summary, self.links = self._read_floors(), cut.summary, cut.links

    def _insert(self, entry: Entry) -> None:
        """One of a summary. What contradicts an entry here stays away: this feed is that of the other history."""
        data = encode_entry(entry)
        self._db.write(
            "INSERT OR IGNORE INTO entries (author, seq, id, round, kind, data, seal) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            entry.author,
            entry.seq,
            entry.id,
            entry.body.round,
            str(entry.body.__struct_config__.tag),
            data,
            _seal(data),
        )

    def _write_links(self, links: tuple[StoredLink, ...]) -> None:
        self._db.write("DELETE FROM meta WHERE name >= ? AND name < ?", _LINK, "link0")
        for number, link in enumerate(links):
            data = codec.encode(link)
            self._db.write("INSERT INTO meta VALUES (?, ?)", f"{_LINK}{number:06d}", _seal(data) + data)

    def _read_links(self) -> tuple[StoredLink, ...]:
        rows = self._db.rows("SELECT value FROM meta WHERE name >= ? AND name < ? ORDER BY name", _LINK, "link0")
        return tuple(codec.decode(self._unsealed(row), StoredLink, max_bytes=1 << 26) for (row,) in rows)

    def _unsealed(self, row: bytes) -> bytes:
        seal, data = row[:_SEAL_BYTES], bytes(row[_SEAL_BYTES:])
        if _seal(data) != seal:
            raise damaged(self._db.path, "the summary of old rounds does not verify")
        return data

    def _floors_after(self, cut: Cut, old: str, values: tuple[object, ...]) -> dict[PeerId, int]:
        """The floor of each feed that is cut."""
        if cut.floors is not None:
            return {author: place for author, entry in cut.floors.items() if (place := self.place_of(entry))}
        rows = self._db.rows(f"SELECT author, MAX(seq) + 1 FROM entries WHERE {old} GROUP BY author", *values)
        return {PeerId(author): floor for author, floor in rows}

    def place_of(self, entry: Digest) -> int | None:
        """The sequence number of an entry; None where no feed here has it."""
        rows = self._db.rows("SELECT seq FROM entries WHERE id = ?", entry)
        return int(rows[0][0]) if rows else None

    def below(self, author: PeerId, first: int, end: int, last: int, forks: Collection[int]) -> list[Below]:
        """The records of a feed from `first` on and before `end` that a cut up to round `last` leaves."""
        rows = self._db.rows(
            f"SELECT id, round, kind IN ({_marks(_STAYS)}) FROM entries WHERE author = ? AND seq >= ? AND seq < ? "
            f"AND (kind IN ({_marks(_STAYS)}) OR round > ? OR round IN ({_marks(forks)})) ORDER BY seq",
            *_STAYS,
            author,
            first,
            end,
            *_STAYS,
            last,
            *forks,
        )
        return [Below(Digest(name), number, bool(stays)) for name, number, stays in rows]

    def forget(self, author: PeerId) -> None:
        """Inside a transaction: the feed of this author goes, and with it its floor."""
        self._db.write("DELETE FROM meta WHERE name = ?", _FLOOR + author)
        self.floors = {peer: floor for peer, floor in self.floors.items() if peer != author}

    def reload(self) -> None:
        """Read the floors again: a transaction that changed them failed."""
        self.floors = self._read_floors()

    def shrink(self) -> None:
        """Give the disk back what is free in the file, if that is most of it. A full disk leaves it as it is."""
        try:
            self._db.vacuum()
        except DiskFault:
            return  # the pages are used again, so the file does not grow

    def _read_floors(self) -> dict[PeerId, int]:
        rows = self._db.rows("SELECT name, value FROM meta WHERE name >= ? AND name < ?", _FLOOR, "floor0")
        return {PeerId(name.removeprefix(_FLOOR)): floor for name, floor in rows}

    def _read_summary(self) -> bytes | None:
        rows = self._db.rows("SELECT value FROM meta WHERE name = ?", _SUMMARY)
        return self._unsealed(rows[0][0]) if rows else None


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


def _seal(data: bytes) -> bytes:
    return digest(data)[:_SEAL_BYTES]
