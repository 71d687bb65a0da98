"""What the web server answers: the page, the data that it draws, and the metrics.

The page is one file. Its script draws `/v1/data.json`, which has the types of the control socket without anybody's
address. A reader asks once for everything, and then for what is new since the `next` of the last reply.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import msgspec

from atoll.node.daemon.web.http_messages import NOTHING_ALLOWED, HttpRefusal, HttpReply, HttpRequest
from atoll.node.daemon.web.metrics import Metrics
from atoll.protocols.local.control_messages import PeerStatus, RoundStatus, Status

VERSION = 1
ROUNDS_MAX = 300
"""Most rounds in a reply, the newest."""
PEERS_MAX = 256
"""Most peers in a reply: connected ones first, then members."""
CHANGING_ROUNDS = 4
"""The newest rounds are sent again: their times and losses may still change."""

_PAGE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_SINCE = re.compile(r"[0-9]{1,9}")
_ADDRESS = re.compile(
    r"(/(?:ip[46]|dns[46]?|dnsaddr)/)[^/\s]+"  # of a multiaddr
    r"|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]"
    r"|(?<!\w)(?:[0-9a-fA-F]{0,4}:){2,}[0-9a-fA-F:.]*"
    r"|\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b"
)


class StatusSource(Protocol):
    """What the web server may read from the node."""

    def status(self) -> Status:
        """The node's current status."""

    async def peers(self) -> Sequence[PeerStatus]:
        """All known peers."""

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        """The newest `last` rounds, oldest first."""


class DashboardData(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/data.json`. Later versions only add fields."""

    v: int = VERSION
    status: Status
    peers: tuple[PeerStatus, ...]
    rounds: tuple[RoundStatus, ...]
    """The requested rounds, oldest first, at most the newest ROUNDS_MAX."""
    next: int
    """Value of `since` for the next request: older rounds change only by rare corrections of their times."""


class Site:
    """Answers requests about one node."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source
        self._metrics = Metrics(source.status)

    async def answer(self, request: HttpRequest) -> HttpReply:
        """The reply to a request. Raises what the source raises."""
        match request.path:
            case "/":
                return page()
            case "/metrics":
                return self._metrics.reply(request.accept)
            case "/v1/data.json":
                return await data_reply(self._source, request.query)
        return HttpRefusal(404, "nothing here").reply()


@cache
def page() -> HttpReply:
    """The page, with a policy that runs only its own script and style, by their hashes (CSP level 3).

    If a peer's name ever got into the page as markup, nothing in it would run or load.
    """
    text = _PAGE.read_text(encoding="utf-8")
    hashes = {kind: _csp_hash(inside) for kind, inside in _INLINE.findall(text)}
    own = f"script-src '{hashes['script']}'; style-src '{hashes['style']}'"
    policy = f"{NOTHING_ALLOWED}; {own}; connect-src 'self'; img-src data:"
    return HttpReply(text.encode(), "text/html; charset=utf-8", policy=policy)


async def data_reply(source: StatusSource, query: dict[str, str]) -> HttpReply:
    """The reply of `/v1/data.json`; `since` in the query is the first round to send, 0 if absent."""
    since = query.get("since", "0")
    if not _SINCE.fullmatch(since):
        return HttpRefusal(400, "since is a round's number").reply()
    peers = sorted(await source.peers(), key=lambda peer: (not peer.path, not peer.member, peer.peer))
    rounds = tuple(row for row in source.rounds(ROUNDS_MAX) if row.round >= int(since))
    data = DashboardData(
        status=redact_status(source.status()),
        peers=tuple(msgspec.structs.replace(peer, maddr="") for peer in peers[:PEERS_MAX]),
        rounds=rounds,
        next=next_since(rounds, int(since)),
    )
    return HttpReply(msgspec.json.encode(data), "application/json")


def next_since(rounds: Sequence[RoundStatus], since: int) -> int:
    """The oldest of `rounds` that may still change, or `since` if there are none."""
    if not rounds:
        return since
    changing = rounds[-CHANGING_ROUNDS:][0].round
    return min([changing, *(row.round for row in rounds if not row.final)])


def redact_status(status: Status) -> Status:
    """The status without addresses of this node or of others, in its sentences too."""
    return msgspec.structs.replace(
        status,
        addresses=(),
        observed=(),
        seeds={},
        reason=redact_addresses(status.reason),
        trouble=redact_addresses(status.trouble),
        reachability_why=redact_addresses(status.reachability_why),
    )


def redact_addresses(text: str) -> str:
    """The text with `…` in place of IP addresses and host names."""
    return _ADDRESS.sub(lambda found: f"{found[1] or ''}…", text)


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
