"""Contributions that the ledger knows, and work of the worker on sets of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from atoll.node.membership import Known
from atoll.node.needs import Network
from atoll.node.payloads import Payloads
from atoll.node.trainer import WorkerDied
from atoll.protocols import worker as w
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.records import Contribution

if TYPE_CHECKING:
    from atoll.node.driver import Driver

A = TypeVar("A")
AskOf = Callable[[tuple[w.Member, ...], tuple[w.Slice, ...]], w.Ask]
"""An ask for work on whole payloads, or on slices."""


class Sets:
    """All contributions to rounds whose payloads are not dropped."""

    def __init__(self, driver: "Driver", net: Network, payloads: Payloads) -> None:
        self._driver, self._net, self._payloads = driver, net, payloads
        self._contributions: dict[Digest, tuple[PeerId, Contribution]] = {}

    def note(self, entry: Digest, author: PeerId, body: Contribution) -> None:
        """The ledger took a contribution."""
        self._contributions[entry] = (author, body)

    def known(self, names: tuple[Digest, ...]) -> tuple[Known, ...]:
        """The contributions of these entries; entries that the ledger lacks, and Reductions, are left out."""
        found = [(entry, *self._contributions[entry]) for entry in names if entry in self._contributions]
        return tuple(
            Known(entry, author, c.round, c.weight, c.payload, self._payloads.held(c.payload))
            for entry, author, c in found
        )

    def authors(self, names: tuple[Digest, ...]) -> list[PeerId]:
        """Authors of the contributions in a set."""
        return [self._contributions[entry][0] for entry in names if entry in self._contributions]

    def is_here(self, number: Round, names: tuple[Digest, ...]) -> bool:
        """Whether everything that a set needs is on disk."""
        reductions = self._driver.reductions
        if reductions is not None and reductions.is_sliced(number, names):
            return reductions.slices(number, names) is not None
        known = self.known(names)
        return len(known) == len(names) and all(one.held for one in known)

    def want(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Get what is missing of a set."""
        reductions = self._driver.reductions
        if reductions is not None and reductions.is_sliced(number, names):
            reductions.want(number, names)
            return
        for one in self.known(names):
            if not one.held:
                self._driver.want(one.payload, one.author, one.round)

    def counted(self, number: int, names: tuple[Digest, ...]) -> tuple[w.Counted, ...]:
        """What of ours counts in a final set."""
        reductions = self._driver.reductions
        if reductions is not None and reductions.is_sliced(number, names):
            return reductions.counted(number, names)
        rows = (self._driver.rows_of(number),)
        return tuple(w.Counted(one.payload, rows) for one in self.known(names) if one.author == self._driver.me)

    async def ask(self, number: Round, names: tuple[Digest, ...], ask_of: AskOf, kind: type[A]) -> A:
        """Ask for work on a set; payloads that the disk has lost or damaged are fetched again first."""
        reductions = self._driver.reductions
        if reductions is not None and reductions.is_sliced(number, names):
            return await reductions.ask(number, names, ask_of, kind)
        known, life = self.known(names), self._driver.lives
        while True:
            if all(self._net.has_blob(one.payload) for one in known):
                try:
                    return await self._driver.ask_until_saved(ask_of(self._members(known), ()), kind)
                except (DecodeError, CorruptFault) as error:
                    self._driver.log.event("payload_damaged", error=error.line())
            for one in known:
                await self._payloads.mend(one.payload, one.author, one.round)
            if life != self._driver.lives:
                raise WorkerDied("the worker that was asked is gone")

    def drop(self, before: Round) -> None:
        """Forget contributions to rounds before `before`, with their payloads."""
        for entry, (_, body) in list(self._contributions.items()):
            if body.round < before:
                del self._contributions[entry]
                if self._net.has_blob(body.payload):
                    self._driver.delete_blob(body.payload)

    def _members(self, known: tuple[Known, ...]) -> tuple[w.Member, ...]:
        return tuple(
            w.Member(k.entry, k.author, k.weight, k.payload, str(self._net.blob_path(k.payload))) for k in known
        )
