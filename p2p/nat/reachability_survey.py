"""Find out how we may be reached: ask peers what they see of us, and to dial back.

Runs at the first connection, whenever our addresses or observers change, and every half minute. The judgement is
`reach.judge`; here are only the questions and when they are put.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from math import isfinite

import msgspec

from atoll.p2p.host.interface import Host
from atoll.p2p.host.maddrs import legal_maddrs
from atoll.p2p.nat.nat_calls import Clocks, ask
from atoll.p2p.nat.reachability import FAILED_PUNCHES, Evidence, Verdict, candidates, judge
from atoll.p2p.system.notifier import Notifier
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import MADDRS, DialBack, Look, Reached, Seen

log = logging.getLogger(__name__)

EVERY_S = 30.0
POLL_S = 3.0
"""Our own listen addresses are compared so often: a laptop that woke up elsewhere."""
SETTLE_S = 0.3
GAP_S = 2.0
"""Between two rounds, however often connections come and go: peers answer sixty looks a minute."""
OBSERVERS = 4
NEWCOMERS = 4
"""Other peers that are asked once, so many a round: what are they, and do they relay?"""
DIAL_BACKS = 3
"""Two of them must agree, where there are so many: one peer alone cannot talk us into being public."""
CONFIRM_EVERY_S = 150.0
"""A dial-back is repeated so often, or when there are new candidates."""


class Survey:
    """Owns the evidence and the verdict."""

    def __init__(
        self,
        host: Host,
        run: RunId,
        direct: Callable[[], Collection[PeerId]],
        clocks: Clocks,
        *,
        relay_only: bool,
        is_outside: Callable[[str], bool],
    ) -> None:
        """`direct`: peers that we are connected to without a relay. `is_outside`: see RouteOptions."""
        self._is_outside = is_outside
        self._host, self._run, self._direct, self._clocks = host, run, direct, clocks
        self._relay_only = relay_only
        self._wake = Notifier()
        self._listen: tuple[str, ...] = ()
        self._views: dict[PeerId, tuple[str, ...]] = {}
        self._reached: tuple[str, ...] = ()
        self._asked: tuple[str, ...] = ()
        self._asked_at = -CONFIRM_EVERY_S
        self._punched = 0
        self._failed: set[PeerId] = set()
        self._tried: set[PeerId] = set()
        self.looks: dict[PeerId, Seen] = {}
        """What connected peers last said of us and of themselves."""
        self.clock_ahead_s: dict[PeerId, float] = {}
        """How far peers' clocks are ahead of ours, with the error of half a round trip."""
        self.verdict = self._judged()

    def soon(self) -> None:
        """Something changed: ask again."""
        self._wake.notify()

    def on_punch(self, peer: PeerId, *, worked: bool) -> None:
        """A hole to `peer` opened or did not, which is evidence too."""
        if worked:
            self._punched += 1
            self._failed.clear()
        elif len(self._failed) < FAILED_PUNCHES:
            self._failed.add(peer)
        self._judge()

    def reached(self) -> tuple[str, ...]:
        """Our addresses that were dialled back."""
        return self._reached

    async def serve(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_addresses())
            while True:
                began = self._clocks.now()
                await self._round()
                try:
                    async with asyncio.timeout(EVERY_S):
                        await self._wake.wait()
                        await asyncio.sleep(max(SETTLE_S, began + GAP_S - self._clocks.now()))
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
                self._asked_at = -CONFIRM_EVERY_S
                self._punched = 0
                self._failed.clear()  # those were punches of another network
                self.soon()
            await asyncio.sleep(POLL_S)

    async def _round(self) -> None:
        direct = sorted(self._direct(), key=lambda peer: (self._worth(peer), peer))
        observers, others = direct[:OBSERVERS], direct[OBSERVERS:]
        newcomers = [peer for peer in others if peer not in self._tried]
        self._tried = (self._tried & set(direct)) | {*observers, *newcomers[:NEWCOMERS]}
        self._views = {peer: maddrs for peer, maddrs in self._views.items() if peer in observers}
        self.looks = {peer: seen for peer, seen in self.looks.items() if peer in direct}
        self.clock_ahead_s = {peer: ahead for peer, ahead in self.clock_ahead_s.items() if peer in direct}
        async with asyncio.TaskGroup() as group:
            for peer in (*observers, *newcomers[:NEWCOMERS]):
                group.create_task(self._look(peer))
        if len(newcomers) > NEWCOMERS:
            self.soon()
        self._judge()
        await self._confirm([peer for peer in observers if self._worth(peer) == 0])
        self._judge()

    def _worth(self, peer: PeerId) -> int:
        """Observers outside our own network first, then those who may be, then those inside."""
        if peer not in self.looks:
            return 1
        return 0 if any(map(self._is_outside, self.looks[peer].maddrs)) else 2

    def _judge(self) -> None:
        before, self.verdict = self.verdict, self._judged()
        if before.reach != self.verdict.reach:
            log.info("reachability: %s (%s)", self.verdict.reach, self.verdict.why)

    async def _look(self, peer: PeerId) -> None:
        began = self._clocks.unix()
        try:
            seen = await ask(self._host, peer, Look(self._run), Seen)
        except Unreachable as error:
            log.debug("no look from %s: %s", short(peer), error)
            self._views.pop(peer, None)
            return
        if isfinite(seen.unix_s):
            self.clock_ahead_s[peer] = seen.unix_s - (began + self._clocks.unix()) / 2
        self.looks[peer] = seen = msgspec.structs.replace(seen, maddrs=legal_maddrs(seen.maddrs))
        self._views[peer] = seen.maddrs

    async def _confirm(self, observers: list[PeerId]) -> None:
        wanted = () if self._relay_only else candidates(self._evidence(), self._is_outside)[:MADDRS]
        is_due = self._clocks.now() - self._asked_at >= CONFIRM_EVERY_S
        if not observers or (wanted == self._asked and not is_due):
            return
        self._asked, self._asked_at = wanted, self._clocks.now()
        self._reached = await self._dialled_back(wanted, observers[:DIAL_BACKS]) if wanted else ()

    async def _dialled_back(self, wanted: tuple[str, ...], observers: list[PeerId]) -> tuple[str, ...]:
        found: Counter[str] = Counter()
        answered = 0

        async def one(peer: PeerId) -> None:
            nonlocal answered
            try:
                answer = await ask(self._host, peer, DialBack(self._run, wanted), Reached)
                answered += 1
                found.update(set(answer.maddrs))
            except Unreachable as error:
                log.debug("no dial-back from %s: %s", short(peer), error)

        async with asyncio.TaskGroup() as group:
            for peer in observers:
                group.create_task(one(peer))
        if not answered:  # they were busy: what was known before still holds
            return tuple(maddr for maddr in wanted if maddr in self._reached)
        return tuple(maddr for maddr in wanted if found[maddr] >= min(2, answered))

    def _evidence(self) -> Evidence:
        return Evidence(
            *(self._listen, dict(self._views), self._reached),
            *(self._punched, len(self._failed), self._relay_only),
        )

    def _judged(self) -> Verdict:
        return judge(self._evidence())
