"""The lab is what it says: reachability, translation, rates, delay, loss; and nothing of it stays."""

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from atoll_lab.lab import Home, Host, Lab, LabError, LabSpec, LinkSpec, Nat, Public
from atoll_lab.namespaces import Namespace, end_processes, network_of, processes_of
from atoll_lab.sweep import PREFIX
from tests.waiting import HANGS_S

pytestmark = [pytest.mark.usefixtures("lab_possible"), pytest.mark.swarm]

ROOT = Path(__file__).resolve().parent.parent.parent
PORT = 4001
SILENCE_S = 0.15
"""Long enough for a packet through a lab without delay to arrive, were it let through."""
PATIENCE_S = HANGS_S


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One of each kind, links without limits."""
    homes = {"cone1": Nat.CONE, "cone2": Nat.CONE, "symmetric": Nat.SYMMETRIC, "noudp": Nat.NOUDP}
    kinds = {name: Home(nat) for name, nat in homes.items()}
    with Lab(LabSpec({"seed": Public(), "other": Public(), **kinds})) as built:
        yield built


@pytest.fixture
def sockets() -> Iterator[contextlib.ExitStack]:
    """Closes what a test opened."""
    with contextlib.ExitStack() as opened:
        yield opened


def open_socket(opened: contextlib.ExitStack, host: Host, kind: socket.SocketKind, port: int = 0) -> socket.socket:
    """A bound socket on a host, used from here."""
    made = opened.enter_context(host.inside(lambda: socket.socket(socket.AF_INET, kind)))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.settimeout(PATIENCE_S)
    made.bind(("", port))
    return made


def udp(opened: contextlib.ExitStack, host: Host, port: int = 0) -> socket.socket:
    return open_socket(opened, host, socket.SOCK_DGRAM, port)


def tcp(opened: contextlib.ExitStack, host: Host, port: int = 0) -> socket.socket:
    return open_socket(opened, host, socket.SOCK_STREAM, port)


def heard(receiver: socket.socket, wait_s: float = PATIENCE_S) -> tuple[str, int] | None:
    """Who sent the next packet, None when none comes."""
    if not select.select([receiver], [], [], wait_s)[0]:
        return None
    return receiver.recvfrom(2048)[1]


def seen(sender: socket.socket, server: socket.socket, server_host: Host) -> tuple[str, int]:
    """The address that a server sees of a sender."""
    sender.sendto(b"who am I", (server_host.address, server.getsockname()[1]))
    address = heard(server)
    assert address is not None
    return address


def punched(opened: contextlib.ExitStack, lab: Lab, names: tuple[str, str]) -> bool:
    """Two homes ask the seed how they look and then send to each other, both at once, ten times."""
    server = udp(opened, lab["seed"])
    ends = [udp(opened, lab[name], PORT) for name in names]
    outer = [seen(end, server, lab["seed"]) for end in ends]
    reached: set[socket.socket] = set()
    for _ in range(10):
        for end, target in zip(ends, reversed(outer), strict=True):
            end.sendto(b"punch", target)
        reached |= {end for end in ends if heard(end, 0.02)}
        if len(reached) == 2:
            return True
    assert not reached
    return False


def test_public_hosts_reach_each_other(lab, sockets):
    server, client = udp(sockets, lab["other"], PORT), udp(sockets, lab["seed"], PORT)
    assert seen(client, server, lab["other"]) == (lab["seed"].address, PORT)
    assert seen(server, client, lab["seed"]) == (lab["other"].address, PORT)


def test_a_home_reaches_the_public_and_gets_answers(lab, sockets):
    server, home = udp(sockets, lab["seed"]), udp(sockets, lab["cone1"], PORT)
    outer = seen(home, server, lab["seed"])
    assert outer == (lab["cone1"].public_address, PORT), "a cone keeps the port"
    server.sendto(b"answer", outer)
    assert heard(home) is not None


def test_nobody_reaches_a_home_first(lab, sockets):
    server, home = udp(sockets, lab["other"]), udp(sockets, lab["cone1"], PORT)
    listener = tcp(sockets, lab["cone1"], PORT)
    listener.listen()
    for address in (lab["cone1"].public_address, lab["cone1"].address):
        server.sendto(b"hello", (address, PORT))
        assert heard(home, SILENCE_S) is None
    caller = tcp(sockets, lab["other"])
    caller.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        caller.connect((lab["cone1"].public_address, PORT))


def test_a_port_forwarded_by_hand_is_reached(lab, sockets):
    lab.router("cone2").forward_port("udp", 4777, lab["cone2"].address)
    home, caller = udp(sockets, lab["cone2"], 4777), udp(sockets, lab["other"])
    caller.sendto(b"hello", (lab["cone2"].public_address, 4777))
    assert heard(home) == (lab["other"].address, caller.getsockname()[1])


def test_what_nobody_has_is_silence(lab, sockets):
    """Nothing leaves the lab: the world outside does not answer and does not refuse."""
    caller = tcp(sockets, lab["cone1"])
    caller.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        caller.connect(("192.0.2.1", 80))


def test_two_cones_punch(lab, sockets):
    assert punched(sockets, lab, ("cone1", "cone2"))


def test_cone_and_symmetric_do_not_punch(lab, sockets):
    assert not punched(sockets, lab, ("cone1", "symmetric"))


def test_symmetric_takes_a_port_for_every_peer(lab, sockets):
    home = udp(sockets, lab["symmetric"], PORT)
    ports = {seen(home, udp(sockets, lab[name]), lab[name])[1] for name in ("seed", "other")}
    assert len(ports) == 2


def test_noudp_passes_tcp_only(lab, sockets):
    server, home = udp(sockets, lab["seed"], PORT), udp(sockets, lab["noudp"])
    home.sendto(b"hello", (lab["seed"].address, PORT))
    assert heard(server, SILENCE_S) is None
    listener = tcp(sockets, lab["seed"], PORT)
    listener.listen()
    tcp(sockets, lab["noudp"]).connect((lab["seed"].address, PORT))
    accepted, address = listener.accept()
    accepted.close()
    assert address[0] == lab["noudp"].public_address


@pytest.mark.parametrize(("name", "same_port"), [("cone1", True), ("symmetric", False)])
def test_a_flushed_mapping_is_lost(lab, sockets, name, same_port):
    server, home = udp(sockets, lab["seed"]), udp(sockets, lab[name], 4100)
    before = seen(home, server, lab["seed"])
    server.sendto(b"still there", before)
    assert heard(home)
    lab.router(name).flush_conntrack()
    server.sendto(b"still there?", before)
    assert heard(home, SILENCE_S) is None
    assert (seen(home, server, lab["seed"]) == before) is same_port


def test_a_rebound_cone_has_another_port_and_stays_a_cone(lab, sockets):
    server, home = udp(sockets, lab["seed"]), udp(sockets, lab["cone1"], 4200)
    before = seen(home, server, lab["seed"])
    outer = lab.router("cone1").rebind()["udp", 4200]
    after = {seen(home, udp(sockets, lab[name]), lab[name]) for name in ("seed", "other")}
    assert after == {(before[0], outer)}
    assert outer != before[1]
    server.sendto(b"still there?", before)
    assert heard(home, SILENCE_S) is None


def test_a_changed_address(lab, sockets):
    server, home = udp(sockets, lab["seed"]), udp(sockets, lab["cone2"], 4300)
    before = seen(home, server, lab["seed"])
    address = lab.router("cone2").change_address()
    server.sendto(b"still there?", before)
    assert heard(home, SILENCE_S) is None
    assert seen(home, server, lab["seed"]) == (address, 4300) == (lab["cone2"].public_address, 4300)
    server.sendto(b"answer", (address, 4300))
    assert heard(home)


@pytest.mark.parametrize("name", ["other", "cone1"])
def test_an_unplugged_host_comes_back(lab, sockets, name):
    server, host = udp(sockets, lab["seed"]), udp(sockets, lab[name], 4400)
    outer = seen(host, server, lab["seed"])
    lab[name].down()
    server.sendto(b"there?", outer)
    assert heard(host, SILENCE_S) is None
    lab[name].up()
    assert seen(host, server, lab["seed"]) == outer


def connection(opened: contextlib.ExitStack, server: Host, client: Host) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    listener = tcp(opened, server)
    listener.listen()
    called = tcp(opened, client)
    called.connect((server.address, listener.getsockname()[1]))
    accepted, _ = listener.accept()
    accepted.settimeout(PATIENCE_S)
    return opened.enter_context(accepted), called


SO_RCVBUFFORCE = 33
FLOOD_S, PACKET_BYTES, HEADER_BYTES = 0.8, 1372, 28
PACKET_BITS = (PACKET_BYTES + HEADER_BYTES) * 8


def flood_bits_s(
    sender: socket.socket, receiver: socket.socket, target: tuple[str, int], limit_bits_s: float
) -> float:
    """What a limit lets through, headers included, when half as much again is offered."""
    receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
    arrivals: list[float] = []
    sent, begin_s = 0, time.monotonic()
    while (since_s := time.monotonic() - begin_s) < FLOOD_S:
        for _ in range(int(since_s * limit_bits_s * 1.5 / PACKET_BITS) - sent):
            sender.sendto(bytes(PACKET_BYTES), target)
            sent += 1
        while heard(receiver, 0):
            arrivals.append(time.monotonic())
        time.sleep(0.002)
    while heard(receiver, 0.3):
        arrivals.append(time.monotonic())
    return (len(arrivals) - 1) * PACKET_BITS / (arrivals[-1] - arrivals[0])


def limited_bits_s(
    sender: socket.socket, receiver: socket.socket, target: tuple[str, int], limit_bits_s: float
) -> float:
    """The best of many: a busy machine makes a flood slower, nothing makes it faster than the limit."""
    best_bits_s = 0.0
    for _ in range(20):
        best_bits_s = max(best_bits_s, flood_bits_s(sender, receiver, target, limit_bits_s))
        if best_bits_s > limit_bits_s * 0.9:
            break
    return best_bits_s


def least_round_trip_s(a: socket.socket, b: socket.socket, address: tuple[str, int], expected_s: float) -> float:
    """The least of many round trips: a busy machine adds to a delay, nothing takes away from it."""
    least_s = math.inf
    for _ in range(60):
        least_s = min(least_s, round_trip_s(a, b, address))
        if least_s < expected_s * 1.1:
            break
    return least_s


def round_trip_s(a: socket.socket, b: socket.socket, address: tuple[str, int]) -> float:
    begin_s = time.monotonic()
    a.sendto(b"ping", address)
    back = heard(b)
    assert back is not None
    b.sendto(b"pong", back)
    assert heard(a)
    return time.monotonic() - begin_s


SHAPED = LinkSpec(up_bits_s=8e6, down_bits_s=32e6, delay_s=0.015)


@pytest.fixture(scope="module")
def shaped() -> Iterator[Lab]:
    """60 ms between any two hosts; the home has 32 down and 8 Mbit/s up."""
    with Lab(LabSpec({"seed": Public(LinkSpec(delay_s=0.015)), "home": Home(Nat.CONE, SHAPED)})) as built:
        yield built


def test_round_trip(shaped, sockets):
    home, server = udp(sockets, shaped["home"]), udp(sockets, shaped["seed"], PORT)
    least_s = least_round_trip_s(home, server, (shaped["seed"].address, PORT), 0.06)
    assert least_s == pytest.approx(0.06, rel=0.2)


@pytest.mark.parametrize(("down", "limit_bits_s"), [(True, 32e6), (False, 8e6)])
def test_rates(shaped, sockets, down, limit_bits_s):
    home, server = udp(sockets, shaped["home"]), udp(sockets, shaped["seed"], PORT)
    outer = seen(home, server, shaped["seed"])
    ends = (server, home, outer) if down else (home, server, (shaped["seed"].address, PORT))
    before = shaped["home"].link.carried()
    assert limited_bits_s(*ends, limit_bits_s) == pytest.approx(limit_bits_s, rel=0.2)
    carried = [now - then for now, then in zip(shaped["home"].link.carried(), before, strict=True)]
    assert carried[1 if down else 0] > 0.5 * FLOOD_S * limit_bits_s / 8
    assert carried[0 if down else 1] < 20_000, "the other direction is still"


def test_a_cut_link_comes_back(shaped, sockets):
    home, server = udp(sockets, shaped["home"]), udp(sockets, shaped["seed"], PORT)
    seen(home, server, shaped["seed"])
    shaped["home"].link.down()
    home.sendto(b"there?", (shaped["seed"].address, PORT))
    assert heard(server, SILENCE_S) is None
    shaped["home"].link.up()
    seen(home, server, shaped["seed"])


def test_jitter_varies_the_delay_and_keeps_the_order(shaped, sockets):
    home, server = udp(sockets, shaped["home"]), udp(sockets, shaped["seed"], PORT)
    shaped["home"].link.set_delay(0.015, jitter_s=0.012)
    times = [round_trip_s(home, server, (shaped["seed"].address, PORT)) for _ in range(10)]
    assert max(times) - min(times) > 0.006
    for index in range(50):
        home.sendto(bytes([index]), (shaped["seed"].address, PORT))
        time.sleep(0.001)
    assert [server.recv(10)[0] for _ in range(50)] == list(range(50))
    shaped["home"].link.set_delay(0.015)


def test_rate_and_delay_change_while_it_runs(shaped, sockets):
    link = shaped["home"].link
    link.set_rate(2e6, None)
    link.set_delay(0.005)
    home, server = udp(sockets, shaped["home"]), udp(sockets, shaped["seed"], PORT)
    least_s = least_round_trip_s(home, server, (shaped["seed"].address, PORT), 0.04)
    assert least_s == pytest.approx(0.04, rel=0.2)
    assert limited_bits_s(home, server, (shaped["seed"].address, PORT), 2e6) == pytest.approx(2e6, rel=0.2)


def test_delay_needs_a_relay_from_the_start(lab):
    with pytest.raises(LabError, match="delay_s above 0"):
        lab["seed"].link.set_delay(0.1)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_loss(lab, sockets, direction):
    """4,000 packets at 10 %: four deviations are 1.9 %."""
    sender, receiver = (lab["seed"], lab["other"]) if direction == "up" else (lab["other"], lab["seed"])
    server, client = udp(sockets, receiver, PORT), udp(sockets, sender)
    server.setblocking(False)
    arrived = 0
    lab["seed"].link.set_loss(0.1)
    for _ in range(40):
        for _ in range(100):
            client.sendto(b"x", (receiver.address, PORT))
        arrived += drained(server)
    while heard_soon(server):  # a busy machine passes some on late
        arrived += drained(server)
    lab["seed"].link.set_loss(0.0)
    assert 1 - arrived / 4000 == pytest.approx(0.1, abs=0.02)


def drained(receiver: socket.socket) -> int:
    """How many packets wait."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while receiver.recv(2048):
            count += 1
    return count


SOL_UDP, UDP_SEGMENT = 17, 103


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
@pytest.mark.parametrize("lossy", ["seed", "other"])
def test_loss_hits_packets_not_bundles(sockets, delay_s, lossy):
    """The kernel carries 40 packets at once where it may; were they lost at once, some of 100 bundles would be."""
    links = {name: LinkSpec(delay_s=delay_s, loss=0.1 * (name == lossy)) for name in ("seed", "other")}
    with Lab(LabSpec({name: Public(link) for name, link in links.items()})) as built:
        server, client = udp(sockets, built["other"], PORT), udp(sockets, built["seed"])
        server.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
        client.setsockopt(SOL_UDP, UDP_SEGMENT, 100)
        for index in range(100):
            client.sendto(bytes([index]) * 4000, (built["other"].address, PORT))
        arrived = list(iter(lambda: server.recv(2048)[0] if heard_soon(server) else None, None))
    assert set(arrived) == set(range(100))
    assert 1 - len(arrived) / 4000 == pytest.approx(0.1, abs=0.02)


def heard_soon(receiver: socket.socket) -> bool:
    return bool(select.select([receiver], [], [], 2.0)[0])


def namespaces_of(process_id: int) -> list[str]:
    """What a lab of this process has left, or has now."""
    return [path.name for path in Path("/run/netns").glob(f"{PREFIX}-{process_id}-*")]


STUBBORN = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)
"""


class Boom(Exception):
    """What happens in the middle of a test."""


def test_nothing_stays_after_an_error():
    """Not even a daemon that ignores requests to end."""
    before = set(namespaces_of(os.getpid()))
    spec = LabSpec({"seed": Public(LinkSpec(delay_s=0.01)), "home": Home(Nat.CONE)})
    with contextlib.suppress(Boom), Lab(spec) as built:
        process = built["home"].run([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        assert network_of(daemon) is not None
        assert len(set(namespaces_of(os.getpid())) - before) == 4
        raise Boom
    assert set(namespaces_of(os.getpid())) == before
    assert network_of(daemon) is None, "the daemon lives"
    assert process.poll() is not None


HEIR = """
import os, signal, sys, time
def leave(number, frame):
    print("asked", flush=True)
    os._exit(0)
def leave_an_heir(number, frame):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, leave)
    print("heir", flush=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    time.sleep(600)
signal.signal(signal.SIGTERM, leave_an_heir)
print("up", flush=True)
time.sleep(600)
"""


def test_who_enters_while_others_are_ended_is_asked_too():
    with Lab(LabSpec({"seed": Public()})) as built:
        process = built["seed"].run([sys.executable, "-c", HEIR], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        end_processes([built["seed"].namespace], patience_s=30.0)
        assert process.stdout.read() == "heir\nasked\n"


def test_nothing_stays_of_a_lab_that_could_not_be_built():
    before = namespaces_of(os.getpid())
    with pytest.raises(LabError, match="share"), Lab(LabSpec({"seed": Public(LinkSpec(delay_s=0.01, loss=2.0))})):
        pytest.fail("built")
    assert namespaces_of(os.getpid()) == before


def test_the_relay_ends_with_the_lab():
    before = relays()
    with Lab(LabSpec({"seed": Public(LinkSpec(delay_s=0.01))})):
        assert len(relays()) == len(before) + 1
    assert relays() == before


def relays() -> list[int]:
    """Relay processes that this process started."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in children if b"relay.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def tool(*words: str, **options) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rig", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_the_tool_runs_a_command_everywhere():
    said = "echo {name} {address} {public} {seed} {x}; test {name} != home2"
    with tool("--nat", "cone,symmetric", "--rate", "9mbit", "--rtt", "8ms", "--", "sh", "-c", said) as process:
        output, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 1, errors
    assert sorted(output.splitlines()) == [
        "home1 | home1 192.168.11.2 11.11.1.1 5.10.1.1 {x}",
        "home2 | home2 192.168.12.2 11.12.1.1 5.10.1.1 {x}",
        "seed  | seed 5.10.1.1 5.10.1.1 5.10.1.1 {x}",
    ]
    assert namespaces_of(process.pid) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_tool_cleans_up_when_it_is_stopped(how):
    with tool("--topology", "public-2", "--", "sh", "-c", "echo up; sleep 600") as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(namespaces_of(process.pid)) == 3
        process.send_signal(how)
        _, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130, errors
    assert namespaces_of(process.pid) == []


class Killed(NamedTuple):
    """A tool that was killed while its lab ran programs, one of which outlives its parent."""

    tool: int
    inside: list[int]
    namespaces: set[str]


@pytest.fixture
def killed() -> Killed:
    with tool("--topology", "public-1", "--", "sh", "-c", "setsid sleep 600 & echo up; exec sleep 600") as process:
        assert process.stdout is not None
        process.stdout.readline()
        # Before the kill: from then on the lab of any other test may be the one that sweeps.
        namespaces = namespaces_of(process.pid)
        assert len(namespaces) == 2
        inside = processes_of([Namespace(name) for name in namespaces])
        assert inside
        process.kill()
    return Killed(process.pid, inside, set(namespaces))


def test_sweep_removes_what_a_killed_lab_left(killed):
    with tool("--sweep") as sweeper:
        output, _ = sweeper.communicate(timeout=HANGS_S)
    # The lab of any other test sweeps too, at the same time: of two namespaces it may have taken one.
    removed = {line.split()[1] for line in output.splitlines() if f"-{killed.tool}-" in line}
    assert removed <= killed.namespaces
    assert sweeper.returncode == 0
    assert namespaces_of(killed.tool) == []


def test_the_next_lab_removes_what_a_killed_one_left(killed):
    with Lab(LabSpec({"seed": Public()})):
        assert namespaces_of(killed.tool) == []
        assert [pid for pid in killed.inside if network_of(pid) is not None] == []


def test_a_missing_program_is_said_loudly():
    with tool("--check", env={"PATH": "/nonexistent"}) as process:
        _, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 2
    assert errors == "THE NAT LAB CANNOT RUN HERE: no ip, tc, nft in PATH: apt-get install nftables iproute2\n"
