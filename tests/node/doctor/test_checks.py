"""Checks of the doctor: real files, sockets, a real p2pd and a real DNS-free network; judgements are pure."""

import asyncio
import contextlib
import fcntl
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from atoll.node.config.guest import GuestConfig
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.rounds.queries import MORE_ROOM
from atoll.node.doctor import experts as doctor_experts
from atoll.node.doctor import guest as doctor_guest
from atoll.node.doctor import machine as doctor_machine
from atoll.node.doctor import network as doctor_net
from atoll.node.doctor import running_node as doctor_node
from atoll.node.doctor.checks import DoctorCheck, DoctorInput, Finding, has_no_failure, run_checks
from atoll.node.doctor.network import SeedResult, dial_seeds, judge_seeds
from atoll.node.guest.sensors import MachineFiles
from atoll.node.runs.capacity.join_preview import preview_of, with_average
from atoll.node.runs.capacity.memory_model import Free, needs_of
from atoll.node.runs.presets import preset
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.address_book import AddressBook, parse_seed
from atoll.p2p.nat.dialback import read_banner, speaks_quic
from atoll.p2p.system.key_file import load_or_create
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from tests.waiting import HANGS_S

A, B = Identity(b"a" * 32), Identity(b"b" * 32)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")


def patient(tmp_path: Path, *, status=None, run=None, **config) -> DoctorInput:
    home = Home(tmp_path / "home")
    home.make()
    return DoctorInput(home, NodeConfig(**config), run, status)


def only(rows) -> Finding:
    (row,) = rows
    return row


# The runner.


def test_one_bad_check_does_not_spoil_the_others(tmp_path: Path) -> None:
    hang = threading.Event()

    def fault(_):
        raise LocalFault("the disk\nis gone", hint="find it")

    def bug(_):
        yield Finding("bug", "pass", "lost with the rest")
        raise KeyError("no such thing")

    def slow(_):
        hang.wait(HANGS_S)
        return []

    checks = [
        *(DoctorCheck("fault", 60.0, fault), DoctorCheck("bug", 60.0, bug), DoctorCheck("slow", 0.2, slow)),
        DoctorCheck("nothing", 60.0, lambda _: []),
        DoctorCheck("good", 60.0, lambda _: [Finding("good", "pass", "fine"), Finding("good", "warn", "nearly")]),
    ]
    started = time.monotonic()
    rows = run_checks(patient(tmp_path), checks)
    hang.set()
    assert time.monotonic() - started < HANGS_S / 2, "it did not wait for the slow one"
    assert [(row.check, row.state) for row in rows] == [
        *(("fault", "fail"), ("bug", "fail"), ("slow", "fail"), ("good", "pass"), ("good", "warn")),
    ]
    assert rows[0] == Finding("fault", "fail", "the disk is gone", "find it")
    assert "KeyError" in rows[1].found
    assert "no result in 0 s" in rows[2].found
    assert not has_no_failure(rows)
    assert has_no_failure(rows[3:])


# The machine.


def test_identity(tmp_path: Path) -> None:
    sick = patient(tmp_path)
    assert "the first start makes one" in only(doctor_machine.identity(sick)).found
    peer = load_or_create(sick.home.identity).peer_id
    assert only(doctor_machine.identity(sick)) == Finding("identity", "pass", peer)
    other = patient(tmp_path, status={"peer": A.peer_id})
    assert only(doctor_machine.identity(other)).state == "fail"
    sick.home.identity.chmod(0o644)
    row = only(run_checks(sick, [DoctorCheck("identity", 5.0, doctor_machine.identity)]))
    assert (row.state, row.remedy) == ("fail", f"chmod 600 {sick.home.identity}")


def test_home(tmp_path: Path) -> None:
    sick = patient(tmp_path)
    assert only(doctor_machine.home(sick)).state == "pass"
    assert os.listdir(sick.home.root) == ["runs"], "nothing is left behind"
    sick.home.root.chmod(0o755)
    assert only(doctor_machine.home(sick)).remedy == f"chmod 700 {sick.home.root}"
    unborn = DoctorInput(Home(tmp_path / "a" / "b"), NodeConfig())
    assert "will be made" in only(doctor_machine.home(unborn)).found
    assert not (tmp_path / "a").exists()
    blocked = DoctorInput(Home(Path("/proc/self/nothing")), NodeConfig())
    assert only(run_checks(blocked, [DoctorCheck("home", 5.0, doctor_machine.home)])).state == "fail"


def test_a_node_that_holds_its_home_but_does_not_answer(tmp_path: Path, monkeypatch) -> None:
    sick = patient(tmp_path)
    sick.home.lock.write_text(f"{os.getpid()}\n")
    assert only(doctor_machine.home(sick)).check == "home", "an old lock file is no lock"
    with sick.home.lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _, row = doctor_machine.home(sick)
        assert (row.check, row.state) == ("lock", "fail")
        assert str(os.getpid()) in row.found
        assert row.remedy.startswith("wait if it has just started; ")
        monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_STOPPED)
        assert f"kill -CONT {os.getpid()}" in [*doctor_machine.home(sick)][1].remedy
        assert only(doctor_machine.home(patient(tmp_path, status={"pid": 1}))).check == "home"


def test_disk_and_memory_are_measured_by_the_run(tmp_path: Path) -> None:
    small, large = (preset(name, A.peer_id, 1) for name in ("tiny", "1b"))
    huge = msgspec.structs.replace(large, model=msgspec.structs.replace(large.model, layers=4096))
    assert only(doctor_machine.memory(patient(tmp_path, run=small))).state == "pass"
    assert only(doctor_machine.memory(patient(tmp_path, run=huge))).state == "fail"
    assert only(doctor_machine.free_disk(patient(tmp_path, run=small))).state == "pass"
    row = only(doctor_machine.free_disk(patient(tmp_path, run=huge)))
    assert (row.state, bool(row.remedy)) == ("fail", True), "not one saved state fits"


def test_the_disk_is_measured_as_start_measures_it_less_what_is_stored(tmp_path: Path, monkeypatch) -> None:
    run, free, sick = preset("tiny", A.peer_id, 1), 0, patient(tmp_path, run=preset("tiny", A.peer_id, 1))
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    need = preview_of(run, with_average(run, sick.config, Free(0, 1 << 40)), None).disk_bytes

    def row(free_bytes: int) -> Finding:
        nonlocal free
        free = free_bytes
        return only(doctor_machine.free_disk(sick))

    assert row(need).found == f"{need / 1e6:.1f} MB free, up to {need / 1e6:.1f} MB needed"
    assert [row(size).state for size in (need, need - 1, 1_000_000)] == ["pass", "warn", "fail"]
    folder = sick.home.run(run.id) / "state"
    folder.mkdir(parents=True)
    (folder / "arena").write_bytes(os.urandom(4_194_304))
    assert row(need - 4_194_304).state == "pass", "what is stored is needed no more"
    assert row(need).found.endswith("4.2 MB of it stored")


def test_little_room_is_told_in_megabytes(tmp_path: Path, monkeypatch) -> None:
    for free, state, said in ((3_500_000, "fail", "3.5 MB free"), (40_500_000_000, "skip", "40.5 GB free; ")):
        monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        row = only(doctor_machine.free_disk(patient(tmp_path)))
        assert (row.state, row.found.startswith(said)) == (state, True)


def test_the_disk_of_an_average_counts(tmp_path: Path) -> None:
    run = preset("1b", A.peer_id, 1)
    needed = [
        float(only(doctor_machine.free_disk(patient(tmp_path, run=run, average_rounds=rounds))).found.split()[5])
        for rounds in (0, 4)
    ]
    assert needed[1] - needed[0] == pytest.approx(16e-9 * run.model.parameters, abs=0.11)


def test_clock(tmp_path: Path, monkeypatch) -> None:
    sick = patient(tmp_path)
    assert only(doctor_machine.clock(sick)).state in ("pass", "warn", "skip")
    for ahead_s, state in ((0.5, "pass"), (-90.0, "warn"), (7200.0, "fail")):
        row = only(doctor_machine.clock(patient(tmp_path, status={"clock_ahead_s": ahead_s})))
        assert row.state == state
    assert "7200 s behind the peers" in row.found
    load_or_create(sick.home.identity)
    os.utime(sick.home.identity, (0, time.time() + 9 * 3600))
    assert "9 h younger" in only(doctor_machine.clock(sick)).found
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    assert only(doctor_machine.clock(sick)).state == "fail"


def test_a_bad_seed_is_found_before_the_start(tmp_path: Path) -> None:
    check = [DoctorCheck("config", 5.0, doctor_machine.configuration)]
    assert only(run_checks(patient(tmp_path, seeds=("/dnsaddr/seed.example.org",)), check)).state == "pass"
    row = only(run_checks(patient(tmp_path, seeds=("/ip4/1.2.3.4/tcp/1/p2p/Qm",)), check))
    assert (row.state, "a seed looks like" in row.remedy) == ("fail", True)


GPU = {"torch": "2.13", "cuda": True, "built": "13.0", "free": 70e9, "total": 80e9, "name": "NVIDIA H200"}
GPU["count"] = 2
NO_GPU = {"torch": "2.13+cpu", "cuda": False, "built": ""}


@pytest.mark.parametrize(
    ("torch", "cards", "wanted", "state", "words"),
    [
        (GPU, ["NVIDIA H200, 580"], "auto", "pass", "2 devices, the first NVIDIA H200, 70.0 of 80.0 GB free"),
        (GPU, ["NVIDIA H200, 580"], "cuda:0,cuda:1", "pass", "2 devices"),
        (GPU, ["NVIDIA H200, 580"], "cuda:0,cuda:2", "fail", "no cuda:2"),
        (NO_GPU, [], "auto", "pass", "none; trains on"),
        (NO_GPU, [], "cuda", "fail", "no NVIDIA GPU, but device = 'cuda'"),
        (NO_GPU, ["NVIDIA H200, 580"], "auto", "warn", "is a CPU build"),
        (NO_GPU, ["NVIDIA H200, 580"], "cuda:0", "fail", "is a CPU build"),
        (NO_GPU | {"built": "13.0"}, ["NVIDIA H200, 470"], "auto", "warn", "cannot use it"),
    ],
)
def test_gpu_is_judged(torch, cards, wanted, state, words) -> None:
    row = doctor_machine.gpu_finding(torch, cards, wanted)
    assert row.state == state
    assert words in row.found
    assert (row.state == "pass") == (not row.remedy)


def test_torch_is_asked_in_a_child_and_may_be_broken(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = only(doctor_machine.gpu(patient(tmp_path)))
    assert (row.check, row.state) == ("torch", "fail")
    assert "libcudart.so.13" in row.found


# The way out.


def test_port_free_taken_and_held_by_our_node(tmp_path: Path) -> None:
    check = [DoctorCheck("port", 5.0, doctor_net.port)]
    assert only(run_checks(patient(tmp_path), check)).state == "skip", "no port is wanted"
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as taken:
            taken.bind(("0.0.0.0", 0))
            if kind == socket.SOCK_STREAM:
                taken.listen()
            number = taken.getsockname()[1]
            row = only(run_checks(patient(tmp_path, port=number), check))
            assert (row.state, row.found) == ("fail", f"port {number} is in use")
    status = {"addresses": ["/ip4/10.0.0.1/tcp/4710", "/ip4/10.0.0.1/udp/4710/quic-v1"]}
    assert only(doctor_net.port(patient(tmp_path, port=4710, status=status))).state == "pass"
    assert only(doctor_net.port(patient(tmp_path, status={"addresses": []}))).state == "skip", "not up yet"
    row = only(doctor_net.port(patient(tmp_path, port=4711, status=status)))
    assert (row.state, "restart" in row.remedy) == ("warn", True)
    listen = ("/ip4/127.0.0.1/tcp/4710",)
    assert only(doctor_net.port(patient(tmp_path, listen=listen, status=status))).state == "pass"


@contextlib.asynccontextmanager
async def serving(identity: Identity):
    host, ready = P2pdHost(identity, P2pdOptions(listen=LOOPBACK)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(host.serve(ready.set))
        await ready.wait()
        yield {maddr.split("/")[3]: maddr for maddr in await host.addresses()}
        task.cancel()


@pytest.mark.network
def test_seeds_are_dialled_by_a_real_p2pd() -> None:
    async def hello(reader, writer) -> None:
        writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        await reader.read(100)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(hello, "127.0.0.1", 0)
        web = server.sockets[0].getsockname()[1]
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            dead = closed.getsockname()[1]
            async with serving(A) as at:
                peers = [Identity(bytes([number]) * 32).peer_id for number in range(1, 5)]
                seeds = [
                    PeerAddress(A.peer_id, (at["tcp"],)),
                    PeerAddress(peers[0], (at["tcp"],)),
                    PeerAddress(peers[1], (at["udp"],)),
                    PeerAddress(peers[2], (f"/ip4/127.0.0.1/tcp/{dead}",)),
                    PeerAddress(peers[3], (f"/ip4/127.0.0.1/tcp/{web}",)),
                    PeerAddress(B.peer_id, ("/ip4/127.0.0.1/tcp/1",)),
                ]
                tried = await dial_seeds(seeds, B.peer_id)
                number = int(at["udp"].split("/")[4])
                assert await speaks_quic("127.0.0.1", number)
                assert (await read_banner("127.0.0.1", int(at["tcp"].split("/")[4]))).startswith(
                    b"\x13/multistream"
                )
        server.close()
        rows = list(judge_seeds(tried, is_covered=False))
        assert [row.state for row in rows] == ["pass", "warn", "warn", "warn", "warn", "skip"]
        found = [row.found.split(": ", 1)[1] for row in rows]
        assert found[0].startswith("answers in")
        assert found[1].startswith("another key answers there")
        assert found[2].startswith("another key answers there")
        assert "new invite" in rows[1].remedy
        assert found[3] == "connection refused"
        assert found[4].startswith("connected, but it does not speak libp2p")
        assert found[5] == "this node"

    asyncio.run(main())


def test_no_answer_over_udp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))

        async def main() -> bool:
            return await speaks_quic("127.0.0.1", silent.getsockname()[1])

        assert not asyncio.run(main())
        assert len(silent.recv(2000)) == 1200, "a server answers no smaller first packet"


def test_one_living_seed_is_enough() -> None:
    dead = SeedResult("/ip4/1.2.3.4/tcp/1/p2p/X", "dial tcp4: connect: connection refused", "/ip4/1.2.3.4/tcp/1")
    assert [row.state for row in judge_seeds([dead], is_covered=False)] == ["fail"]
    assert [row.state for row in judge_seeds([dead], is_covered=True)] == ["warn"]
    assert [row.state for row in judge_seeds([dead, SeedResult("/b")], is_covered=False)] == ["warn", "pass"]


def test_seeds_come_from_the_configuration_and_from_the_node(tmp_path: Path) -> None:
    text = f"/ip4/1.2.3.4/tcp/1/p2p/{A.peer_id}"
    status = {"seeds": {text: "connected", f"/dnsaddr/x.example/p2p/{B.peer_id}": "failed", "dht": "ready"}}
    sick = patient(tmp_path, seeds=(text, "/nonsense/p2p/x"), status=status)
    found = doctor_net.configured_seeds(sick)
    assert found == [parse_seed(text), parse_seed(f"/dnsaddr/x.example/p2p/{B.peer_id}")]


def test_no_seed_is_no_trouble_for_who_knows_peers(tmp_path: Path) -> None:
    sick = patient(tmp_path)
    assert only(doctor_net.seeds(sick)).state == "warn"
    folder = sick.home.runs / "ab"
    folder.mkdir()
    book = AddressBook(PeerId("me"))
    book.add(A.peer_id, ["/ip4/1.2.3.4/tcp/1"], "seed")
    book.connected(A.peer_id, 1.0)
    book.save(folder / "peers.json")
    row = only(doctor_net.seeds(sick))
    assert (row.state, "1 peer known from earlier" in row.found) == ("skip", True)


@pytest.mark.network
def test_p2pd_runs(tmp_path: Path, monkeypatch) -> None:
    assert only(doctor_net.p2pd(patient(tmp_path))).state == "pass"
    broken = tmp_path / "p2pd"
    broken.write_text("not a program")
    broken.chmod(0o700)
    monkeypatch.setattr(doctor_net, "binary", lambda: broken)
    row = only(run_checks(patient(tmp_path), [DoctorCheck("p2pd", 5.0, doctor_net.p2pd)]))
    assert (row.state, "wheel" in row.remedy) == ("fail", True)


# The running node.

UP = {"pid": 7, "activity": "training", "uptime_s": 600.0, "peers": 3, "paths": {"direct": 2, "relayed": 1}}


def rows_of(tmp_path: Path, *, config=None, **status) -> dict[str, Finding]:
    sick = patient(tmp_path, status=UP | status, **(config or {}))
    return {row.check: row for check in doctor_node.CHECKS for row in check.work(sick)}


def test_a_healthy_node(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path, reachability="public", port_map={"udp": 4710, "tcp": 35183}, paths={"direct": 3},
        seeds={"dht": "server, knows 2 servers: public"},
    )  # fmt: skip
    assert {row.state for row in rows.values()} == {"pass"}
    assert rows.keys() == {"node", "nat", "relay", "upnp", "peers", "dht"}
    assert rows["peers"].found == "3 connections (3 direct)"
    assert rows["upnp"].found == "the router forwards tcp 35183, udp 4710 to this node"
    assert rows_of(tmp_path)["relay"].found == "1 of 3 connections are relayed"


def test_a_node_that_does_not_know_a_thing_passes_no_check_of_it(tmp_path: Path) -> None:
    """Its network has just started, or it is of an older version."""
    rows = rows_of(tmp_path, paths={})
    assert {name: row.state for name, row in rows.items()} == {
        "node": "pass", "relay": "skip", "upnp": "skip", "peers": "pass", "dht": "skip",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ports", "reachability", "state"),
    [
        (None, "public", "skip"),
        ({}, "public", "pass"),
        ({}, "punchable", "pass"),
        ({}, "relay-only", "warn"),
        ({}, "unknown", "warn"),
        ({"tcp": 35183}, "unknown", "pass"),
    ],
)
def test_the_router_s_ports_are_judged_by_what_the_port_mapper_knows(
    tmp_path: Path, ports, reachability, state
) -> None:
    row = rows_of(tmp_path, port_map=ports, reachability=reachability)["upnp"]
    assert (row.state, bool(row.remedy)) == (state, state == "warn")


def test_what_was_not_checked_is_no_pass(tmp_path: Path) -> None:
    """A new home without run, seed and node: nothing is there to be checked, and the report says so."""
    new = patient(tmp_path)
    works = (
        *(doctor_machine.identity, doctor_machine.free_disk, doctor_machine.memory),
        *(doctor_net.port, doctor_net.udp),
    )
    rows = {row.check: row for work in works for row in work(new)}
    assert rows.keys() == {"identity", "disk", "memory", "port", "udp"}
    assert {row.state for row in rows.values()} == {"skip"}
    for seeds in ({}, {"dht": "off: switched off"}):
        assert rows_of(tmp_path, seeds=seeds)["dht"].state == "skip"


def test_a_clock_that_nothing_vouches_for_is_no_pass(tmp_path: Path, monkeypatch) -> None:
    for state, verdict in ((-1, "skip"), (0, "pass"), (5, "warn")):
        monkeypatch.setattr(doctor_machine, "_kernel_clock", lambda state=state: state)
        assert only(doctor_machine.clock(patient(tmp_path))).state == verdict


def test_a_sick_node(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path, reachability="relay-only", reachability_why="two ports seen from outside", relaying=False,
        peers=0, paths={}, trouble="the disk is full; free some space", worker_restarts=9, port_map={},
        seeds={"dht": "client, knows no server yet: dht_bootstrap is given"},
    )  # fmt: skip
    assert {name: row.state for name, row in rows.items()} == {
        "node": "fail", "worker": "warn", "nat": "warn", "relay": "warn", "upnp": "warn", "peers": "warn",
        "dht": "warn",
    }  # fmt: skip
    assert rows["nat"].found == "relay-only: two ports seen from outside"
    assert all(row.remedy for row in rows.values())


def test_a_relay_shows_its_cap(tmp_path: Path) -> None:
    use = {"circuits": 3, "bytes_today": 1_200_000_000, "bytes_per_day": 20_000_000_000}
    row = rows_of(tmp_path, relaying=True, relay=use)["relay"]
    assert (row.state, row.found) == ("pass", "relays for others: 3 circuits now, 1.2 of 20.0 GB today")
    spent = rows_of(tmp_path, relaying=True, relay=use | {"bytes_today": 20_000_000_000})["relay"]
    assert spent.state == "warn"


def test_a_guest_reads_its_sensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(**keys: object) -> list[tuple[str, str]]:
        sick = patient(tmp_path, guest=GuestConfig(**keys))
        return [(row.state, row.found) for row in run_checks(sick, doctor_guest.CHECKS)]

    assert rows() == rows(nice=5) == []
    assert rows(hours="00:00-24:00") == [("pass", "the node may train now")]
    (tmp_path / "AC").mkdir(parents=True)
    monkeypatch.setattr(doctor_guest, "MachineFiles", lambda: MachineFiles(power=tmp_path, nvidia_smi="false"))
    assert rows(battery="pause") == [("pass", "the node may train now")]
    assert rows(battery="pause", gpu_most_c=80) == [
        ("warn", "guest.gpu_most_c limits nothing: false ended with code 1"),
        ("pass", "the node may train now"),
    ]
    monkeypatch.setattr(doctor_guest, "MachineFiles", lambda: MachineFiles(nvidia_smi="no-such-program"))
    assert rows(gpu_most_c=80)[0][0] == "fail"


def test_room_for_experts_before_and_while_a_node_runs(tmp_path: Path) -> None:
    def rows(**about) -> list[Finding]:
        return list(doctor_experts.experts(patient(tmp_path, **about)))

    spec = preset("moe-smoke", A.peer_id, 1)
    shared = msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, holders=1))
    assert rows(run=spec) == rows(run=spec, status=UP) == [], "all train all"
    mine = rows(run=shared, experts=3, device="cpu")
    assert [(row.state, row.found) for row in mine] == [("pass", "room for 3 of 8 experts (as config.toml says)")]
    room = {"experts": 6, "of": 16, "free_bytes": 11_200_000_000, "place": "cuda:0"}
    (row,) = rows(status=UP | {"room": room})
    assert (row.state, row.found) == ("pass", "room for 6 of 16 experts (from 11.2 GB free)")
    (row,) = rows(status=UP | {"room": room, "shortage": "they have room for 6 experts; 16 … need 16"})
    assert (row.state, row.remedy) == ("warn", MORE_ROOM)
    assert "room for 6 experts; 16" in row.found
    (row,) = rows(status=UP | {"room": room | {"experts": 0}})
    assert row.state == "warn"
    assert "int8" in row.remedy


def test_memory_is_measured_by_the_share_of_a_mixture(tmp_path: Path, monkeypatch) -> None:
    """A host that has too little for all experts is well with its share."""
    spec = preset("moe-12m", A.peer_id, 1)
    model = msgspec.structs.replace(
        spec.model, ffn=8192, experts=msgspec.structs.replace(spec.model.experts, count=64, ffn=4096)
    )
    shared = msgspec.structs.replace(spec, model=model, outer=msgspec.structs.replace(spec.outer, holders=1))
    whole = msgspec.structs.replace(shared, outer=spec.outer)
    config = NodeConfig(device="cpu", threads=1, optimizer_states="int8")  # what a node takes that lacks memory
    between = (needs_of(whole, config).host + needs_of(shared, config, 8).host) // 2
    found = psutil.virtual_memory()._replace(total=between, available=between)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    assert only(doctor_machine.memory(patient(tmp_path, run=whole, device="cpu"))).state == "fail"
    assert only(doctor_machine.memory(patient(tmp_path, run=shared, device="cpu"))).state == "pass"


def test_of_a_node_that_does_not_run_nothing_is_said(tmp_path: Path) -> None:
    """`atoll doctor` has a row with the reason."""
    assert [row for check in doctor_node.CHECKS for row in check.work(patient(tmp_path))] == []
