"""Judges a running node's health and its reachability. Pure: the input is its status."""

from collections.abc import Iterator
from typing import Any

from atoll.node.doctor.checks import CheckState, DoctorCheck, DoctorInput, Finding
from atoll.protocols.errors import counted

YOUNG_S = 30.0
"""Uptime below which a node may not know its reachability yet, or any peer."""
RESTARTS_WARN = 3

_REACH: dict[str, tuple[CheckState, str, str]] = {
    "public": ("pass", "others can dial this node", ""),
    "punchable": ("pass", "behind a NAT that can be punched: others connect directly with help", ""),
    "relay-only": (
        "warn",
        "others reach this node only through a relay",
        "forward the node's port (TCP and UDP) in the router, or switch on UPnP there",
    ),
}
_REACHED = ("public", "punchable")
"""Reachabilities with which a node needs no port of a router, and no relay."""


def node(given: DoctorInput) -> Iterator[Finding]:
    """Check that a running node reports no fault, and that its processes do not keep restarting."""
    status = given.status
    if status is None:
        return
    if status.get("trouble"):
        yield Finding("node", "fail", str(status["trouble"]), "see `atoll status`, and the log with `atoll logs`")
    else:
        reason = f": {status['reason']}" if status.get("reason") else ""
        yield Finding("node", "pass", f"pid {status.get('pid')}, {status.get('activity')}{reason}"[:160])
    restarts = {"worker": status.get("worker_restarts", 0), "network": status.get("host_restarts", 0)}
    for name, count in restarts.items():
        if count > RESTARTS_WARN:
            yield Finding(name, "warn", f"its process died {count} times", "look for the reason with `atoll logs`")


def network(given: DoctorInput) -> Iterator[Finding]:
    """Check NAT, relay, port mapping, connections and DHT of the running node."""
    if given.status is None:
        return
    status = given.status
    yield from _reachability(status)
    yield from _relay(status)
    yield _port_map(status)
    yield _connections(status)
    yield _dht(status)


def _reachability(status: dict[str, Any]) -> Iterator[Finding]:
    kind = str(status.get("reachability", ""))
    why = str(status.get("reachability_why") or "")
    if kind in _REACH:
        state, text, remedy = _REACH[kind]
        yield Finding("nat", state, f"{kind}: {why or text}", remedy)
    elif kind:
        young = float(status.get("uptime_s") or 0.0) < YOUNG_S
        remedy = "ask again in half a minute" if young else "connect to one public node: peers test each other"
        yield Finding("nat", "warn", f"not known yet{': ' + why if why else ''}", remedy)


def _relay(status: dict[str, Any]) -> Iterator[Finding]:
    relayed = int((status.get("paths") or {}).get("relayed", 0))
    use = status.get("relay") or {}
    if status.get("relaying"):
        today, cap = (float(use.get(key) or 0) / 1e9 for key in ("bytes_today", "bytes_per_day"))
        text = f"relays for others: {use.get('circuits', 0)} circuits now, {today:.1f} of {cap:.1f} GB today"
        if cap and today >= cap:
            yield Finding("relay", "warn", text, "raise relay_bytes_per_day, or wait for tomorrow")
        else:
            yield Finding("relay", "pass", text)
    elif relayed:
        yield Finding("relay", "pass", f"{relayed} of {status.get('peers')} connections are relayed")
    elif status.get("reachability") == "relay-only":
        remedy = "a public node of the run must offer to relay"
        yield Finding("relay", "warn", "this node needs a relay and has none in use", remedy)
    elif status.get("reachability") in _REACHED:
        yield Finding("relay", "pass", "none needed, none offered")
    else:
        yield Finding("relay", "skip", "none in use; whether one is needed is not known yet")


def _port_map(status: dict[str, Any]) -> Finding:
    ports = status.get("port_map")
    if ports is None:
        return Finding("upnp", "skip", "this node asks no router for a port")
    if ports:
        text = ", ".join(f"{transport} {number}" for transport, number in sorted(ports.items()))
        return Finding("upnp", "pass", f"the router forwards {text} to this node")
    if status.get("reachability") in _REACHED:
        return Finding("upnp", "pass", "no router gives a port, and none is needed")
    remedy = "switch on UPnP or NAT-PMP in the router, or forward the port by hand"
    return Finding("upnp", "warn", "no router gives a port", remedy)


def _connections(status: dict[str, Any]) -> Finding:
    count = int(status.get("peers") or 0)
    paths = ", ".join(f"{number} {path}" for path, number in (status.get("paths") or {}).items() if number)
    if count:
        return Finding("peers", "pass", counted(count, "connection") + (f" ({paths})" if paths else ""))
    if float(status.get("uptime_s") or 0.0) < YOUNG_S:
        return Finding("peers", "warn", "nobody yet; the node has just started", "ask again in half a minute")
    return Finding("peers", "warn", "connected to nobody", "see the seeds in this list; the node goes on trying")


def _dht(status: dict[str, Any]) -> Finding:
    state = str((status.get("seeds") or {}).get("dht") or "it has not reported yet")
    if not state.startswith(("client", "server")):
        return Finding("dht", "skip", state)
    if "no server yet" in state:
        return Finding("dht", "warn", state, "give --dht-bootstrap; seeds and the cache of peers still work")
    return Finding("dht", "pass", state)


CHECKS = (DoctorCheck("node", 5.0, node), DoctorCheck("nat", 5.0, network))
