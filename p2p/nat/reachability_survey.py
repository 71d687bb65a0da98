"""Survey of our reachability: ask peers what they see of us, and to dial back (as AutoNAT does).

It runs at the first connection, whenever our addresses or observers change, and every half minute. The verdict is
`reachability.judge`; this module only collects the evidence.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from atoll.p2p.host.interface import Host
from atoll.p2p.host.maddrs import legal_maddrs
from atoll.p2p.nat.nat_protocol import Clocks, request
from atoll.p2p.nat.reachability import FAILED_PUNCHES, Evidence, Verdict, candidates, judge
from atoll.p2p.system.waiting import Notifier
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import MADDRS, DialBack, Look, Reached, Seen

log = logging.getLogger(__name__)

ROUND_EVERY_S = 30.0
POLL_S = 3.0
"""Our own listen addresses are compared so often: a laptop that woke up elsewhere."""
DEBOUNCE_S = 0.3
"""Connections come in groups: one round serves the whole group."""
ROUND_GAP_S = 2.0
"""Between two rounds, however often connections come and go: peers answer sixty looks a minute."""
OBSERVERS = 4
"""Peers that say where they see us. Two show a symmetric NAT by two ports; two more are spare."""
NEWCOMERS = 4
"""Other peers that are asked once, so many a round: what are they, and do they relay?"""
DIAL_BACKS = 3
"""Two of them must agree, where there are so many: one peer alone cannot make us believe that we are public."""
CONFIRM_EVERY_S = 150.0
"""A dial-back is repeated so often, or when there are new candidates."""


def usual_ahead_s(peers_ahead_s: Collection[float]) -> float | None:
    """How far the clocks of peers are ahead of ours, in seconds; None without peers.

    The middle one of all clocks, ours too if there are several others. Where two are in the middle, it is the one
    nearer to ours: one of two peers with a wrong clock must not make this node believe that its own is wrong.
    """
    clocks = sorted([*peers_ahead_s, 0.0] if len(peers_ahead_s) > 1 else peers_ahead_s)
    middle = clocks[(len(clocks) - 1) // 2 : len(clocks) // 2 + 1]
    return min(middle, key=abs, default=None)


class ReachabilitySurvey:
    """Owns the evidence of our reachability and the verdict on it."""

    def __init__(
        self,
        host: Host,
        run: RunId,
        direct: Callable[[], Collection[PeerId]],
        clocks: Clocks,
        *,
        announce: tuple[str, ...],
        relay_only: bool,
        is_outside: Callable[[str], bool],
    ) -> None:
        """`direct`: peers that we are connected to without a relay. The choices at the end: see RouteOptions."""
        self._host = host
        self._run = run
        self._direct = direct
        self._clocks = clocks
        self._announce = announce
        self._relay_only = relay_only
        self._is_outside = is_outside
        self._wake = Notifier()
        self._listen: tuple[str, ...] = ()
        self._views: dict[PeerId, tuple[str, ...]] = {}
        self._confirmed: tuple[str, ...] = ()
        self._probed: tuple[str, ...] = ()
        self._probed_at = -CONFIRM_EVERY_S
        self._punched = 0
        self._failed: set[PeerId] = set()
        self._asked: set[PeerId] = set()
        self.observations: dict[PeerId, Seen] = {}
        """The last answer of each connected peer: where it sees us, and what it is itself."""
        self.clock_ahead_s: dict[PeerId, float] = {}
        """How far peers' clocks are ahead of ours, with the error of half a round trip."""
        self.verdict = self._judged()

    def refresh(self) -> None:
        """Begin another round soon: something changed."""
        self._wake.notify()

    def on_punch(self, peer: PeerId, *, worked: bool) -> None:
        """Count a hole to `peer` that opened or did not: evidence too."""
        if worked:
            self._punched += 1
            self._failed.clear()
        elif len(self._failed) < FAILED_PUNCHES:
            self._failed.add(peer)
        self._judge()

    def confirmed(self) -> tuple[str, ...]:
        """Our addresses that were dialled back."""
        return self._confirmed

    def public_addresses(self) -> tuple[str, ...]:
        """Addresses at which anybody may dial us; empty behind a NAT and for a node that hides."""
        return () if self._relay_only else self._announce or self._confirmed

    async def serve(self) -> None:
        """Run rounds of questions until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_addresses())
            while True:
                began = self._clocks.now()
                await self._round()
                try:
                    async with asyncio.timeout(ROUND_EVERY_S):
                        await self._wake.wait()
                        await asyncio.sleep(max(DEBOUNCE_S, began + ROUND_GAP_S - self._clocks.now()))
                except TimeoutError:
                    continue

    async def _watch_addresses(self) -> None:
        while True:
            try:
                listen = await self._host.addresses()
            except Unreachable:
                listen = self._listen
            if listen != self._listen:
                self._listen = listen
                self._probed_at = -CONFIRM_EVERY_S
                # Those were punches of another network, whose router says nothing of this one's.
                self._punched = 0
                self._failed.clear()
                self.refresh()
            await asyncio.sleep(POLL_S)

    async def _round(self) -> None:
        # Sorted by PeerID inside a rank: the same observers every round, so that views can be compared.
        direct = sorted(self._direct(), key=lambda peer: (self._observer_rank(peer), peer))
        observers, others = direct[:OBSERVERS], direct[OBSERVERS:]
        newcomers = [peer for peer in others if peer not in self._asked]
        self._asked = (self._asked & set(direct)) | {*observers, *newcomers[:NEWCOMERS]}
        self._views = {peer: maddrs for peer, maddrs in self._views.items() if peer in observers}
        self.observations = {peer: seen for peer, seen in self.observations.items() if peer in direct}
        self.clock_ahead_s = {peer: ahead for peer, ahead in self.clock_ahead_s.items() if peer in direct}
        async with asyncio.TaskGroup() as group:
            for peer in (*observers, *newcomers[:NEWCOMERS]):
                group.create_task(self._observe(peer))
        if len(newcomers) > NEWCOMERS:
            self.refresh()
        # Twice: a dial-back takes seconds, and what the observers saw is worth showing before.
        self._judge()
        # A peer inside our own network reaches addresses that nobody else does: its dial-back proves nothing.
        await self._confirm([peer for peer in observers if self._observer_rank(peer) == 0])
        self._judge()

    def _observer_rank(self, peer: PeerId) -> int:
        """0 for observers outside our own network, 1 for those not asked yet, 2 for those inside."""
        if peer not in self.observations:
            return 1
        return 0 if any(map(self._is_outside, self.observations[peer].maddrs)) else 2

    def _judge(self) -> None:
        before, self.verdict = self.verdict, self._judged()
        if before.reach != self.verdict.reach:
            log.info("reachability: %s (%s)", self.verdict.reach, self.verdict.why)

    async def _observe(self, peer: PeerId) -> None:
        began = self._clocks.unix()
        try:
            seen = await request(self._host, peer, Look(self._run), Seen)
        except Unreachable as error:
            log.debug("no look from %s: %s", short(peer), error)
            self._views.pop(peer, None)
            return
        # The peer read its clock between our two readings, at the middle when both ways take as long.
        self.clock_ahead_s[peer] = seen.unix_s - (began + self._clocks.unix()) / 2
        self.observations[peer] = seen = msgspec.structs.replace(seen, maddrs=legal_maddrs(seen.maddrs))
        self._views[peer] = seen.maddrs

    async def _confirm(self, observers: list[PeerId]) -> None:
        wanted = () if self._relay_only else candidates(self._evidence(), self._is_outside)[:MADDRS]
        is_due = self._clocks.now() - self._probed_at >= CONFIRM_EVERY_S
        if not observers or (wanted == self._probed and not is_due):
            return
        self._probed, self._probed_at = wanted, self._clocks.now()
        self._confirmed = await self._dialled_back(wanted, observers[:DIAL_BACKS]) if wanted else ()

    async def _dialled_back(self, wanted: tuple[str, ...], observers: list[PeerId]) -> tuple[str, ...]:
        found: Counter[str] = Counter()
        answered = 0

        async def one(peer: PeerId) -> None:
            nonlocal answered
            try:
                answer = await request(self._host, peer, DialBack(self._run, wanted), Reached)
                answered += 1
                # A set: an address that one peer names twice is still confirmed by one peer.
                found.update(set(answer.maddrs))
            except Unreachable as error:
                log.debug("no dial-back from %s: %s", short(peer), error)

        async with asyncio.TaskGroup() as group:
            for peer in observers:
                group.create_task(one(peer))
        # All were busy: what was known before still holds.
        if not answered:
            return tuple(maddr for maddr in wanted if maddr in self._confirmed)
        return tuple(maddr for maddr in wanted if found[maddr] >= min(2, answered))

    def _evidence(self) -> Evidence:
        return Evidence(
            listen=self._listen,
            views=dict(self._views),
            reached=self._confirmed,
            punched=self._punched,
            failed=len(self._failed),
            relay_only=self._relay_only,
        )

    def _judged(self) -> Verdict:
        return judge(self._evidence())
