"""The verdict on how others may reach us, from what observers see and what dial-backs reached. Pure.

Terms: RFC 4787 (endpoint-independent mapping can be punched; address- and port-dependent mapping, "symmetric",
cannot). One observer shows a symmetric router only by the port that it changed; two prove it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.p2p.host.maddrs import Endpoint, endpoint_of, is_global, with_ip
from atoll.protocols.ids import PeerId
from atoll.protocols.nat import Reach

FAILED_PUNCHES = 3
"""After so many failed punches with different peers and no success we no longer call ourselves punchable."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known now of how we may be reached."""

    listen: tuple[str, ...] = ()
    views: Mapping[PeerId, tuple[str, ...]] | None = None
    """Observer -> multiaddrs of us that it sees."""
    reached: Collection[str] = ()
    """Multiaddrs of ours that a peer dialled back with success."""
    punched: int = 0
    failed: int = 0
    """Punches that worked, and peers with whom the hole did not open."""
    relay_only: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """How we may be reached, as one word, with the reason as one line."""

    reach: Reach = "unknown"
    why: str = "no directly connected peer has said how it sees this node"


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict on `evidence`; the strongest kind of evidence decides."""
    if evidence.relay_only:
        return Verdict("relay-only", "as configured: no direct dials, no address announced")
    # A dial-back that arrived outweighs every guess from ports: a port forward looks like a plain NAT.
    if evidence.reached:
        return Verdict("public", f"dialled back at {sorted(evidence.reached)[0]}")
    views = evidence.views or {}
    seen = [e for maddrs in views.values() for e in _global_endpoints(maddrs)]
    if not views:
        return Verdict()
    if not seen:
        return Verdict("unknown", "every peer so far is in the same network")
    udp = [endpoint for endpoint in seen if endpoint.transport == "udp"]
    # Observers with TCP connections alone: QUIC would have won the race if UDP got out.
    if not udp:
        return Verdict("relay-only", "UDP does not get out of this network")
    return _judge_mapping(evidence, udp)


def _judge_mapping(evidence: Evidence, udp: Sequence[Endpoint]) -> Verdict:
    # IPv4 only: IPv6 is seldom translated, and each of its temporary addresses would look like another mapping.
    ports = {(endpoint.ip, endpoint.port) for endpoint in udp if ":" not in endpoint.ip}
    own = {e.port for e in map(endpoint_of, evidence.listen) if e is not None and e.transport == "udp"}
    shown = ", ".join(f"{ip}:{port}" for ip, port in sorted(ports)[:3])
    # One success outweighs the ports: some routers change them and still let a punched peer in.
    if evidence.punched:
        return Verdict("punchable", f"a hole was punched; seen as {shown}")
    if len(ports) > 1:
        return Verdict("relay-only", f"symmetric NAT: another port for each peer ({shown})")
    if evidence.failed >= FAILED_PUNCHES:
        return Verdict("relay-only", f"{evidence.failed} punches failed; seen as {shown}")
    # A guess, as long as there is one observer: a second one will see the same port, or prove another.
    if ports and not {port for _, port in ports} & own and len(evidence.views or {}) < 2:
        return Verdict("relay-only", f"the router changes ports ({shown}); probably a symmetric NAT")
    if not ports:
        return Verdict("punchable", "IPv6 behind a firewall")
    return Verdict("punchable", f"behind a router that keeps ports; seen as {shown}")


def candidates(evidence: Evidence, is_outside: Callable[[str], bool] = is_global) -> tuple[str, ...]:
    """Our addresses that a dial-back could confirm: outside listen addresses, and the observed IP at our ports."""
    # At our ports, not at the observed ones: those are the router's, and open only towards the observer.
    own = [maddr for maddr in evidence.listen if is_outside(maddr)]
    ips = {e.ip for maddrs in (evidence.views or {}).values() for e in _global_endpoints(maddrs)}
    for maddr in evidence.listen:
        endpoint = endpoint_of(maddr)
        if endpoint is not None:
            own += [with_ip(maddr, ip) for ip in sorted(ips) if (":" in ip) == (":" in endpoint.ip)]
    return tuple(dict.fromkeys(own))


def without_dial_ports(observed: Iterable[str]) -> tuple[str, ...]:
    """Return the observed addresses of this node; of a host that is seen by TCP alone only the first one.

    Each dial by TCP leaves from a port of its own, so that every observer sees another one.
    """
    found = dict.fromkeys(observed)
    hosts = {e.ip for e in map(endpoint_of, found) if e is not None and e.transport != "tcp"}
    for maddr in tuple(found):
        endpoint = endpoint_of(maddr)
        if endpoint is not None and endpoint.transport == "tcp":
            if endpoint.ip in hosts:
                del found[maddr]
            hosts.add(endpoint.ip)
    return tuple(found)


def _global_endpoints(maddrs: Sequence[str]) -> list[Endpoint]:
    return [e for maddr in maddrs if is_global(maddr) and (e := endpoint_of(maddr)) is not None]
