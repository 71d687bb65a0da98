"""Explains dial errors: go-libp2p's text becomes a kind of fault, a short reason and a remedy. Pure.

p2pd reports every address that it knows of a peer, old ones too: `… all dials failed * [MADDR] why * [MADDR] why`.
The texts were collected from hivemind's p2pd (go-libp2p 0.3x) against closed ports, dropped packets, missing
routes, other keys and foreign servers; they are in `tests/p2p/discovery/test_dial_errors.py`.
"""

import re
from dataclasses import dataclass
from enum import Enum


class DialFault(Enum):
    """Kinds of dial faults, each with what the user does next, which may be nothing.

    The most specific first; among several addresses, the most specific kind counts.
    """

    OTHER_RUN = "that node trains another run: check the invite, both sides must join the same run"
    OLD_VERSION = "upgrade the older of the two nodes"
    WRONG_PEER = "the seed has a new key: ask for a new invite, or correct /p2p/… in the seed"
    LOCAL = "the network part of this node is restarting; it goes on by itself"
    HANDSHAKE = "no libp2p node behind that port, or a firewall interferes: check the address and port"
    HUNG_UP = "the node is full or keeps us away: use another seed, or wait"
    REFUSED = "no node runs there: ask its owner to start it, or check the port"
    NO_RELAY = "the node is offline, or left its relay: wait, or ask for a new invite"
    SILENT = "port closed by a firewall or NAT, or the machine is off: open or forward the port there"
    NO_ROUTE = "check this machine's network; an IPv6 seed needs IPv6 here"
    NO_RECORD = "ask the owner of the name for TXT records dnsaddr=/ip4/…/tcp/…/p2p/PEERID"
    NO_NAME = "check the spelling of the name, and this machine's DNS"
    NO_DNS = "check this machine's network and its DNS servers (/etc/resolv.conf)"
    NO_ADDRESS = "give the seed as /ip4/…/tcp/PORT/p2p/… or /ip4/…/udp/PORT/quic-v1/p2p/…"
    SELF = "drop this node from its own seeds"
    UNKNOWN = "look at the log with `atoll logs`"
    BACKOFF = ""


# The first match counts. The patterns include error texts of our own, because one table shows both.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), trouble, words)
    for pattern, trouble, words in (
        (r"trains run|trains another run", DialFault.OTHER_RUN, ""),
        (r"(wire .*); upgrade the older node", DialFault.OLD_VERSION, "another version of atoll: {}"),
        (r"remote key matches (12D3Koo\w{45})", DialFault.WRONG_PEER, "another key answers there: {}"),
        (r"peer id mismatch", DialFault.WRONG_PEER, "another key answers there"),
        (r"p2pd (?:is not running|closed|does not answer)", DialFault.LOCAL, ""),
        (r"NO_RESERVATION", DialFault.NO_RELAY, "its relay does not know it"),
        (r"opening relay circuit: (\w+)", DialFault.NO_RELAY, "its relay says {}"),
        (r"opening (?:hop stream to relay|relay circuit)", DialFault.NO_RELAY, "its relay does not answer"),
        (r"failed to negotiate .*deadline exceeded", DialFault.HANDSHAKE, "connected, but no libp2p answer"),
        (r"failed to negotiate", DialFault.HANDSHAKE, "connected, but it does not speak libp2p"),
        (r"CRYPTO_ERROR|handshake", DialFault.HANDSHAKE, "the TLS handshake failed"),
        (r"hung up|connection reset by peer|unexpected EOF", DialFault.HUNG_UP, "it hangs up"),
        (r"connection refused", DialFault.REFUSED, "connection refused"),
        (r"DNS name .* does not exist", DialFault.NO_NAME, ""),
        (r"no DNS server", DialFault.NO_DNS, ""),
        (r"dnsaddr record|names no PeerID", DialFault.NO_RECORD, ""),
        (r"no route to host", DialFault.NO_ROUTE, "no route to host"),
        (r"network is unreachable|network is down", DialFault.NO_ROUTE, "network is unreachable"),
        (
            r"permission denied|invalid argument|assign requested address",
            DialFault.NO_ROUTE,
            "this machine may not",
        ),
        (r"i/o timeout|deadline exceeded|no recent network activity|timed out", DialFault.SILENT, "no answer"),
        (r"no answer in", DialFault.SILENT, ""),
        (r"no good addresses", DialFault.NO_ADDRESS, "no address that this node can dial"),
        (r"undialable", DialFault.NO_ADDRESS, "no address that this node can dial"),
        (r"dial to self", DialFault.SELF, "this node"),
        (r"dial backoff", DialFault.BACKOFF, "failed a moment ago"),
    )
)
_ENTRY = re.compile(r" \* \[([^\]]+)\] ")
_PREFIX = re.compile(r"^(?:failed to dial:? ?(?:\w{40,64}:)? ?)+(?:all dials failed)? ?")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Explanation of one failed dial."""

    kind: DialFault
    reason: str
    """The reason, in a few words."""

    @property
    def remedy(self) -> str:
        """What the user does next; may be empty."""
        return self.kind.value


def explain(text: str, maddr: str = "") -> Diagnosis:
    """Diagnosis of `text`, the error of a dial to `maddr`.

    The entry of `maddr` counts if it is specific, else the most specific of all entries.
    """
    head, *rest = _ENTRY.split(text)
    entries = list(zip(rest[::2], rest[1::2], strict=True))
    own = [_one(why) for address, why in entries if address == maddr]
    for found in own:
        if found.kind not in (DialFault.BACKOFF, DialFault.UNKNOWN):
            return found
    all_found = [_one(why) for _, why in entries] or [_named(_one(head), maddr)]
    return min(all_found, key=lambda found: list(DialFault).index(found.kind))


def _one(why: str) -> Diagnosis:
    """Diagnosis of one address' error."""
    for pattern, trouble, words in _RULES:
        if found := pattern.search(why):
            reason = words.format(*found.groups()) if words else _short(why)
            return Diagnosis(trouble, reason)
    return Diagnosis(DialFault.UNKNOWN, _short(why))


def _named(found: Diagnosis, maddr: str) -> Diagnosis:
    # p2pd resolves /dns… itself and then only says that nothing is left to dial.
    if found.kind is DialFault.NO_ADDRESS and maddr.startswith("/dns"):
        name = maddr.split("/")[2]
        return Diagnosis(DialFault.NO_NAME, f"the name {name} has no address in DNS")
    return found


def _short(text: str) -> str:
    """`text` without go-libp2p's preamble and without hints after a semicolon."""
    return _PREFIX.sub("", " ".join(text.split())).split("; ")[0].strip()[:160] or "failed"
