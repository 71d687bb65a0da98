"""`/v1/data.json`: what a dashboard draws, in the types of the control socket, without anybody's address.

A reader asks once for all, then again and again for what is new since the `next` that it was told.
"""

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from atoll.node.daemon.web.reply import HttpReply, refused
from atoll.protocols.local.control_messages import PeerStatus, RoundStatus, Status

VERSION = 1
ROUNDS = 300
"""Newest rows that are sent at most."""
PEERS = 256
"""Connected ones and members first."""
UNSETTLED = 4
"""Newest rows are sent again: their times and losses may still change."""

_SINCE = re.compile(r"[0-9]{1,9}")
_ADDRESS = re.compile(
    r"(/(?:ip[46]|dns[46]?|dnsaddr)/)[^/\s]+"  # of a multiaddr
    r"|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]"
    r"|(?<!\w)(?:[0-9a-fA-F]{0,4}:){2,}[0-9a-fA-F:.]*"
    r"|\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b"
)


class StatusSource(Protocol):
    """The node, to look at."""

    def status(self) -> Status:
        """The node now."""

    async def peers(self) -> Sequence[PeerStatus]:
        """All known peers."""

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        """The newest `last` rows, oldest first."""


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn. Fields are only ever added."""

    v: int = VERSION
    status: Status
    peers: tuple[PeerStatus, ...]
    rounds: tuple[RoundStatus, ...]
    """Oldest first: those that were asked for, and not more than the newest ROUNDS."""
    next: int
    """Ask with `since` of this: older rows do not change any more, but for rare corrections of their times."""


async def reply(source: StatusSource, query: dict[str, str]) -> HttpReply:
    """The answer to a query, `since` = a round or nothing."""
    since = query.get("since", "0")
    if not _SINCE.fullmatch(since):
        return refused(400, "since is a round's number")
    status, peers = hidden(source.status()), sorted(await source.peers(), key=_order)[:PEERS]
    rows = tuple(row for row in source.rounds(ROUNDS) if row.round >= int(since))
    shown = tuple(msgspec.structs.replace(peer, maddr="") for peer in peers)
    data = Data(status=status, peers=shown, rounds=rows, next=next_since(rows, int(since)))
    return HttpReply(msgspec.json.encode(data), "application/json")


def next_since(rows: Sequence[RoundStatus], since: int) -> int:
    """The oldest of `rows` that may still change; `since` where there are none."""
    if not rows:
        return since
    unsettled = rows[-UNSETTLED:][0].round
    return min([unsettled, *(row.round for row in rows if not row.final)])


def hidden(status: Status) -> Status:
    """Without the addresses of this node and of others, in its sentences too."""
    sentences = {
        name: without_addresses(getattr(status, name)) for name in ("reason", "trouble", "reachability_why")
    }
    return msgspec.structs.replace(status, addresses=(), observed=(), seeds={}, **sentences)


def without_addresses(text: str) -> str:
    """IP addresses and names of hosts become `…`."""
    return _ADDRESS.sub(lambda found: f"{found[1] or ''}…", text)


def _order(peer: PeerStatus) -> tuple[bool, bool, str]:
    return not peer.path, not peer.member, peer.peer
