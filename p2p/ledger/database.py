"""The SQLite file of the ledger: checked when opened, written durably, errors mapped to ours in one place."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.p2p.system.atomic_files import make_folder, sync_folder
from atoll.protocols.errors import AtollError, ConfigError, CorruptFault, DiskFault, LocalFault
from atoll.protocols.ids import RunId, short
from atoll.protocols.wires import FEED

FORMAT = f"2, feed {FEED.newest}"
"""Of the tables, and of the entries in them: peers refuse a feed whose entries are of another version."""
_PAGE_BYTES = 4096
_VACUUM_PAGES = 1024
"""Files with fewer pages, 4 MiB, are never rewritten."""
_CACHE_KIB = 256
"""Pages in memory between transactions. SQLite's own 2 MB fill in the first hour, and bring no speed here."""
_SPILL_PAGES = 511
"""Changed pages that a transaction holds in memory, 2 MiB: with 64 a large batch writes them several times. SQLite
takes multiples of 256 for "no limit"."""
_REFETCH = "move the file away and start again: the node writes nothing until other members gave its records back"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT,
    author TEXT NOT NULL,
    seq INTEGER NOT NULL,
    id BLOB NOT NULL UNIQUE,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data BLOB NOT NULL,
    seal BLOB NOT NULL,
    UNIQUE (author, seq)
);
CREATE INDEX IF NOT EXISTS by_round ON entries (round, kind);
CREATE INDEX IF NOT EXISTS epochs ON entries (arrival) WHERE kind = 'epoch';
CREATE TABLE IF NOT EXISTS orphans (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT,
    author TEXT NOT NULL,
    id BLOB NOT NULL UNIQUE,
    round INTEGER NOT NULL,
    data BLOB NOT NULL,
    seal BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS orphans_by_round ON orphans (round);
CREATE TABLE IF NOT EXISTS proofs (
    author TEXT PRIMARY KEY,
    first BLOB NOT NULL,
    second BLOB NOT NULL
) WITHOUT ROWID;
"""


class Database:
    """One exclusive connection, in WAL mode with a sync at every commit."""

    def __init__(self, path: Path, run: RunId, max_bytes: int) -> None:
        """Open or create. Raises DiskFault, CorruptFault, or ConfigError for the ledger of another run."""
        self.path = path
        make_folder(path.parent)
        with self.errors():
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=2.0)
        self._cursor = self._connection.cursor()  # a connection remembers each of its newest 200 cursors
        try:
            self._prepare(run, max_bytes)
        except BaseException:
            self.close()
            raise
        sync_folder(path.parent)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self.errors():
            with suppress(sqlite3.ProgrammingError):  # it was closed before
                self._cursor.close()  # a statement that failed half way would keep the file locked
            self._connection.close()

    @property
    def disk_bytes(self) -> int:
        """Size of the file and of its log."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that hold something: all of it but its free pages. Raises DiskFault."""
        pages, free = self._pages()
        return (pages - free) * _PAGE_BYTES

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises DiskFault or CorruptFault."""
        with self.errors():
            return self._cursor.execute(statement, values).fetchall()

    def write(self, statement: str, *values: object) -> None:
        """Execute a statement inside `transaction`. Raises DiskFault or CorruptFault."""
        with self.errors():
            self._cursor.execute(statement, values)

    def vacuum(self) -> None:
        """Rewrite the file without its free pages, if these are more than half of a file that is not small.

        A loss of power leaves the file as it was, or rewritten. Raises DiskFault.
        """
        pages, free = self._pages()
        if pages >= _VACUUM_PAGES and 2 * free > pages:
            with self.errors():
                self._cursor.execute("VACUUM")
                self._cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager: all writes inside are durable when the block ends, or none is written."""
        with self.errors():
            self._cursor.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self.errors():
                self._cursor.execute("COMMIT")
        except BaseException:
            self._undo()
            raise

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Context manager that maps sqlite3's errors to ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise _fault(error, self.path) from error

    def _pages(self) -> tuple[int, int]:
        pages, free = (int(self.rows(f"PRAGMA {name}")[0][0]) for name in ("page_count", "freelist_count"))
        return pages, free

    def _undo(self) -> None:
        # SQLite has already rolled back by itself after a full disk or an I/O error.
        if self._connection.in_transaction:
            with self.errors():
                self._cursor.execute("ROLLBACK")

    def _prepare(self, run: RunId, max_bytes: int) -> None:
        pragmas = (
            f"page_size={_PAGE_BYTES}",
            "locking_mode=EXCLUSIVE",
            "journal_mode=WAL",
            "synchronous=FULL",
            "trusted_schema=OFF",
            "temp_store=MEMORY",
            f"cache_size=-{_CACHE_KIB}",
            f"cache_spill={_SPILL_PAGES}",
            f"max_page_count={max(16, max_bytes // _PAGE_BYTES)}",
        )
        with self.errors():
            for pragma in pragmas:
                self._cursor.execute(f"PRAGMA {pragma}").fetchall()
        problems = self.rows("PRAGMA quick_check(1)")
        if problems != [("ok",)]:
            raise CorruptFault(f"{self.path} is damaged: {problems[0][0]}", hint=_REFETCH)
        with self.errors():
            self._connection.executescript(_SCHEMA)
        if (found := self._meta("format", FORMAT.encode())) != FORMAT.encode():
            text = found.decode(errors="replace")
            raise ConfigError(
                f"{self.path} was written by another version of atoll: format {text}, this one reads {FORMAT}",
                hint="start that version, or save a checkpoint with it for `atoll run new --from-checkpoint`",
            )
        if (found := self._meta("run", run)) != run:
            raise ConfigError(f"{self.path} belongs to run {short(found)}", hint="use another --home for this run")

    def _meta(self, name: str, first: bytes) -> bytes:
        """What the file says, or `first`, which a new file says from now on."""
        found = self.rows("SELECT value FROM meta WHERE name = ?", name)
        if not found:
            with self.transaction():
                self.write("INSERT INTO meta VALUES (?, ?)", name, first)
        return bytes(found[0][0]) if found else first


def damaged(path: Path, what: str) -> CorruptFault:
    """CorruptFault for a row that does not verify."""
    return CorruptFault(f"{path} is damaged: {what}", hint=_REFETCH)


def _fault(error: sqlite3.Error, path: Path) -> AtollError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    text = f"{path}: {error}"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT):
        return CorruptFault(text, hint=_REFETCH)
    if code == sqlite3.SQLITE_FULL:
        return DiskFault(text, hint="free some space or raise ledger_bytes (config.toml)")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return DiskFault(text, hint="the ledger cannot be written; check the file system and who owns the file")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LocalFault(text, hint="another node runs on this home; stop it or use another --home")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return DiskFault(text, hint="the disk fails to read or write; check it and choose another --home")
    return LocalFault(text, hint="the ledger's file answered in an unknown way; see the log")
