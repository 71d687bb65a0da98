"""What the web server answers: the page, the data that it draws, an invite, and the metrics.

The page's script draws `/v1/data.json`, which has the types of the control socket without anybody's address. A
reader asks once for everything, and then for what is new since the `next` of the last reply.
"""

import asyncio
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import msgspec
import segno

from atoll.node.daemon.web.http_messages import HttpRefusal, HttpReply, HttpRequest
from atoll.node.daemon.web.measurements import Measurements
from atoll.node.daemon.web.older_rounds import thin
from atoll.node.daemon.web.page_control import PageControl
from atoll.node.daemon.web.page_data import (
    DashboardData,
    EventNews,
    InviteView,
    LogNews,
    PageEvent,
    ResourceUse,
    RoundWork,
    SampleText,
)
from atoll.node.daemon.web.page_file import page
from atoll.node.daemon.web.run_pace import alarms_of, pace_of
from atoll.protocols.errors import AtollError
from atoll.protocols.local.control_messages import LogLine, PeerStatus, RoundStatus, Status

if TYPE_CHECKING:
    from atoll.node.daemon.web.metrics import Metrics

ROUNDS_MAX = 300
"""Most rounds in a reply, the newest."""
FEW_ROUNDS = 48
"""As many as the pace of the run is found from: a reader that follows needs no more."""
PEERS_MAX = 256
"""Most peers in a reply: connected ones first, then members."""
WORK_ROUNDS = 24
"""Most rounds in a reply with the contributions that the ledger has."""
CHANGING_ROUNDS = 4
"""The newest rounds are sent again: their times and losses may still change."""
ELSEWHERE = "not shown to other machines"
QUIET_ZONE = 4
"""Light modules around a QR code, as its standard asks for."""

_NUMBER = re.compile(r"[0-9]{1,9}")
_ADDRESS = re.compile(
    r"(/(?:ip[46]|dns[46]?|dnsaddr)/)[^/\s]+"  # of a multiaddr
    r"|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]"
    r"|(?<!\w)(?:[0-9a-fA-F]{0,4}:){2,}[0-9a-fA-F:.]*"
    r"|\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b"
)


class StatusSource(Protocol):
    """What the web server may read from the node."""

    is_local: bool
    """Whether only this machine reaches the page: then log, events, sample text and an invite are shown."""

    def status(self) -> Status:
        """The node's current status."""

    async def peers(self) -> Sequence[PeerStatus]:
        """All known peers."""

    def still_s(self) -> float:
        """Seconds since a step, a round or the activity changed."""

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        """The newest `last` rounds, oldest first."""

    def rounds_before(self, number: int) -> Sequence[RoundStatus]:
        """All rounds of the node's log before this one, oldest first."""

    def work(self, numbers: Sequence[int]) -> Sequence[RoundWork]:
        """The contributions to these rounds that the ledger has; rounds without any are left out."""

    def resources(self, worker_pid: int) -> ResourceUse:
        """What the node takes of its machine. `worker_pid` 0: there is no worker."""

    def sample(self) -> SampleText:
        """The newest text that the run's model wrote here, or why there is none."""

    def log_news(self, after: int) -> tuple[int, Sequence[LogLine]]:
        """Newest lines of the log after the first `after` ones, and how many there were."""

    def event_news(self, after: int) -> tuple[int, Sequence[PageEvent]]:
        """The same of the node's journal."""

    def invite(self) -> str:
        """A link that others join with and that is no secret. Raises ConfigError that says why there is none."""


class Site:
    """Answers requests about one node."""

    def __init__(
        self, source: StatusSource, measured: Measurements | None = None, control: PageControl | None = None
    ) -> None:
        """`measured`: what the metrics have besides the source's status. `control`: what takes orders, if any."""
        self._source = source
        self._control = control
        self._measured = measured

    @cached_property
    def _metrics(self) -> "Metrics":
        from atoll.node.daemon.web.metrics import Metrics

        return Metrics(self._source.status, self._measured)

    async def answer(self, request: HttpRequest) -> HttpReply:
        """The reply to a request. Raises what the source raises."""
        if request.is_post:
            nobody = HttpRefusal(403, "this page takes no orders")
            return await self._control.answer(request) if self._control else nobody.reply()
        match request.path:
            case "/":
                return page()
            case "/metrics":
                return self._metrics.reply(request.accept)
            case "/v1/data.json":
                return await self._data_reply(request.query)
            case "/v1/invite.json":
                return await self._invite_reply()
        return HttpRefusal(404, "nothing here").reply()

    async def _data_reply(self, query: dict[str, str]) -> HttpReply:
        """The query: the first round (`since`), line of the log and event to send; 0 if absent."""
        asked = [query.get(name, "0") for name in ("since", "log", "event")]
        if not all(map(_NUMBER.fullmatch, asked)):
            return HttpRefusal(400, "since is a round's number, log that of a line, event that of one").reply()
        data = await self._data(*map(int, asked))
        return HttpReply(msgspec.json.encode(data), "application/json")

    async def _data(self, since: int, log: int, event: int) -> DashboardData:
        source, status = self._source, self._source.status()
        peers = sorted(await source.peers(), key=lambda peer: (not peer.path, not peer.member, peer.peer))
        newest = self._newest(since)
        rounds = tuple(row for row in newest if row.round >= since)
        pace = pace_of(status, newest, source.still_s())
        shown = redact_status(status)
        return DashboardData(
            status=shown,
            peers=tuple(msgspec.structs.replace(peer, maddr="") for peer in peers[:PEERS_MAX]),
            rounds=rounds,
            next=next_since(rounds, since),
            older=None if since else thin(source.rounds_before(newest[0].round) if newest else ()),
            work=tuple(source.work([row.round for row in rounds[-WORK_ROUNDS:]])),
            pace=pace,
            alarms=alarms_of(shown),
            resources=source.resources(status.worker_pid),
            sample=self._sample(),
            log=self._log(log),
            events=self._events(event),
        )

    def _newest(self, since: int) -> Sequence[RoundStatus]:
        """The newest rounds, at least those from `since` on that are among the newest ROUNDS_MAX."""
        few = self._source.rounds(FEW_ROUNDS)
        return few if since and few and few[0].round <= since else self._source.rounds(ROUNDS_MAX)

    def _sample(self) -> SampleText:
        """A model repeats what it was trained on, which may not be for everybody."""
        return self._source.sample() if self._source.is_local else SampleText(why=ELSEWHERE)

    def _log(self, after: int) -> LogNews:
        if not self._source.is_local:
            return LogNews(0, ())
        count, lines = self._source.log_news(after)
        return LogNews(
            count, tuple(msgspec.structs.replace(line, message=redact_addresses(line.message)) for line in lines)
        )

    def _events(self, after: int) -> EventNews:
        """Events name peers, addresses and reasons, as the log does."""
        if not self._source.is_local:
            return EventNews(0, ())
        count, events = self._source.event_news(after)
        return EventNews(
            count, tuple(msgspec.structs.replace(one, text=redact_addresses(one.text)) for one in events)
        )

    async def _invite_reply(self) -> HttpReply:
        """A link holds addresses, so it is shown on this machine only."""
        if not self._source.is_local:
            view = InviteView(why="the page is open to other machines; use `atoll invite` on this one")
        else:
            try:
                link = self._source.invite()
                view = InviteView(link=link, qr=await asyncio.to_thread(qr_rows, link))
            except AtollError as error:
                view = InviteView(why=error.line())
        return HttpReply(msgspec.json.encode(view), "application/json")


def qr_rows(link: str) -> tuple[str, ...]:
    """The link as a QR code with its quiet zone, a row of `0` and `1` for each row of modules.

    In capitals: letters, digits and the colon have a mode of their own that packs them tighter.
    """
    code = segno.make(link.upper(), error="l", micro=False)
    return tuple("".join("1" if dark else "0" for dark in row) for row in code.matrix_iter(border=QUIET_ZONE))


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
