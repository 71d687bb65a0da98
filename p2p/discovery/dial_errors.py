"""Why a dial failed, in a few words, and what the user does about it. Pure: the texts of go-libp2p are the input.

p2pd reports every address that it knows of a peer, old ones too: `… all dials failed * [MADDR] why * [MADDR] why`.
The texts were collected from hivemind's p2pd (go-libp2p 0.3x) against closed ports, dropped packets, missing
routes, other keys and foreign servers; `tests/p2p/discovery/test_dial_errors.py` keeps them.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class Trouble(StrEnum):
    """Classes of reasons, the most telling first: of several addresses the first class counts."""

    OTHER_RUN = "other run"
    OLD_VERSION = "version"
    WRONG_PEER = "wrong key"
    LOCAL = "local"
    HANDSHAKE = "handshake"
    HUNG_UP = "hung up"
    REFUSED = "refused"
    NO_RELAY = "relay"
    SILENT = "timeout"
    NO_ROUTE = "no route"
    NO_RECORD = "no record"
    NO_NAME = "no name"
    NO_DNS = "no dns"
    NO_ADDRESS = "no address"
    SELF = "this node"
    UNKNOWN = "unknown"
    BACKOFF = "backoff"


_RANK = {trouble: rank for rank, trouble in enumerate(Trouble)}

REMEDIES = {
    Trouble.OTHER_RUN: "that node trains another run: check the invite, both sides must join the same run",
    Trouble.OLD_VERSION: "upgrade the older of the two nodes",
    Trouble.WRONG_PEER: "the seed has a new key: ask for a new invite, or correct /p2p/… in the seed",
    Trouble.LOCAL: "the network part of this node is restarting; it goes on by itself",
    Trouble.HANDSHAKE: "no libp2p node behind that port, or a firewall interferes: check the address and port",
    Trouble.HUNG_UP: "the node is full or keeps us away: use another seed, or wait",
    Trouble.REFUSED: "no node runs there: ask its owner to start it, or check the port",
    Trouble.NO_RELAY: "the node is offline, or left its relay: wait, or ask for a new invite",
    Trouble.SILENT: "port closed by a firewall or NAT, or the machine is off: open or forward the port there",
    Trouble.NO_ROUTE: "check this machine's network; an IPv6 seed needs IPv6 here",
    Trouble.NO_RECORD: "ask the owner of the name for TXT records dnsaddr=/ip4/…/tcp/…/p2p/PEERID",
    Trouble.NO_NAME: "check the spelling of the name, and this machine's DNS",
    Trouble.NO_DNS: "check this machine's network and its DNS servers (/etc/resolv.conf)",
    Trouble.NO_ADDRESS: "give the seed as /ip4/…/tcp/PORT/p2p/… or /ip4/…/udp/PORT/quic-v1/p2p/…",
    Trouble.SELF: "",
    Trouble.UNKNOWN: "look at the log with `atoll logs`",
    Trouble.BACKOFF: "",
}
"""What the user does next, by class."""

# The first match counts. Words of ours stand beside those of go-libp2p: a table shows both alike.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), trouble, words)
    for pattern, trouble, words in (
        (r"trains run|trains another run", Trouble.OTHER_RUN, ""),
        (r"upgrade the older node", Trouble.OLD_VERSION, ""),
        (r"remote key matches (12D3Koo\w{45})", Trouble.WRONG_PEER, "another key answers there: {}"),
        (r"peer id mismatch", Trouble.WRONG_PEER, "another key answers there"),
        (r"p2pd (?:is not running|closed|does not answer)", Trouble.LOCAL, ""),
        (r"NO_RESERVATION", Trouble.NO_RELAY, "its relay does not know it"),
        (r"opening relay circuit: (\w+)", Trouble.NO_RELAY, "its relay says {}"),
        (r"opening (?:hop stream to relay|relay circuit)", Trouble.NO_RELAY, "its relay does not answer"),
        (r"failed to negotiate .*deadline exceeded", Trouble.HANDSHAKE, "connected, but no libp2p answer"),
        (r"failed to negotiate", Trouble.HANDSHAKE, "connected, but it does not speak libp2p"),
        (r"CRYPTO_ERROR|handshake", Trouble.HANDSHAKE, "the TLS handshake failed"),
        (r"hung up|connection reset by peer|unexpected EOF", Trouble.HUNG_UP, "it hangs up"),
        (r"connection refused", Trouble.REFUSED, "connection refused"),
        (r"DNS name .* does not exist", Trouble.NO_NAME, ""),
        (r"no DNS server", Trouble.NO_DNS, ""),
        (r"dnsaddr record|names no PeerID", Trouble.NO_RECORD, ""),
        (r"no route to host", Trouble.NO_ROUTE, "no route to host"),
        (r"network is unreachable|network is down", Trouble.NO_ROUTE, "network is unreachable"),
        (r"permission denied|invalid argument|assign requested address", Trouble.NO_ROUTE, "this machine may not"),
        (r"i/o timeout|deadline exceeded|no recent network activity|timed out", Trouble.SILENT, "no answer"),
        (r"no answer in", Trouble.SILENT, ""),
        (r"no good addresses", Trouble.NO_ADDRESS, "no address that this node can dial"),
        (r"undialable", Trouble.NO_ADDRESS, "no address that this node can dial"),
        (r"dial to self", Trouble.SELF, "this node"),
        (r"dial backoff", Trouble.BACKOFF, "failed a moment ago"),
    )
)
_ENTRY = re.compile(r" \* \[([^\]]+)\] ")
_PREFIX = re.compile(r"^(?:failed to dial:? ?(?:\w{40,64}:)? ?)+(?:all dials failed)? ?")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One failed dial."""

    trouble: Trouble
    reason: str
    """A few words."""
    remedy: str
    """What the user does next; may be empty."""


def explain(text: str, maddr: str = "") -> Diagnosis:
    """What `text`, the error of a dial to `maddr`, means.

    The entry of `maddr` counts if there is one that says something, else the most telling of all.
    """
    head, *rest = _ENTRY.split(text)
    entries = list(zip(rest[::2], rest[1::2], strict=True))
    own = [_one(why) for address, why in entries if address == maddr]
    for found in own:
        if found.trouble not in (Trouble.BACKOFF, Trouble.UNKNOWN):
            return found
    all_found = [_one(why) for _, why in entries] or [_named(_one(head), maddr)]
    return min(all_found, key=lambda found: _RANK[found.trouble])


def _one(why: str) -> Diagnosis:
    """The meaning of one address' error."""
    for pattern, trouble, words in _RULES:
        if found := pattern.search(why):
            reason = words.format(*found.groups()) if words else _short(why)
            return Diagnosis(trouble, reason, REMEDIES[trouble])
    return Diagnosis(Trouble.UNKNOWN, _short(why), REMEDIES[Trouble.UNKNOWN])


def _named(found: Diagnosis, maddr: str) -> Diagnosis:
    # p2pd resolves /dns… itself and then only says that nothing is left to dial.
    if found.trouble is Trouble.NO_ADDRESS and maddr.startswith("/dns"):
        name = maddr.split("/")[2]
        return Diagnosis(Trouble.NO_NAME, f"the name {name} has no address in DNS", REMEDIES[Trouble.NO_NAME])
    return found


def _short(text: str) -> str:
    """Without go-libp2p's preamble and without hints after a semicolon."""
    return _PREFIX.sub("", " ".join(text.split())).split("; ")[0].strip()[:160] or "failed"
