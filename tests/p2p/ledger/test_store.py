"""The ledger on disk: order, equivocation, quotas, full disks, damage, kills."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.p2p.ledger.insertion import Equivocation
from atoll.p2p.ledger.proofs import contradicts
from atoll.p2p.ledger.shares import Quota
from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.protocols.errors import ConfigError, CorruptFault, DiskFault, LocalFault, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, RunId, digest
from atoll.protocols.ledger.records import Ack, Entry, Leave, decode_entry, encode_entry, sign_entry
from atoll.protocols.wires import FEED

RUN = RunId(digest(b"run"))
AUTHORS = [Identity(bytes([number]) * 32) for number in range(1, 5)]
ME = AUTHORS[0]


def insert(ledger: Ledger, entry: Entry) -> bool:
    """Insert one entry; whether it was new. Raises Equivocation."""
    done = ledger.insert_all([entry])
    if done.forks:
        raise done.forks[0]
    return bool(done.fresh)


def ack(number: int, what: bytes = b"") -> Ack:
    return Ack(Round(number), digest(b"set"), digest(b"state", what))


def feed(author: Identity, size: int, what: bytes = b"") -> list[Entry]:
    entries: list[Entry] = []
    for seq in range(size):
        previous = entries[-1].id if entries else b""
        entries.append(sign_entry(RUN, author, seq, previous, ack(seq, what)))
    return entries


@pytest.fixture
def ledger(tmp_path: Path):
    opened = Ledger(tmp_path / "ledger.sqlite", RUN)
    yield opened
    opened.close()


def test_feeds_that_a_peer_goes_on_with_come_side_by_side(ledger: Ledger) -> None:
    """After a partition the first batch holds the first rounds of all, so it tells which chain all follow."""
    feeds = {author.peer_id: feed(author, 90) for author in AUTHORS}
    for entries in feeds.values():
        ledger.insert_all(entries)
    known = {author.peer_id: 10 for author in AUTHORS[:3]}
    size = len(encode_entry(feeds[AUTHORS[0].peer_id][20]))
    first = [decode_entry(data, RUN) for data in ledger.missing(known, 120 * size)]
    for author in known:
        assert [entry.seq for entry in first if entry.author == author][:30] == [*range(10, 40)]
    everything = [decode_entry(data, RUN) for data in ledger.missing(known, 1 << 30)]
    assert {entry.author for entry in everything[: 3 * 80]} == known.keys(), "then those that it has nothing of"
    for author, entries in feeds.items():
        assert [entry for entry in everything if entry.author == author] == entries[known.get(author, 0) :]


def test_appends_link_and_survive_a_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.sqlite"
    ledger = Ledger(path, RUN)
    first, second = ledger.append(ME, ack(0)), ledger.append(ME, Leave(Round(1)))
    assert (first.seq, second.seq, second.previous) == (0, 1, first.id)
    assert decode_entry(encode_entry(second), RUN) == second
    ledger.close()
    again = Ledger(path, RUN)
    assert again.vector() == {ME.peer_id: 2}
    assert again.get(first.id) == first
    assert again.head(ME.peer_id) == second
    assert again.append(ME, ack(2)).previous == second.id
    again.close()


def test_queries(ledger: Ledger) -> None:
    ledger.append(ME, ack(0))
    ledger.append(ME, Leave(Round(3)))
    ledger.insert_all(feed(AUTHORS[1], 2))
    assert [entry.body.round for entry in ledger.entries(kind=Ack)] == [0, 0, 1]
    assert [entry.author for entry in ledger.entries(number=0)] == [ME.peer_id, AUTHORS[1].peer_id]
    assert len(ledger.entries(kind=Ack, number=0, author=ME.peer_id)) == 1
    assert ledger.entries(kind=Leave, number=0) == []
    cursors = ledger.since(0)
    assert [entry.seq for _, entry in cursors] == [0, 1, 0, 1]
    assert ledger.since(cursors[1][0]) == cursors[2:]
    assert ledger.since(0, limit=1) == cursors[:1]
    assert ledger.get(Digest(b"\0" * 32)) is None
    assert ledger.head(AUTHORS[3].peer_id) is None


def test_remote_entries_come_in_order_or_not_at_all(ledger: Ledger) -> None:
    first, second, third = feed(AUTHORS[1], 3)
    assert not insert(ledger, second)
    assert ledger.insert_all([third]).gap
    assert insert(ledger, first)
    assert not insert(ledger, first), "a duplicate is the same element"
    done = ledger.insert_all([second, second, third])
    assert done.fresh == (second, third)
    assert not done.gap
    assert not done.forks


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_second_history_is_proven_and_the_author_frozen(tmp_path: Path, at: int) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", RUN)
    ours, theirs = feed(AUTHORS[1], 2), feed(AUTHORS[1], 3, b"lie")
    ledger.insert_all(ours)
    with pytest.raises(Equivocation) as caught:
        insert(ledger, theirs[at])
    assert isinstance(caught.value, SignatureFault)
    assert caught.value.author == AUTHORS[1].peer_id
    proof = ledger.proof(AUTHORS[1].peer_id)
    assert proof is not None
    assert contradicts(*(decode_entry(data, RUN) for data in proof)), "anyone can check the proof"
    assert ledger.wanted() == {AUTHORS[1].peer_id: CLOSED}
    assert not insert(ledger, theirs[at]), "what is known of a liar is no news"
    ledger.close()
    again = Ledger(tmp_path / "l.sqlite", RUN)
    assert again.equivocators() == {AUTHORS[1].peer_id}
    assert len(again.entries()) == 2
    again.close()


def test_a_proof_from_elsewhere_is_checked(ledger: Ledger) -> None:
    ours, theirs = feed(AUTHORS[1], 2), feed(AUTHORS[1], 2, b"lie")
    assert not ledger.add_proof(ours[0], ours[1]), "a good feed proves nothing"
    assert not ledger.add_proof(ours[0], feed(AUTHORS[2], 1)[0])
    assert ledger.add_proof(ours[0], theirs[1]), "a link that does not fit is a proof too"
    assert not ledger.add_proof(ours[0], theirs[0])
    assert not insert(ledger, ours[0])


def test_our_own_fork_is_our_fault(ledger: Ledger) -> None:
    ledger.append(ME, ack(0))
    with pytest.raises(Equivocation):
        insert(ledger, feed(ME, 1, b"from a copied home")[0])
    with pytest.raises(LocalFault, match="two histories") as caught:
        ledger.append(ME, ack(1))
    assert "move identity.key out of its home" in caught.value.hint
    with pytest.raises(LocalFault, match="two histories"):
        ledger.check_author(ME.peer_id)  # and so does the next start


def test_missing_is_capped_and_makes_progress(tmp_path: Path, ledger: Ledger) -> None:
    for author in AUTHORS[1:]:
        ledger.insert_all(feed(author, 100))
    other = Ledger(tmp_path / "other.sqlite", RUN)
    batches = 0
    while batch := ledger.missing(other.vector(), 8192):
        assert sum(map(len, batch)) <= 8192
        other.insert_all(decode_entry(data, RUN) for data in batch)
        batches += 1
    assert other.vector() == ledger.vector()
    assert batches > 5
    assert len(ledger.missing({}, 1)) == 1, "at least one, whatever the cap"
    assert ledger.missing({}, 1, only_known=True) == []
    assert ledger.missing({author.peer_id: CLOSED for author in AUTHORS}, 10) == []
    assert ledger.missing({AUTHORS[1].peer_id: -5}, 1)
    other.close()


def test_quotas(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", RUN, Quota(authors=2, author_entries=3))
    assert len(ledger.insert_all(feed(AUTHORS[1], 5)).fresh) == 3
    assert len(ledger.insert_all([*feed(AUTHORS[2], 1), *feed(AUTHORS[3], 1)]).fresh) == 1
    assert ledger.is_closed
    assert ledger.wanted() == {AUTHORS[1].peer_id: CLOSED, AUTHORS[2].peer_id: 1}
    assert ledger.append(ME, ack(0)), "our own feed always has room"
    ledger.close()
    small = Ledger(tmp_path / "m.sqlite", RUN, Quota(author_bytes=700))
    fresh = small.insert_all(feed(AUTHORS[1], 50)).fresh
    assert 700 <= sum(len(encode_entry(entry)) for entry in fresh) < 1400
    small.close()


def fill(ledger: Ledger) -> tuple[DiskFault, int]:
    """Append until the disk refuses; its refusal and how many were acknowledged."""
    for number in range(10_000):
        try:
            ledger.append(ME, ack(number))
        except DiskFault as fault:
            return fault, number
    raise AssertionError("the cap does not hold")


def test_a_full_disk_is_a_disk_fault_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path, RUN, Quota(disk_bytes=30 * 4096))
    caught, acknowledged = fill(ledger)
    assert caught.hint
    assert ledger.vector() == {ME.peer_id: acknowledged}
    ledger.close()
    roomy = Ledger(path, RUN)
    assert roomy.append(ME, ack(acknowledged)).seq == acknowledged
    roomy.close()


def test_a_batch_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", RUN, Quota(disk_bytes=40 * 4096))
    assert len(ledger.insert_all(feed(AUTHORS[1], 10)).fresh) == 10
    with pytest.raises(DiskFault):
        ledger.insert_all([*feed(AUTHORS[2], 1, b"x"), *feed(AUTHORS[1], 500)])
    assert ledger.vector() == {AUTHORS[1].peer_id: 10}, "a batch is whole or nothing"
    assert len(ledger.entries()) == 10
    assert ledger.insert_all(feed(AUTHORS[2], 1)).fresh, "what the memory says is what the disk says"
    ledger.close()


def test_every_commit_is_synced(ledger: Ledger) -> None:
    """Power loss is not tested here; these are the settings that SQLite documents as durable."""
    assert ledger._db.rows("PRAGMA synchronous") == [(2,)]
    assert ledger._db.rows("PRAGMA journal_mode") == [("wal",)]


def test_two_daemons_cannot_share_a_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", RUN)
    with pytest.raises(LocalFault, match="locked") as caught:
        Ledger(tmp_path / "l.sqlite", RUN)
    assert "another node" in caught.value.hint
    ledger.close()


def test_the_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    """Its entries would be served to peers, who take them for a fault of this node."""
    path = tmp_path / "l.sqlite"
    Ledger(path, RUN).close()
    file = sqlite3.connect(path)
    file.execute("UPDATE meta SET value = ? WHERE name = 'format'", (b"2, feed %d" % (FEED.newest - 1),))
    file.commit()
    file.close()
    with pytest.raises(ConfigError, match="another version of atoll") as refused:
        Ledger(path, RUN)
    assert "--from-checkpoint" in refused.value.hint


def test_the_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "l.sqlite", RUN).close()
    with pytest.raises(ConfigError, match="belongs to run"):
        Ledger(tmp_path / "l.sqlite", RunId(digest(b"another run")))


@pytest.mark.parametrize("damage", ["text", "header", "row", "gap", "cut"])
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path, RUN)
    for number in range(60):
        ledger.append(ME, ack(number))
    ledger.close()
    _damage(path, damage)
    with pytest.raises(CorruptFault) as caught:
        _use(path)
    assert "move the file away" in caught.value.hint


def _damage(path: Path, how: str) -> None:
    if how == "row":
        with sqlite3.connect(path) as database:
            database.create_function("flip", 1, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
            database.execute("UPDATE entries SET data = flip(data) WHERE seq = 7")  # a bit of the signature
        database.close()
    elif how == "gap":
        with sqlite3.connect(path) as database:
            database.execute("DELETE FROM entries WHERE seq = 7")
        database.close()
    else:
        data = bytearray(path.read_bytes())
        spoilt = {
            "text": b"not a database" * 400,
            "header": bytes(100) + data[100:],
            "cut": data[: len(data) // 2],
        }
        path.write_bytes(spoilt[how])


def _use(path: Path) -> None:
    ledger = Ledger(path, RUN)
    try:
        ledger.entries()
    finally:
        ledger.close()


_WRITER = """
import sys
from pathlib import Path
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, digest
from atoll.protocols.ledger.records import Leave
ledger = Ledger(Path(sys.argv[1]), RunId(digest(b"run")))
while True:
    print(ledger.append(Identity(bytes([1]) * 32), Leave(0)).seq, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    acknowledged = -1
    for enough in (15, 40, 90):
        child = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            acknowledged = int(line)
            if acknowledged >= enough:
                break
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        child.stdout.close()
        acknowledged = int(rest[-1]) if rest else acknowledged
        ledger = Ledger(path, RUN)
        assert ledger.vector()[ME.peer_id] in (acknowledged + 1, acknowledged + 2)
        assert len(ledger.entries()) == ledger.vector()[ME.peer_id]
        ledger.close()


FEEDS = [feed(author, 4) for author in AUTHORS[:3]]
ALL = [entry for entries in FEEDS for entry in entries]


@settings(max_examples=25, deadline=None)
@given(st.permutations(ALL), st.lists(st.sampled_from(ALL), max_size=12), st.integers(1, 7))
def test_order_duplication_and_grouping_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory, order: list[Entry], extra: list[Entry], group: int
) -> None:
    """Whatever the deliveries, once each entry came often enough both replicas hold the same set."""
    ledger = Ledger(tmp_path_factory.mktemp("law") / "l.sqlite", RUN)
    deliveries = [*order, *extra]
    while sum(ledger.vector().values()) < len(ALL):
        before = ledger.vector()
        for at in range(0, len(deliveries), group):
            ledger.insert_all(deliveries[at : at + group])
        assert ledger.vector() != before, "each pass over the set brings at least one entry"
    assert {entry.id for entry in ledger.entries()} == {entry.id for entry in ALL}
    assert not ledger.equivocators()
    ledger.close()
