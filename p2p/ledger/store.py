"""The ledger of one run on disk: every author's signed, hash-linked feed, written durably, whole or not at all.

When a method returns, its changes are on the disk. Readers use `since(cursor)`: entries have one local order of
arrival that never changes, so a reader that only learns of a change misses nothing.
"""

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse, islice
from pathlib import Path
from typing import Any

from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.ledger.database import Database, damaged
from atoll.p2p.ledger.history import Cut, FeedEnd, RecordHistory
from atoll.p2p.ledger.insertion import Batch, Equivocation, InsertResult, Verdict
from atoll.p2p.ledger.newcomers import Newcomers
from atoll.p2p.ledger.proofs import LackedProofs, Proof, ProofTable, contradicts
from atoll.p2p.ledger.reader import EntryReader, kind_of, seal_of
from atoll.p2p.ledger.shares import LedgerRoom, Quota
from atoll.p2p.ledger.signers import Signers
from atoll.protocols.errors import ConfigError, DiskFault, LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, RunId, short
from atoll.protocols.ledger.records import Admit, Body, Entry, encode_entry, sign_entry

LEDGER_FILE = "ledger.sqlite"
"""File name of the ledger below a run's folder."""
CLOSED = 1 << 40
"""Entry of a vector that requests nothing of an author; one above the highest legal sequence number."""
ORPHANS_MAX = 4096
"""Orphans kept of one author. It is asked for few, and only while it may be a voter."""
_IN_TURN = 16
"""Entries of a feed that follow each other in a batch while others wait: those of some four rounds."""
_NOTHING = FeedEnd(0, b"", 0)


class Ledger:
    """All entries of one run. Synchronous, for one thread."""

    def __init__(
        self,
        path: Path,
        run: RunId,
        quota: Quota | None = None,
        gate: AdmissionGate | None = None,
        newcomers: Newcomers | None = None,
    ) -> None:
        """Open or create. Raises DiskFault, CorruptFault, LocalFault (another process holds it), ConfigError.

        `gate` decides which feeds may begin here; None admits all. `newcomers`: the budget of authors that are not
        accepted; None: they are not budgeted.
        """
        self.run = run
        self.signers = Signers(path.parent)
        self.stored = 0
        """Number of entries that were stored since the file was opened."""
        self.quota = quota or Quota()
        self._gate = gate
        self.newcomers = newcomers
        self._excluded: dict[PeerId, str] = {}
        self._db = Database(path, run, self.quota.disk_bytes)
        self.reader = EntryReader(self._db)
        try:
            self.history = RecordHistory(self._db)
            """The rounds whose records are here, and what stands for those before."""
            self.history.shrink()
            self._feeds = self.history.read_feeds()
            self._proofs = ProofTable(self._db)
            self._forked = self._proofs.authors()
            if gate is not None:
                gate.restore(self._feeds, [e.body for e in self.entries(kind=Admit) if isinstance(e.body, Admit)])
            self._reset_newcomers()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    @property
    def disk_bytes(self) -> int:
        """Size of the ledger's files."""
        return self._db.disk_bytes

    @property
    def fault(self) -> DiskFault | None:
        """Why nothing of others is stored; None: it is."""
        return self.newcomers.shares.fault() if self._is_own and self.newcomers is not None else None

    def append(self, identity: Identity, body: Body) -> Entry:
        """Sign, link and store our next entry; it is durable when this returns.

        Raises DiskFault, DecodeError for an illegal body, ConfigError when the run does not admit us, LocalFault
        when our own feed has forked or is full.
        """
        author = identity.peer_id
        feed = self._feeds.get(author, _NOTHING)
        self.check_author(author)
        if self._gate is not None and not feed.next and (reason := self._gate.own_refusal(body)):
            raise ConfigError(reason, hint="ask the run's owner for an invite")
        entry = sign_entry(self.run, identity, feed.next, feed.head, body)
        if self._is_over_quota(feed):
            raise LocalFault(
                "our own feed is full in this ledger",
                hint="raise ledger_author_bytes, here and on the other nodes",
            )
        with self._db.transaction():
            after = self._write(entry, feed)
        self._feeds[author] = after
        self.signers.note(author)
        self.stored += 1
        if self._gate is not None and not entry.seq:
            self._gate.record_first_entry(entry)
        return entry

    def check_author(self, author: PeerId) -> None:
        """Raise LocalFault if our own identity is proven to have signed two histories: it can write no more."""
        if author in self._forked:
            raise LocalFault(
                "this identity has signed two histories (its home was copied, or restored from an old backup)",
                hint="move identity.key out of its home: the next start makes a new identity",
            )

    def insert_all(self, entries: Iterable[Entry], sender: PeerId | None = None) -> InsertResult:
        """Store verified entries in one transaction. Raises DiskFault, and then none is stored.

        Entries that are known, out of order, over quota or of refused authors are skipped. `sender`: the peer that
        sent them; an admitted one vouches for new authors (see `AdmissionGate`).
        """
        batch = Batch(sender)
        self._measure()
        try:
            with self._db.transaction():
                for entry in entries:
                    self._insert(entry, batch)
        except BaseException:
            self._reset_newcomers()
            self.history.reload()
            raise
        self._forked |= batch.forks.keys()
        self._apply(batch)
        fresh = tuple(entry for entry in batch.fresh if entry.author in self._feeds)
        for entry in fresh:
            if self._gate is not None and not entry.seq:
                self._gate.record_first_entry(entry)
        return InsertResult(
            fresh, batch.gap, tuple(batch.forks.values()), tuple(batch.refused), tuple(batch.pruned)
        )

    def end_replay(self) -> tuple[PeerId, ...]:
        """The replay told the budget who is accepted. Returns the newcomers whose feeds had to go."""
        if self.newcomers is None or not self.newcomers.is_replaying:
            return ()
        batch = Batch(None)
        with self._db.transaction():
            for author in self.newcomers.end_replay():
                self._prune(author, batch)
        self._apply(batch)
        return tuple(batch.pruned)

    def cut(self, cut: Cut, entries: Collection[Entry] = ()) -> None:
        """Put a summary in place of the records of old rounds: `RecordHistory.cut`. Raises DiskFault."""
        for entry in entries:
            for _, here in self.reader.select("author = ? AND seq = ?", entry.author, entry.seq):
                self.add_proof(self.reader.decode(here), entry)  # else the other history stays without a word
        self.history.cut(cut, entries)
        self._feeds = self.history.read_feeds()

    def exclude(self, peer: PeerId, reason: str) -> None:
        """From now on `peer` does not take part. What it wrote stays, and more is stored: a set may name it."""
        self._excluded[peer] = reason

    def forget_chain(self, newcomers: Newcomers) -> None:
        """The node follows another chain of the run: from now on judge by this budget, and exclude nobody."""
        self._excluded.clear()
        self.newcomers = newcomers
        self._reset_newcomers()

    def admits(self, peer: PeerId) -> bool:
        """Whether `peer` may take part: its feed has begun here, or the run admits it without a permit."""
        if peer in self._excluded:
            return False
        return self._gate is None or peer in self._feeds or self._gate.admits_by_name(peer)

    def refusal(self, peer: PeerId) -> str:
        """Reason why entries of `peer` are refused; empty if they are not, or it never tried."""
        if peer in self._excluded:
            return self._excluded[peer]
        reason = "" if self._gate is None or self.admits(peer) else self._gate.refusal_reason(peer)
        return reason or ("" if self.newcomers is None else self.newcomers.reason(peer))

    def end_bootstrap(self, peer: PeerId) -> None:
        """After a whole exchange with a member `peer`, accept only permits that are valid now from strangers."""
        if self._gate is not None and self.admits(peer):
            self._gate.trusts_all = False

    def vector(self) -> dict[PeerId, int]:
        """Next sequence number of every author."""
        return {author: feed.next for author, feed in self._feeds.items()}

    def wanted(self, most: int = 1 << 16) -> dict[PeerId, int]:
        """`vector` without who rests, `most` authors; CLOSED for those of which no more entries are accepted."""
        self._measure()
        ends = dict.fromkeys(self.newcomers.absent(self._feeds) if self.newcomers is not None else (), 0)
        awake = ((a, self._feeds[a]) for a in (*filter(self._feeds.__contains__, ends), *self._not_resting()))
        ends |= {author: CLOSED if self._is_full(author, feed) else feed.next for author, feed in awake}
        ends |= dict.fromkeys(self._forked, CLOSED)  # of these the feed itself may not be here
        return dict(islice(ends.items(), most))

    @property
    def is_closed(self) -> bool:
        """Whether no author that is not here can begin a feed any more."""
        return self._is_own or self._awake() >= self.quota.authors

    def missing(self, vector: Mapping[PeerId, int], limit_bytes: int, *, only_known: bool = False) -> list[bytes]:
        """Bytes of entries that a peer with `vector` lacks, each feed in order, up to `limit_bytes` but at least
        one.

        Feeds that the peer goes on with come side by side: where two chains meet, the first batch tells which
        one all follow. `only_known`: leave out authors that the vector does not name. While many newcomers wait
        here, those that showed no work are only brought to who has their feeds already.
        """
        found: list[bytes] = []
        size = 0
        for feeds in self._offered(vector, only_known=only_known):
            while feeds:
                author, at = feeds.popleft()
                rows = self.reader.select("author = ? AND seq >= ? ORDER BY seq LIMIT ?", author, at, _IN_TURN)
                for _, entry_bytes in rows:
                    size += len(entry_bytes)
                    if found and size > limit_bytes:
                        return found
                    found.append(entry_bytes)
                if rows and at + len(rows) < self._feeds[author].next:
                    feeds.append((author, at + len(rows)))
        return found

    def _offered(self, vector: Mapping[PeerId, int], *, only_known: bool) -> Iterator[deque[tuple[PeerId, int]]]:
        """Feeds that go on for a peer with this vector, and from where: those that come side by side."""
        # First what the peer goes on with: it may refuse all others, and few of their feeds fill a batch.
        yield deque((author, at) for author in vector if self._goes_on(author, at := max(0, vector[author])))
        held_back = self.newcomers if self.newcomers is not None and self.newcomers.is_pressed else None
        for author in () if only_known else self._not_resting():
            is_new = author not in vector and not (held_back is not None and held_back.is_new(author))
            if is_new and self._goes_on(author, 0):
                yield deque([(author, 0)])

    def _goes_on(self, author: PeerId, at: int) -> bool:
        """Whether a feed here has the entry `at`. What comes next may be gone (`ledger.floors` says so)."""
        return author in self._feeds and self.history.floor(author) <= at < self._feeds[author].next

    def entries(
        self, *, kind: type[Any] | None = None, number: int | None = None, author: PeerId | None = None
    ) -> list[Entry]:
        """All entries with this body type, round number and author (None: any), in arrival order."""
        filters = {"kind": kind and kind_of(kind), "round": number, "author": author}
        chosen = {name: value for name, value in filters.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in chosen) or "1"
        return [
            self.reader.decode(data)
            for _, data in self.reader.select(f"{where} ORDER BY arrival", *chosen.values())
        ]

    def since(self, cursor: int, limit: int = 256) -> list[tuple[int, Entry]]:
        """Entries that arrived after `cursor` (0: all), each with the cursor that follows it."""
        return self.reader.after("arrival > ?", cursor, limit)

    def get(self, entry_id: Digest) -> Entry | None:
        """The entry with this id; None if it is unknown."""
        rows = self.reader.select("id = ?", entry_id)
        return self.reader.decode(rows[0][1]) if rows else None

    def holds(self, entry_id: Digest) -> bool:
        """Whether an entry with this id is in a feed here."""
        return bool(self._db.rows("SELECT 1 FROM entries WHERE id = ?", entry_id))

    def head(self, author: PeerId) -> Entry | None:
        """The author's newest entry; None if there is none."""
        rows = self.reader.select("author = ? ORDER BY seq DESC LIMIT 1", author)
        return self.reader.decode(rows[0][1]) if rows else None

    def add_orphans(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Keep verified entries of equivocators that their feeds here do not hold. Returns those that are new.

        Entries of other authors are left out. Raises DiskFault.
        """
        fresh: list[Entry] = []
        with self._db.transaction():
            for entry in entries:
                is_known = self.get(entry.id) is not None or self.orphan(entry.id) is not None
                has_room = not self._is_own and self._orphans_of(entry.author) < ORPHANS_MAX
                if entry.author in self._forked and not is_known and has_room:
                    data = encode_entry(entry)
                    self._db.write(
                        "INSERT INTO orphans (author, id, round, data, seal) VALUES (?, ?, ?, ?, ?)",
                        entry.author,
                        entry.id,
                        entry.body.round,
                        data,
                        seal_of(data),
                    )
                    fresh.append(entry)
        return tuple(fresh)

    def orphans(self, number: int | None = None) -> list[Entry]:
        """The orphans of a round (None: of all rounds) in the order in which they came."""
        where = "1" if number is None else "round = ?"
        values = [] if number is None else [number]
        rows = self.reader.select(f"{where} ORDER BY arrival", *values, table="orphans")
        return [self.reader.decode(data) for _, data in rows]

    def orphan(self, entry_id: Digest) -> Entry | None:
        """The orphan with this id; None if there is none."""
        rows = self.reader.select("id = ?", entry_id, table="orphans")
        return self.reader.decode(rows[0][1]) if rows else None

    def equivocators(self) -> frozenset[PeerId]:
        """Authors that signed two histories; no more of their entries are accepted."""
        return frozenset(self._forked)

    def proof(self, author: PeerId) -> Proof | None:
        """Two signed entries of `author` that cannot belong to one feed; None without a proof."""
        return self._proofs.get(author)

    def named_equivocators(self, rng: random.Random) -> tuple[PeerId, ...]:
        """Those of `equivocators` that a message names: `ProofTable.named`."""
        return self._proofs.named(self._forked, rng)

    def lacked_proofs(self, vector: Mapping[PeerId, int], named: Sequence[PeerId]) -> LackedProofs:
        """What a peer lacks that has this vector and names these equivocators."""
        in_use = {author for author, at in vector.items() if at < CLOSED}
        return self._proofs.lacking(self._forked, named, in_use)

    def proofs_for(self, lacking: LackedProofs, rng: random.Random) -> list[Proof]:
        """Some of the proofs that a peer lacks; first those against accepted authors with most work."""
        return self._proofs.offered(lacking, self.resting, self._weight, rng)

    def add_proof(self, first: Entry, second: Entry) -> bool:
        """Store a proof of two verified entries that a peer found. False if it proves nothing new."""
        author = first.author
        # Of those that showed no work nobody could store the proofs of a flood. An author of a final set is proven
        # everywhere: excluded or not, and also where a summary stands for its feed.
        is_known = author in self._feeds or self._is_accepted(author)
        if author in self._forked or not is_known or self._is_own or not contradicts(first, second):
            return False
        with self._db.transaction():
            self._proofs.write(first, second)
        self._forked.add(author)
        return True

    def _is_accepted(self, author: PeerId) -> bool:
        return self.admits(author) if self.newcomers is None else self.newcomers.is_accepted(author)

    def _weight(self, author: PeerId) -> tuple[bool, int, PeerId]:
        rounds = self.newcomers.shares.rounds(author) if self.newcomers is not None else 0
        return not self._is_accepted(author), -rounds, author

    def _judge(self, entry: Entry, feed: FeedEnd) -> Verdict:
        if entry.author in self._forked:
            return Verdict.REFUSED
        if entry.seq > feed.next:
            return Verdict.GAP
        if entry.seq == feed.next:
            return Verdict.FRESH if entry.previous == feed.head else Verdict.FORK
        known = self._db.rows("SELECT id FROM entries WHERE author = ? AND seq = ?", entry.author, entry.seq)
        if not known and entry.seq < self.history.floor(entry.author):
            return Verdict.KNOWN  # it was here; another history would contradict what is above the floor, too
        return Verdict.KNOWN if known and known[0][0] == entry.id else Verdict.FORK

    def _insert(self, entry: Entry, batch: Batch) -> None:
        author = entry.author
        feed = batch.feeds.get(author) or self._feeds.get(author, _NOTHING)
        if self.newcomers is not None and self.newcomers.awaits_entries:
            self.newcomers.note_named(entry.id, author)
        verdict = Verdict.REFUSED if author in batch.forks or self._is_own else self._judge(entry, feed)
        if verdict is not Verdict.KNOWN and self._is_refused(entry, batch, is_first=not feed.next):
            verdict = Verdict.REFUSED
        if verdict is Verdict.FRESH and self._has_room(author, feed, batch):
            if self.newcomers is not None:
                for gone in self.newcomers.take_place(author, batch.sender):
                    self._prune(gone, batch)
            batch.feeds[author] = self._write(entry, feed)
            batch.fresh.append(entry)
        elif verdict is Verdict.FORK:
            self._keep_proof(entry)
            batch.forks[author] = Equivocation(author, entry.seq)
        batch.gap = batch.gap or (verdict is Verdict.GAP and not self._is_full(author, feed))

    def _prune(self, author: PeerId, batch: Batch) -> None:
        self._db.write("DELETE FROM entries WHERE author = ?", author)
        self._proofs.forget(author)
        self.history.forget(author)
        batch.feeds[author] = _NOTHING
        batch.forks.pop(author, None)
        batch.pruned.append(author)

    def _apply(self, batch: Batch) -> None:
        self._feeds.update(batch.feeds)
        for author in batch.pruned:
            if not self._feeds[author].next:
                del self._feeds[author]
            self._forked.discard(author)
        self.stored += len(batch.fresh)

    def _reset_newcomers(self) -> None:
        if self.newcomers is not None:
            self.newcomers.reset({author: feed.size_bytes for author, feed in self._feeds.items()})

    def _is_refused(self, entry: Entry, batch: Batch, *, is_first: bool) -> bool:
        if self._gate is not None and is_first:
            sender = batch.sender
            vouched = sender is not None and sender != entry.author and self.admits(sender)
            reason = self._gate.refusal(entry, vouched=vouched)
            if reason and self._gate.record_refusal(entry.author, reason):
                batch.refused.append((entry.author, reason))
            if reason:
                return True
        return self.newcomers is not None and self.newcomers.is_refused(entry, batch.sender)

    def _not_resting(self) -> Iterator[PeerId]:
        """Authors whose feeds are here and do not rest. Most may rest, so no Python runs for one that does."""
        return filterfalse(self.resting.__contains__, self._feeds)

    @property
    def resting(self) -> set[PeerId]:
        """Authors that gave their places back, and whose feeds stay here (`Accepted`)."""
        return self.newcomers.accepted.resting if self.newcomers is not None else set()

    def _awake(self, more: Iterable[PeerId] = ()) -> int:
        """Count the feeds that are here or come with `more`, without those that rest."""
        return len(self._feeds) + sum(author not in self._feeds for author in more) - len(self.resting)

    def _measure(self) -> None:
        if self.newcomers is not None:
            self.newcomers.shares.measure(self._db.used_bytes)

    @property
    def _is_own(self) -> bool:
        return self.newcomers is not None and self.newcomers.shares.room is LedgerRoom.OWN

    def _is_over_quota(self, feed: FeedEnd) -> bool:
        return feed.next >= self.quota.author_entries or feed.size_bytes >= self.quota.author_bytes

    def _is_full(self, author: PeerId, feed: FeedEnd) -> bool:
        return self._is_over_quota(feed) or (self.newcomers is not None and self.newcomers.is_full(author))

    def _has_room(self, author: PeerId, feed: FeedEnd, batch: Batch) -> bool:
        # Only the first entry of a feed counts them all: there may be many that rest.
        is_here = feed.next > 0
        return not self._is_full(author, feed) and (is_here or self._awake(batch.feeds) < self.quota.authors)

    def _write(self, entry: Entry, feed: FeedEnd) -> FeedEnd:
        data = encode_entry(entry)
        self._db.write(
            "INSERT INTO entries (author, seq, id, round, kind, data, seal) VALUES (?, ?, ?, ?, ?, ?, ?)",
            entry.author,
            entry.seq,
            entry.id,
            entry.body.round,
            kind_of(type(entry.body)),
            data,
            seal_of(data),
        )
        if self.newcomers is not None:
            self.newcomers.grow(entry.author, len(data))
        return FeedEnd(entry.seq + 1, entry.id, feed.size_bytes + len(data))

    def _keep_proof(self, entry: Entry) -> None:
        # An entry whose link does not fit contradicts the entry before it, not one at its own place.
        at = min(entry.seq, self._last(entry.author))
        rows = self.reader.select("author = ? AND seq = ?", entry.author, at)
        if not rows:
            raise damaged(self._db.path, f"entry {at} of {short(entry.author)} is gone")
        self._proofs.write(self.reader.decode(rows[0][1]), entry)

    def _last(self, author: PeerId) -> int:
        rows = self._db.rows("SELECT MAX(seq) FROM entries WHERE author = ?", author)
        return int(rows[0][0])

    def _orphans_of(self, author: PeerId) -> int:
        return int(self._db.rows("SELECT COUNT(*) FROM orphans WHERE author = ?", author)[0][0])
