"""Checks of the way out: p2pd, our port, UDP, and every seed, dialled by a p2pd with a throwaway key.

The node's own p2pd is left alone, so all of this works beside a running node.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from atoll.node.doctor.checks import DoctorCheck, Finding, Patient, State
from atoll.node.doctor.probes import ANSWER_S, MULTISTREAM, UDP_S, banner, speaks_quic
from atoll.p2p.discovery.dial_errors import DialFault, explain
from atoll.p2p.discovery.dns import system_lookup
from atoll.p2p.discovery.dnsaddr import resolve
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.address_book import AddressBook, is_dns_seed, parse_seed
from atoll.p2p.transports.p2pd.listen import require_free
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.p2p.transports.p2pd.schema import binary
from atoll.protocols.errors import ConfigError, LocalFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId

DIAL_S = 12.0
DNS_S = 10.0
SEEDS_MAX = 16
_LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")


@dataclass(frozen=True)
class Tried:
    """One seed after its test."""

    seed: str
    error: str = ""
    """Empty: it answered."""
    maddr: str = ""
    took_s: float = 0.0


def p2pd(patient: Patient) -> Iterator[Finding]:
    """The program that does the networking starts on this machine."""
    try:
        ran = subprocess.run([str(binary()), "--help"], capture_output=True, timeout=15.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalFault(
            f"p2pd does not run: {error}", hint="install the hivemind wheel for this platform"
        ) from error
    if ran.returncode != 0 or b"Usage" not in ran.stdout + ran.stderr:
        remedy = "install the hivemind wheel for this platform"
        yield Finding("p2pd", "fail", f"p2pd ended with {ran.returncode}", remedy)
    else:
        yield Finding("p2pd", "pass", "runs")


def port(patient: Patient) -> Iterator[Finding]:
    """Our listen ports: held by our node, or free over TCP and UDP."""
    config = patient.config
    if config is None:
        return
    both = (f"/ip4/0.0.0.0/tcp/{config.port}", f"/ip4/0.0.0.0/udp/{config.port}/quic-v1")
    wanted = config.listen or both
    numbers = sorted({place[2] for place in map(_place, wanted) if place and place[2]})
    if patient.status is not None:
        yield _port_of_running(patient.status, numbers)
    elif not numbers:
        yield Finding("port", "pass", "picked by the node; set `port` to forward it in a router")
    else:
        require_free(wanted)
        yield Finding("port", "pass", f"{', '.join(wanted)} free")


def udp(patient: Patient) -> Iterator[Finding]:
    """A QUIC server must answer a packet of an unknown version: shows that UDP goes out and comes back."""
    places = asyncio.run(_udp_places(seeds_of(patient)))
    if not places:
        yield Finding("udp", "pass", "not tested: no seed with an address for QUIC")
        return
    answered, took_s = asyncio.run(_first_version_answer(places))
    if answered:
        yield Finding("udp", "pass", f"{answered[0]}:{answered[1]} answers QUIC in {took_s * 1000:.0f} ms")
        return
    remedy = "if seeds answer below, allow outgoing UDP in the firewall: hole punching needs it"
    yield Finding("udp", "warn", f"none of {len(places)} seeds answers over UDP in {UDP_S:.0f} s", remedy)


def seeds(patient: Patient) -> Iterator[Finding]:
    """Each seed: name, connection, key."""
    wanted = seeds_of(patient)
    known = cached_peers(patient)
    if not wanted:
        state: State = "pass" if known or patient.status else "warn"
        remedy = "" if state == "pass" else "give one with --seed, `seeds` in config.toml, or an invite"
        yield Finding("seeds", state, f"no seed; {known} peers are known from earlier", remedy)
        return
    own = own_peer(patient)
    tried = asyncio.run(try_seeds(wanted, own))
    linked = bool((patient.status or {}).get("peers"))
    yield from judge_seeds(tried, is_covered=linked or known > 0)


def judge_seeds(tried: Sequence[Tried], *, is_covered: bool) -> Iterator[Finding]:
    """`is_covered`: the swarm can be found without seeds. One seed is enough, so a dead one only warns."""
    bad: State = "warn" if is_covered or any(not one.error for one in tried) else "fail"
    for one in tried:
        if not one.error:
            how = "this node" if one.maddr == "self" else f"answers in {one.took_s * 1000:.0f} ms"
            yield Finding("seed", "pass", f"{one.seed}: {how}")
        else:
            found = explain(one.error, one.maddr)
            yield Finding("seed", bad, f"{one.seed}: {found.reason}", found.remedy)


def seeds_of(patient: Patient) -> list[PeerAddress]:
    """Seeds of the configuration and of the running node; a bad one is the configuration's trouble."""
    configured = patient.config.seeds if patient.config else ()
    of_node = (patient.status or {}).get("seeds") or {}
    found = []
    for text in dict.fromkeys((*configured, *of_node)):
        try:
            found.append(parse_seed(str(text)))
        except ConfigError:
            continue
    return found[:SEEDS_MAX]


def cached_peers(patient: Patient) -> int:
    """Peers in the caches of this home: of the run if one is named, else of all."""
    folders = [patient.home.run(patient.run.id)] if patient.run else sorted(patient.home.runs.glob("*/"))
    book = AddressBook(PeerId(""))
    for folder in folders:
        book.load(folder / "peers.json")
    return len(book.all())


def own_peer(patient: Patient) -> PeerId:
    """Our PeerID as the running node says it; empty if none runs."""
    return PeerId(str((patient.status or {}).get("peer", "")))


async def try_seeds(wanted: Sequence[PeerAddress], own: PeerId) -> list[Tried]:
    """Resolve and dial all of them at once."""
    host = P2pdHost(Identity(os.urandom(32)), P2pdOptions(listen=_LISTEN))
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(host.serve(ready.set))
        await ready.wait()
        async with asyncio.TaskGroup() as dial_group:
            tasks = [dial_group.create_task(_try_seed(host, seed, own)) for seed in wanted]
        serving.cancel()
    return [one for task in tasks for one in task.result()]


async def _try_seed(host: P2pdHost, seed: PeerAddress, own: PeerId) -> list[Tried]:
    if not is_dns_seed(seed):
        return [await _try_address(host, seed, own)]
    text = seed.maddrs[0]
    try:
        async with asyncio.timeout(DNS_S):
            found = await resolve(seed, system_lookup)
    except TimeoutError:
        return [Tried(text, f"no DNS server answers in {DNS_S:.0f} s")]
    except Unreachable as error:
        return [Tried(text, error.line())]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_try_address(host, address, own)) for address in found.addresses]
    return [task.result() for task in tasks]


async def _try_address(host: P2pdHost, address: PeerAddress, own: PeerId) -> Tried:
    maddr = address.maddrs[0]
    text = f"{maddr}/p2p/{address.peer}"
    if address.peer == own:
        return Tried(text, maddr="self")
    started = time.monotonic()
    try:
        async with asyncio.timeout(DIAL_S):
            await host.connect(address)
    except TimeoutError:
        return Tried(text, f"no answer in {DIAL_S:.0f} s", maddr)
    except Unreachable as error:
        return Tried(text, await _refined(error.line(), maddr), maddr)
    return Tried(text, maddr=maddr, took_s=time.monotonic() - started)


async def _refined(error: str, maddr: str) -> str:
    """For a port that is open but no libp2p node: what it says instead."""
    place = _place(maddr)
    if explain(error, maddr).kind is not DialFault.HANDSHAKE or place is None or "/udp/" in maddr:
        return error
    said = await banner(place[1], place[2])
    return f"{error}; it answers {said[:16]!r}" if said and not said.startswith(MULTISTREAM) else error


async def _udp_places(wanted: Iterable[PeerAddress]) -> list[tuple[str, int]]:
    """(host, port) of the seeds' QUIC addresses; for a TCP address the same port is tried, as nodes use both."""
    addresses: list[PeerAddress] = []
    for seed in wanted:
        if not is_dns_seed(seed):
            addresses.append(seed)
            continue
        try:
            async with asyncio.timeout(DNS_S):
                addresses += (await resolve(seed, system_lookup)).addresses
        except (Unreachable, TimeoutError):
            continue
    places = [_place(maddr) for address in addresses for maddr in address.maddrs if "/p2p-circuit" not in maddr]
    return list(dict.fromkeys((place[1], place[2]) for place in places if place))[:SEEDS_MAX]


async def _first_version_answer(places: Sequence[tuple[str, int]]) -> tuple[tuple[str, int] | None, float]:
    """The first place that answers, and after how long."""
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(speaks_quic(*place)): place for place in places}
        for next_one in asyncio.as_completed(tasks):
            if await next_one:
                break
        took_s = time.monotonic() - started
        answered = [place for task, place in tasks.items() if task.done() and task.result()]
        for task in tasks:
            task.cancel()
    return (answered[0] if answered else None), took_s


def _port_of_running(status: dict[str, object], wanted: list[int]) -> Finding:
    addresses = status.get("addresses")
    texts = [str(maddr) for maddr in addresses] if isinstance(addresses, list | tuple) else []
    ports = sorted({place[2] for place in map(_place, texts) if place})
    missing = [number for number in wanted if number not in ports]
    if missing:
        found = f"the node does not listen on {missing}, but on {ports or 'nothing'}"
        return Finding("port", "warn", found, "restart it if you changed `listen` or `port`")
    return Finding("port", "pass", f"the node listens on {', '.join(map(str, ports)) or 'nothing yet'}")


def _place(maddr: str) -> tuple[str, str, int] | None:
    """(kind, host, port) of `/ip4/HOST/tcp/PORT…` and its like; None for others."""
    parts = maddr.split("/")
    is_known = len(parts) >= 5 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6")
    if not is_known or parts[3] not in ("tcp", "udp") or not parts[4].isdigit():
        return None
    return parts[1], parts[2], int(parts[4])


CHECKS = (
    DoctorCheck("p2pd", 20.0, p2pd),
    DoctorCheck("port", 5.0, port),
    DoctorCheck("udp", DNS_S + UDP_S + 5.0, udp),
    DoctorCheck("seeds", DNS_S + DIAL_S + ANSWER_S + 10.0, seeds),
)
