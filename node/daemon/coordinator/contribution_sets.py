"""Sets of contributions and Reductions: whether they are here, getting them, the worker's work on them."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from atoll.node.daemon.consensus.types import EntryPayloadHeld
from atoll.node.daemon.coordinator.contribution_index import Contributions
from atoll.node.daemon.coordinator.interfaces import Network
from atoll.node.daemon.coordinator.payload_fetcher import Named, Payloads, legal_size, pause_s
from atoll.node.daemon.rounds.participants import Known, member_of
from atoll.node.daemon.rounds.types import PayloadHeld
from atoll.node.ipc.worker_process import WorkerDied
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.coverage import cover_of, size_of
from atoll.protocols.local.worker_messages import Ask, Counted, Member, Slice, VerifyReply, VerifyRequest
from atoll.protocols.run.arena import Span

if TYPE_CHECKING:
    from atoll.node.daemon.coordinator.driver import Driver
    from atoll.node.daemon.reduction.coordinator import Reductions

A = TypeVar("A")
AskOf = Callable[[tuple[Member, ...], tuple[Slice, ...]], Ask]
"""An ask for work on whole payloads, or on slices."""


class Sets:
    """Work on whole payloads is done here; on slices by `Reductions`."""

    def __init__(self, driver: "Driver", net: Network) -> None:
        self._driver, self._net = driver, net
        hear = (self._on_settled, driver.blame, driver.disk_trouble)
        self.payloads = Payloads(net, partial(legal_size, driver.spec), self._verify, *hear)
        self.contributions = Contributions(driver.me, self.payloads)
        self._counted: dict[int, tuple[Counted, ...]] = {}
        self._asked: dict[int, tuple[Digest, ...]] = {}
        """The newest set of each round that the worker was asked about, until the round is final."""

    def is_here(self, number: Round, names: tuple[Digest, ...]) -> bool:
        """Whether everything that a set needs is on disk."""
        slices = self._slices(number, names)
        if slices is not None:
            return slices.slices(number, names) is not None
        known = self.contributions.known(names)
        return len(known) == len(names) and all(one.held for one in known)

    def want(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Get what is missing of a set."""
        slices = self._slices(number, names)
        if slices is not None:
            slices.want(number, names)
        else:
            self.want_payloads(names)

    def want_payloads(self, names: tuple[Digest, ...]) -> None:
        """Get the payloads of these contributions that are not here."""
        for author, named in self.contributions.named(names):
            self.payloads.want(self._driver.group, named, author)

    def counted(self, number: int, names: tuple[Digest, ...]) -> tuple[Counted, ...] | None:
        """What of ours counts in a final set. None: a Reduction covers what the ledger lacks."""
        if number in self._counted:
            return self._counted[number]
        slices = self._slices(number, names)
        if slices is not None:
            return slices.counted(number, names)
        mine = (one for one in self.contributions.known(names) if one.author == self._driver.me)
        return tuple(Counted(one.payload, self._all_rows(one), Round(number)) for one in mine)

    def finalized(self, number: Round, names: tuple[Digest, ...]) -> None:
        """The worker holds this final set. For good: which of ours were used may be asked long after."""
        counted = self.counted(number, names)
        if counted is not None:
            self._counted[number] = counted
        self.payloads.forget(number)

    def drop(self, before: Round) -> None:
        """Forget rounds before `before`, with their payloads: newer snapshots cover them.

        What something newer names too stays: nobody could fetch it again.
        """
        driver, old = self._driver, self.contributions.forget(before)
        needed = self.contributions.payloads() | driver.finals.snapshots | set(driver.spec.given)
        if driver.reductions is not None:
            old |= driver.reductions.forget_payloads(before)
            needed |= driver.reductions.payloads(before)
        for payload in old - needed:
            if self._net.has_blob(payload):
                driver.delete_blob(payload)

    async def ask(self, number: Round, names: tuple[Digest, ...], ask_of: AskOf, kind: type[A]) -> A:
        """Ask for work on a set; payloads that the disk has lost or damaged are fetched again first.

        The worker may need those of the other open rounds too, because it takes these again where experts are
        merged: they are looked at when it did not help that the set itself is whole.
        """
        slices = self._slices(number, names)
        if slices is not None:
            return await slices.ask(number, names, ask_of, kind)
        known, life = self.contributions.known(names), self._driver.lives
        attempt = 0
        self._asked = {at: named for at, named in self._asked.items() if at > self._driver.finals.applied}
        self._asked[number] = names
        while True:
            if all(self._net.has_blob(one.payload) for one in known):
                try:
                    return await self._driver.ask_until_saved(ask_of(self._members(known), ()), kind)
                except (DecodeError, CorruptFault) as error:
                    self._driver.log.event("payload_damaged", error=error.line())
                    await asyncio.sleep(pause_s(attempt) if attempt else 0)
                    attempt += 1
            others = self._asked.values() if attempt > 1 else ()
            for author, named in self.contributions.named(_joined(names, *others)):
                await self.payloads.mend(named, author)
            if life != self._driver.lives:
                raise WorkerDied("the worker that was asked is gone")

    def _on_settled(self, named: Named) -> None:
        self._driver.post(lambda: self._tell_settled(named.payload))

    def _tell_settled(self, payload: Digest) -> None:
        """Tell of every record that names a payload, and says of it what it is."""
        driver = self._driver
        for number, entry in self.contributions.held_with(payload):
            driver.feed_round(PayloadHeld(entry, number, driver.now()))
            driver.feed_finality(EntryPayloadHeld(entry))
        if driver.reductions is not None:
            driver.reductions.payload_settled(payload)
        driver.finals.step()

    async def _verify(self, path: Path, named: Named) -> None:
        await self._driver.ask(VerifyRequest(str(path), *named[1:]), VerifyReply)

    def _slices(self, number: int, names: tuple[Digest, ...]) -> "Reductions | None":
        """Who knows a set that is made of slices."""
        reductions = self._driver.reductions
        return reductions if reductions is not None and reductions.is_sliced(number, names) else None

    def _all_rows(self, known: Known) -> tuple[Span, ...]:
        return (Span(0, size_of(cover_of(self._driver.spec, known.round, known.experts))),)

    def _members(self, known: tuple[Known, ...]) -> tuple[Member, ...]:
        return tuple(member_of(one, self._net.blob_path(one.payload)) for one in known)


def _joined(*sets: tuple[Digest, ...]) -> tuple[Digest, ...]:
    """Each name once, in its first place."""
    return tuple(dict.fromkeys(name for names in sets for name in names))
