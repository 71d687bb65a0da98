"""Checks the network: p2pd, the listen ports, UDP, and every seed, dialled by a p2pd with a throwaway key.

The node's own p2pd is left alone, so the checks work beside a running node.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.node.doctor.checks import CheckState, DoctorCheck, DoctorInput, Finding
from atoll.p2p.discovery.dial_errors import DialFault, explain
from atoll.p2p.discovery.dns import system_lookup
from atoll.p2p.discovery.dnsaddr import resolve
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.address_book import AddressBook, is_dns_seed, parse_seed
from atoll.p2p.nat.dialback import MULTISTREAM, PROBE_S, read_banner, speaks_quic
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions, require_free
from atoll.p2p.transports.p2pd.schema import binary
from atoll.protocols.errors import ConfigError, LocalFault, Unreachable, counted
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId

DIAL_S = 12.0
DNS_S = 10.0
SEEDS_MAX = 16
_LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")


@dataclass(frozen=True)
class SeedResult:
    """The outcome of dialling one seed."""

    seed: str
    error: str = ""
    """Empty if the seed answered."""
    maddr: str = ""
    took_s: float = 0.0


class HostPort(NamedTuple):
    """A host and a port of an address."""

    host: str
    port: int


def p2pd(given: DoctorInput) -> Iterator[Finding]:
    """Check that p2pd, the networking program, runs on this machine."""
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


def port(given: DoctorInput) -> Iterator[Finding]:
    """Check that the node's listen ports are held by the node, or free over TCP and UDP."""
    config = given.config
    if config is None:
        return
    both = (f"/ip4/0.0.0.0/tcp/{config.port}", f"/ip4/0.0.0.0/udp/{config.port}/quic-v1")
    wanted = config.listen or both
    numbers = sorted({place.port for place in map(_host_port, wanted) if place and place.port})
    if given.status is not None:
        yield _port_of_running(given.status, numbers)
    elif not numbers:
        yield Finding("port", "skip", "the node picks one; set `port` to forward it in a router")
    else:
        require_free(wanted)
        yield Finding("port", "pass", f"{', '.join(wanted)} free")


def udp(given: DoctorInput) -> Iterator[Finding]:
    """Check that UDP passes both ways: a QUIC server must answer a packet of an unknown version."""
    places = asyncio.run(_udp_places(configured_seeds(given)))
    if not places:
        yield Finding("udp", "skip", "no seed with an address to test it with")
        return
    for place in asyncio.run(_speaking_quic(places)):
        yield Finding("udp", "pass", f"{place.host}:{place.port} answers QUIC")
        return
    remedy = "if seeds answer below, allow outgoing UDP in the firewall: hole punching needs it"
    yield Finding("udp", "warn", f"none of {len(places)} seeds answers over UDP in {PROBE_S:.0f} s", remedy)


def seeds(given: DoctorInput) -> Iterator[Finding]:
    """Check each seed: its name, its connection and its key."""
    wanted = configured_seeds(given)
    known = cached_peers(given)
    if not wanted:
        state: CheckState = "skip" if known or given.status else "warn"
        remedy = "" if state == "skip" else "give one with --peer, `seeds` in config.toml, or an invite"
        yield Finding("seeds", state, f"no seed; {counted(known, 'peer')} known from earlier", remedy)
        return
    own = PeerId(str((given.status or {}).get("peer", "")))
    tried = asyncio.run(dial_seeds(wanted, own))
    linked = bool((given.status or {}).get("peers"))
    yield from judge_seeds(tried, is_covered=linked or known > 0)


def judge_seeds(tried: Sequence[SeedResult], *, is_covered: bool) -> Iterator[Finding]:
    """Judge the dialled seeds. A dead one only warns if another answers or, `is_covered`, peers are known."""
    bad: CheckState = "warn" if is_covered or any(not one.error for one in tried) else "fail"
    for one in tried:
        if one.maddr == "self":
            yield Finding("seed", "skip", f"{one.seed}: this node")
        elif not one.error:
            yield Finding("seed", "pass", f"{one.seed}: answers in {one.took_s * 1000:.0f} ms")
        else:
            found = explain(one.error, one.maddr)
            yield Finding("seed", bad, f"{one.seed}: {found.reason}", found.remedy)


def configured_seeds(given: DoctorInput) -> list[PeerAddress]:
    """Valid seeds of the configuration and of the running node, at most SEEDS_MAX."""
    configured = given.config.seeds if given.config else ()
    of_node = (given.status or {}).get("seeds") or {}
    found = []
    for text in dict.fromkeys((*configured, *of_node)):
        try:
            found.append(parse_seed(str(text)))
        except ConfigError:
            continue
    return found[:SEEDS_MAX]


def cached_peers(given: DoctorInput) -> int:
    """Number of peers in this home's caches: that of the run if it is known, else all of them."""
    folders = [given.home.run(given.run.id)] if given.run else sorted(given.home.runs.glob("*/"))
    book = AddressBook(PeerId(""))
    for folder in folders:
        book.load(folder / "peers.json")
    return len(book.all())


async def dial_seeds(wanted: Sequence[PeerAddress], own: PeerId) -> list[SeedResult]:
    """Resolve and dial all seeds at the same time."""
    host = P2pdHost(Identity(os.urandom(32)), P2pdOptions(listen=_LISTEN))
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(host.serve(ready.set))
        await ready.wait()
        async with asyncio.TaskGroup() as dial_group:
            tasks = [dial_group.create_task(_dial_seed(host, seed, own)) for seed in wanted]
        serving.cancel()
    return [one for task in tasks for one in task.result()]


async def _dial_seed(host: P2pdHost, seed: PeerAddress, own: PeerId) -> list[SeedResult]:
    try:
        addresses = await _resolve(seed)
    except Unreachable as error:
        return [SeedResult(seed.maddrs[0], error.line())]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_dial_address(host, address, own)) for address in addresses]
    return [task.result() for task in tasks]


async def _resolve(seed: PeerAddress) -> Sequence[PeerAddress]:
    """The addresses behind a `/dnsaddr` seed; any other seed itself. Raises Unreachable."""
    if not is_dns_seed(seed):
        return [seed]
    try:
        async with asyncio.timeout(DNS_S):
            return (await resolve(seed, system_lookup)).addresses
    except TimeoutError as error:
        raise Unreachable(f"no DNS server answers in {DNS_S:.0f} s") from error


async def _dial_address(host: P2pdHost, address: PeerAddress, own: PeerId) -> SeedResult:
    maddr = address.maddrs[0]
    text = f"{maddr}/p2p/{address.peer}"
    if address.peer == own:
        return SeedResult(text, maddr="self")
    started = time.monotonic()
    try:
        async with asyncio.timeout(DIAL_S):
            await host.connect(address)
    except TimeoutError:
        return SeedResult(text, f"no answer in {DIAL_S:.0f} s", maddr)
    except Unreachable as error:
        return SeedResult(text, await _with_banner(error.line(), maddr), maddr)
    return SeedResult(text, maddr=maddr, took_s=time.monotonic() - started)


async def _with_banner(error: str, maddr: str) -> str:
    """The dial error; for an open port without libp2p, with the first bytes that it sends."""
    place = _host_port(maddr)
    if explain(error, maddr).kind is not DialFault.HANDSHAKE or place is None or "/udp/" in maddr:
        return error
    reply = await read_banner(place.host, place.port)
    return f"{error}; it answers {reply[:16]!r}" if reply and not reply.startswith(MULTISTREAM) else error


async def _udp_places(wanted: Iterable[PeerAddress]) -> list[HostPort]:
    """Host and port of the seeds' addresses; for a TCP address the same UDP port is tried, as nodes use both."""
    addresses: list[PeerAddress] = []
    for seed in wanted:
        with contextlib.suppress(Unreachable):
            addresses += await _resolve(seed)
    maddrs = [maddr for address in addresses for maddr in address.maddrs if "/p2p-circuit" not in maddr]
    places = map(_host_port, maddrs)
    return list(dict.fromkeys(place for place in places if place))[:SEEDS_MAX]


async def _speaking_quic(places: Sequence[HostPort]) -> list[HostPort]:
    """Those of `places` that answer over QUIC."""
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(speaks_quic(*place)): place for place in places}
    return [place for task, place in tasks.items() if task.result()]


def _port_of_running(status: dict[str, object], wanted: list[int]) -> Finding:
    addresses = status.get("addresses")
    texts = [str(maddr) for maddr in addresses] if isinstance(addresses, list | tuple) else []
    ports = sorted({place.port for place in map(_host_port, texts) if place})
    missing = [number for number in wanted if number not in ports]
    if missing:
        found = f"the node does not listen on {missing}, but on {ports or 'nothing'}"
        return Finding("port", "warn", found, "restart it if you changed `listen` or `port`")
    if not ports:
        return Finding("port", "skip", "the node's network is not up yet")
    return Finding("port", "pass", f"the node listens on {', '.join(map(str, ports))}")


def _host_port(maddr: str) -> HostPort | None:
    """Host and port of `/ip4/HOST/tcp/PORT…`, `/dns/HOST/udp/PORT…` and such; None for other addresses."""
    parts = maddr.split("/")
    is_known = len(parts) >= 5 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6")
    if not is_known or parts[3] not in ("tcp", "udp") or not parts[4].isdigit():
        return None
    return HostPort(parts[2], int(parts[4]))


CHECKS = (
    DoctorCheck("p2pd", 20.0, p2pd),
    DoctorCheck("port", 5.0, port),
    DoctorCheck("udp", DNS_S + PROBE_S + 5.0, udp),
    DoctorCheck("seeds", DNS_S + DIAL_S + PROBE_S + 10.0, seeds),
)
