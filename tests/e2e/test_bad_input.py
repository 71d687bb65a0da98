"""Bad input as users and peers give it: one clear line, the right exit code, nothing lost, the node goes on."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.system.key_file import load_or_create
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols.identity import Identity
from atoll.protocols.ledger.records import Entry, SlicedContribution, encode_entry, sign_entry
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.run_spec import RunSpec, open_run
from tests.e2e.conftest import TWO, stop_all
from tests.waiting import HANGS_S


def flip(path: Path) -> None:
    """Change a byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


# --- refused at once --------------------------------------------------------------------------------


def test_config_run_and_key(node, tmp_path):
    """Unknown key, truncated, forged and foreign run files, a readable key: 78, one line; then it would start."""
    run = node.new_run()
    key = node.home.identity.read_bytes()

    node.home.config_toml.write_text('lisen = "/ip4/127.0.0.1/tcp/1"\n')
    node.start_refused().refused(78, "unknown key lisen; did you mean listen?")
    node.home.config_toml.unlink()

    whole = run.read_bytes()
    bad = tmp_path / "bad.run"
    bad.write_bytes(whole[: len(whole) // 2])
    node.start_refused("--run", str(bad)).refused(78, str(bad), "not a run that this node can train", "; ")
    bad.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    node.start_refused("--run", str(bad)).refused(78, "signature", "; ")
    spec = msgspec.msgpack.decode(msgspec.msgpack.decode(whole)[0])
    spec["owner"] = str(Identity(bytes(31) + b"\1").peer_id)
    forged = [msgspec.msgpack.encode(spec, order="sorted"), msgspec.msgpack.decode(whole)[1]]
    bad.write_bytes(msgspec.msgpack.encode(forged))
    node.start_refused("--run", str(bad)).refused(78, "signature", "; ")

    node.home.identity.chmod(0o640)
    node.start_refused().refused(78, "others may read the key file", "; chmod 600 ")
    node.home.identity.chmod(0o600)
    assert node.home.identity.read_bytes() == key
    assert run.read_bytes() == whole


@pytest.mark.swarm
def test_data_and_port(node, tmp_path):
    """Missing and other data; a port in use. That a node starts when the fault is gone is in the next test."""
    text = text_in(tmp_path)
    node.new_run("--data", f"file:{text}")
    none = node.start_refused("--data", str(tmp_path / "none"))
    none.refused(78, "no data file at", "with --data")
    assert "others join" not in none.out + none.err, "nobody is invited to a node that cannot train"
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 4000)
    node.start_refused("--data", str(other)).refused(78, "is not the text of this run", "use the run's file")

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = node.atoll(
            "start", "--listen", f"/ip4/127.0.0.1/tcp/{port}", "--data", str(text), "--threads", "1"
        )
        taken.refused(1, f"port {port} is in use; choose another port or stop the other program")


def text_in(folder: Path) -> Path:
    """A file to train on."""
    text = folder / "text.txt"
    text.write_text("it was a dark and stormy night\n" * 4000)
    return text


# --- the state on disk --------------------------------------------------------------------------------


@pytest.mark.swarm
def test_damaged_state_and_ledger(node, tmp_path, until):
    """A damaged ledger: 1 and a hint. A damaged save: the one before is used. Both: 1 and a hint.

    Between them the text is away for a while.
    """
    text = text_in(tmp_path)
    node.new_run("--data", f"file:{text}")
    node.start_refused("--data", str(tmp_path / "none")).refused(78, "no data file at", "with --data")
    node.start("--data", str(text)).up()
    node.goes_on(4)
    second = node.start_refused()
    second.refused(78, "a node already runs in", f"(pid {node.process.pid})", "atoll stop")
    node.goes_on(1)
    node.stop()
    folder, key = node.run_folder, node.home.identity.read_bytes()
    final = max(
        row["round"]
        for row in map(msgspec.json.decode, (folder / "rounds.jsonl").read_text().splitlines())
        if row["final"]
    )

    ledger = folder / "ledger.sqlite"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[:64] + os.urandom(4096) + whole[4160:])
    node.start_refused().refused(1, str(ledger), "; move the file away")
    ledger.write_bytes(b"this is no database" * 400)
    node.start_refused().refused(1, str(ledger), "; move the file away")
    ledger.write_bytes(whole)

    away = text.rename(tmp_path / "away.txt")
    node.start_refused().refused(78, f"no data file at {text}", "with --data")
    away.rename(text)

    newest = sorted(folder.glob("state/" + "[0-9]" * 10))[-1]
    flip(newest / "tensors.safetensors")
    assert newest.name not in (folder / "worker.log").read_text()
    node.start().up()
    until("the rounds go on where they were", lambda: node.final() > final)
    assert newest.name in (folder / "worker.log").read_text()
    assert node.home.identity.read_bytes() == key
    node.stop()

    for one in folder.glob("state/" + "[0-9]" * 10):
        flip(one / "tensors.safetensors")
    node.start_refused().refused(1, "state", "; move ")
    assert len(list(folder.glob("state/" + "[0-9]" * 10))) == 2


# --- the full disk ------------------------------------------------------------------------------------


@pytest.mark.swarm
def test_full_disk(nodes, full_disk, until):
    """Full while it trains: trouble with a hint, the node stays; freed: it goes on, with nothing lost."""
    node = nodes("full", full_disk / "home")
    node.new_run()
    node.start().up()
    node.goes_on(3)
    fill(full_disk / "filler")
    trouble = until("status shows the trouble", lambda: (node.status() or {})["trouble"])
    assert "No space left" in trouble or "is full" in trouble, trouble
    assert "; " in trouble
    before = node.rows()
    (full_disk / "filler").unlink()
    node.goes_on(3)
    until("the trouble is over", lambda: node.status()["trouble"] == "")
    after = {row["round"]: row for row in node.rows()}
    assert all(after[row["round"]]["digest"] == row["digest"] for row in before if row["final"])
    assert node.status()["worker_restarts"] == 0

    fill(full_disk / "filler")
    until("status shows the trouble", lambda: node.status()["trouble"])
    node.stop()
    final = max(row["round"] for row in before if row["final"])
    fill(full_disk / "filler")  # a node that ends gives some space back
    ended = node.start_refused()
    ended.refused(1, "; free some space")
    (full_disk / "filler").unlink()
    node.start().up()
    until("the run goes on", lambda: node.final() > final)
    node.stop()


def fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


# --- signals ------------------------------------------------------------------------------------------


@pytest.mark.slow(slice="tests/signals/test_signals.py::test_the_next_start_trains, test_full_disk")
@pytest.mark.swarm
def test_signals(node, until):
    """Ctrl-C ends in good order, SIGKILL leaves nobody behind.

    SIGTERM ends the node of the next test, and `tests/signals` has the moments of a start.
    """
    node.new_run()
    node.start().up()
    node.goes_on(1)
    os.killpg(node.process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    assert node.wait() == 0
    assert node.errors() == ""
    assert not node.left()

    node.start().up()
    node.signal(signal.SIGKILL)
    node.wait()
    until("p2pd and the worker are gone", lambda: not node.left())
    assert node.start_refused("--seed", "x").code == 78  # the lock is free, the config is what fails


@pytest.mark.slow(
    slice=(
        "tests/node/ipc/test_worker_process.py::test_a_worker_that_dies_is_started_again_and_its_asks_fail, "
        "tests/node/ipc/test_worker_process.py::test_a_worker_that_dies_at_every_round_is_given_up"
    )
)
@pytest.mark.swarm
def test_worker_dies(node, until):
    """A killed worker is replaced and the run goes on; five deaths in a row end the node."""
    node.new_run()
    node.start().up()
    node.goes_on(1)
    first = node.status()["worker_pid"]
    os.kill(first, signal.SIGKILL)
    until("a new worker", lambda: node.status()["worker_pid"] not in (0, first))
    node.goes_on(2)
    assert node.status()["worker_restarts"] == 1
    node.remember()
    killed = {first}
    while node.process.poll() is None and len(killed) < 7:
        worker = (node.status() or {"worker_pid": 0})["worker_pid"]
        if worker and worker not in killed and node.process.poll() is None:
            killed.add(worker)
            os.kill(worker, signal.SIGKILL)
    assert node.wait() == 1
    assert node.errors().count("\n") == 1
    assert "the worker died 5 times in a row; its last words are in" in node.errors()
    node.clean()
    assert not node.left()
    node.start().up()
    node.goes_on(1)
    node.stop()  # by SIGTERM
    assert not node.left()
    assert node.errors() == ""


# --- peers --------------------------------------------------------------------------------------------


@pytest.mark.slow(
    slice=(
        "tests/p2p/discovery/test_discovery.py::"
        "test_over_p2pd_the_cache_replaces_a_dead_seed_and_the_table_says_why, "
        "test_data_and_port"
    )
)
@pytest.mark.swarm
def test_seeds(nodes, until):
    """An unreachable seed and a seed of another run are named in the status, in short; it joins when it can."""
    a, b, stranger = nodes("a"), nodes("b"), nodes("stranger")
    run = a.new_run()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}"
    seed = f"{address}/p2p/{load_or_create(a.home.identity).peer_id}"
    b.start("--run", str(run), "--seed", seed).up()
    reason = until("the status names the seed", lambda: (s := b.status()["reason"]) and "tried" in s and s)
    assert f"seed …{seed[-6:]}: " in reason
    assert address not in reason
    assert b.status()["activity"] == "syncing"
    assert b.errors() == ""
    a.start(listen=address).up()
    until("b joins", lambda: b.status()["peers"] and b.status()["activity"] == "training")
    b.goes_on()
    for node in (a, b):
        assert node.atoll("pause").code == 0

    other = stranger.new_run(name="other")
    assert other.exists()
    stranger.start("--seed", a.seed()).up()
    reason = until(
        "the mismatch in plain words", lambda: (s := stranger.status()["reason"]) and "trains run" in s and s
    )
    assert "we train run" in reason
    assert f"…{a.seed()[-6:]}" in reason
    stop_all(a, b, stranger)


class Evil:
    """A member with a real identity and a bad character."""

    def __init__(self, run_file: bytes, home: Path, seed: str) -> None:
        self.identity = load_or_create(home / "key")
        self.number = -1
        self.spec: RunSpec = open_run(run_file)
        assert self.spec.reduce, "so each contribution names the root of its rows"
        self.host = P2pdHost(self.identity)
        self.swarm = Swarm(
            host=self.host, identity=self.identity, run=self.spec.id, home=home, seeds=[parse_seed(seed)]
        )

    async def run(self, act: Callable[["Evil"], Awaitable[None]]) -> None:
        """Join, act, leave."""
        async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
            up = asyncio.Event()
            serving = group.create_task(self.swarm.serve(up.set))
            await up.wait()
            await self.swarm.wait_synced()
            await act(self)
            serving.cancel()

    def contribute(self, payload: bytes) -> Entry:
        """Sign a contribution with this payload into a round that the others train next, never twice into one."""
        next_round = max(lease.round for lease in self.swarm.live(Lease).values()) + 1
        self.number = max(self.number + 1, next_round)
        blob = self.swarm.blobs.store.add_bytes(payload)
        words = (self.number, bytes(32), blob, 1, 256, 64, 5.0)
        return self.swarm.publish(SlicedContribution(*words, os.urandom(32)))


@pytest.mark.swarm
def test_evil_peer(nodes, tmp_path, until):
    """Garbage, wrong sizes and broken signatures: counted against their author, in no set, and nobody stops."""
    a, b = nodes("a"), nodes("b")
    run = a.new_run("--data", "synthetic:markov", *TWO)
    a.start().up()
    b.start("--run", str(run), "--seed", a.seed()).up()
    until("both are members", lambda: a.status()["members"] == 2 and b.final() >= 1)
    evil = Evil(run.read_bytes(), tmp_path / "evil", a.seed())
    compress = evil.spec.compress
    layout = Layout(compress.codec, arena_of(evil.spec.model).chunks, compress.k)
    bad = (
        os.urandom(layout.size_bytes),
        layout.header + os.urandom(layout.size_bytes - len(layout.header)),
        bytes(layout.size_bytes - 1),
        bytes(layout.size_bytes + 1),
    )
    name = evil.identity.peer_id

    def faults(node) -> int:
        return next((row["faults"] for row in node.peers() if row["peer"] == name), 0)

    async def act(evil: Evil) -> None:
        for at, payload in enumerate(bad):
            evil.contribute(payload)
            await asyncio.to_thread(until, f"fault {at + 1}", lambda at=at: faults(a) > at)
        entry = sign_entry(evil.spec.id, evil.identity, 1 << 20, bytes(32), evil.swarm.ledger.head(name).body)
        broken = msgspec.structs.replace(entry, signature=bytes(64))
        before = faults(a)
        evil.swarm.calls.notify(parse_seed(a.seed()).peer, "gossip.entry", encode_entry(broken))
        await asyncio.to_thread(until, "the fault of the signature", lambda: faults(a) > before)

    asyncio.run(evil.run(act))
    a.goes_on()
    b.goes_on()
    for node in (a, b):
        assert not any(name in row["contributors"] for row in node.rows() if row["final"])
        node.stop()
    assert psutil.Process().children() == [] or all(p.status() == "zombie" for p in psutil.Process().children())
