"""Reads a ledger's entries from its database. A row whose seal does not fit its bytes is damage.

A cursor is a place in the order of arrival, which never changes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from atoll.p2p.ledger.database import Database, damaged
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import digest
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, Entry, Epoch

_SEAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class EntryReader:
    """Entries of feeds (table `entries`) and orphans (table `orphans`). Raises CorruptFault, DiskFault."""

    database: Database

    def select(self, where: str, *values: object, table: str = "entries") -> list[tuple[int, bytes]]:
        """Arrival and bytes of the rows that the condition of SQL names."""
        rows = self.database.rows(f"SELECT arrival, data, seal FROM {table} WHERE {where}", *values)
        for arrival, data, seal in rows:
            if seal_of(data) != seal:
                raise damaged(self.database.path, f"entry {arrival} does not verify")
        return [(arrival, data) for arrival, data, _ in rows]

    def decode(self, data: bytes) -> Entry:
        """The entry of a row."""
        try:
            return codec.decode(data, Entry, max_bytes=ENTRY_MAX_BYTES)
        except DecodeError as error:
            raise damaged(self.database.path, str(error)) from error

    def after(self, where: str, *values: object, table: str = "entries") -> list[tuple[int, Entry]]:
        """Entries as they arrived, each with the cursor that follows it. The last value: at most so many."""
        rows = self.select(f"{where} ORDER BY arrival LIMIT ?", *values, table=table)
        return [(arrival, self.decode(data)) for arrival, data in rows]

    def newest_epochs_from(self, most: int) -> int:
        """The cursor after which `epochs_after` has the newest `most` signatures under epochs."""
        newest = f"{_EPOCHS} ORDER BY arrival DESC LIMIT 1 OFFSET ?"
        rows = self.database.rows(f"SELECT arrival FROM entries WHERE {newest}", most)
        return int(rows[0][0]) if rows else 0

    def epochs_after(self, cursor: int, limit: int) -> list[tuple[int, Entry]]:
        """Signatures under epochs that arrived after `cursor`."""
        return self.after(f"{_EPOCHS} AND arrival > ?", cursor, limit)

    def round_after(self, kind: type[Any], number: int, cursor: int, limit: int) -> list[tuple[int, Entry]]:
        """Entries of this kind about a round that arrived after `cursor`."""
        return self.after("round = ? AND kind = ? AND arrival > ?", number, kind_of(kind), cursor, limit)

    def orphans_after(self, cursor: int, limit: int) -> list[tuple[int, Entry]]:
        """Orphans that came after `cursor`, which is one of theirs."""
        return self.after("arrival > ?", cursor, limit, table="orphans")

    def arrived(self, cursors: Iterable[int], *, are_orphans: bool = False) -> Iterator[Entry]:
        """The entries that these cursors follow, one by one; those that are gone are left out."""
        table = "orphans" if are_orphans else "entries"
        return (self.decode(data) for at in cursors for _, data in self.select("arrival = ?", at, table=table))


def kind_of(body: type[Any]) -> str:
    """The name of a kind of bodies in the column `kind`."""
    return str(body.__struct_config__.tag)


def seal_of(data: bytes) -> bytes:
    """What a row holds beside its bytes, to find damage."""
    return digest(data)[:_SEAL_BYTES]


_EPOCHS = f"kind = '{kind_of(Epoch)}'"
"""As a parameter SQLite would not use the index of epochs."""
