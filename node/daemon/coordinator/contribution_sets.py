"""The contributions that the ledger knows, and the worker's requests about sets of them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias, TypeVar

import msgspec

from atoll.node.daemon.consensus.types import Correction
from atoll.node.daemon.coordinator.payload_fetcher import PayloadFetcher
from atoll.node.daemon.core.interfaces import BlobSource, RequestOf, RunContext, SlicedSets
from atoll.node.daemon.core.runtime import FaultGuard, WorkerClient
from atoll.p2p.blobs.asking import pause_s
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger import records
from atoll.protocols.ledger.coverage import cover_of, size_of
from atoll.protocols.local.contribution_forms import member_of
from atoll.protocols.local.worker_messages import Counted, ExcisedRound, Member
from atoll.protocols.run.arena import Span

A = TypeVar("A")
Found: TypeAlias = Sequence[tuple[Digest, PeerId, records.Contribution]]
"""Entry id, author and record of contributions."""


@dataclass(slots=True)
class ContributionIndex:
    """The known contributions by entry id, of all rounds whose payloads are not dropped. No I/O."""

    me: PeerId
    fetcher: PayloadFetcher
    _found: dict[Digest, tuple[PeerId, records.Contribution]] = field(default_factory=dict)
    _own_rounds: dict[int, Digest] = field(default_factory=dict)

    def add(self, entry: Digest, author: PeerId, record: records.Contribution) -> None:
        """Add a contribution. The own worker made the own payloads, so they are not verified."""
        self._found[entry] = (author, record)
        if author == self.me:
            self._own_rounds[record.round] = entry
            self.fetcher.trust(record)

    def __contains__(self, entry: Digest) -> bool:
        return entry in self._found

    def forget_author(self, author: PeerId) -> None:
        """Forget the contributions of an author whose payloads are not held: its feed is gone."""
        for entry, (who, record) in list(self._found.items()):
            if who == author and not self.fetcher.is_held(record):
                del self._found[entry]
                self.fetcher.stop(record)

    def is_held(self, entry: Digest) -> bool:
        """Return whether the contribution is known and its payload can be folded now."""
        return entry in self._found and self.fetcher.is_held(self._found[entry][1])

    def is_ours(self, number: int) -> bool:
        """Return whether this node contributed to a round that was not forgotten."""
        return number in self._own_rounds

    def own_rounds(self, above: int) -> tuple[Round, ...]:
        """Return the rounds above this one that this node contributed to, rising."""
        return tuple(Round(number) for number in sorted(self._own_rounds) if number > above)

    def find(self, entries: Iterable[Digest]) -> list[tuple[Digest, PeerId, records.Contribution]]:
        """Return entry id, author and record of the known ones; Reductions and unknown entries are left out."""
        return [(entry, *self._found[entry]) for entry in entries if entry in self._found]

    def authors(self, entries: Iterable[Digest]) -> list[PeerId]:
        """Return the authors of the known ones."""
        return [author for _, author, _ in self.find(entries)]

    def later(self, number: int) -> list[Digest]:
        """Return the entry ids of the known contributions to later rounds."""
        return [entry for entry, (_, record) in self._found.items() if record.round > number]

    def newest_own(self) -> Round | None:
        """Return the newest round with a contribution of this node."""
        return Round(max(self._own_rounds)) if self._own_rounds else None

    def first_author(self, payload: Digest) -> PeerId | None:
        """Return who named this payload first, of the contributions that are known; None if nobody did."""
        return next((author for author, record in self._found.values() if record.payload == payload), None)

    def held_with(self, payload: Digest) -> list[tuple[Round, Digest]]:
        """Return rounds and entry ids of the contributions that can be folded with this payload, rising."""
        naming = [(record.round, entry) for entry, (_, record) in self._found.items() if record.payload == payload]
        return sorted((number, entry) for number, entry in naming if self.is_held(entry))

    def payloads(self) -> set[Digest]:
        """Return all payloads that these contributions name."""
        return {record.payload for _, record in self._found.values()}

    def forget(self, before: Round) -> set[Digest]:
        """Forget the rounds before `before`. Returns their payloads."""
        old = {entry: record for entry, (_, record) in self._found.items() if record.round < before}
        for entry in old:
            del self._found[entry]
        self._own_rounds = {number: entry for number, entry in self._own_rounds.items() if number >= before}
        return {record.payload for record in old.values()}


@dataclass(kw_only=True)
class ContributionSets:
    """Fetches what sets of contributions need, and asks the worker for work on them.

    Sets of whole payloads are handled here; sets of slices by what `slices` finds.
    """

    context: RunContext
    blobs: BlobSource
    index: ContributionIndex
    payloads: PayloadFetcher
    slices: SlicedSets
    worker: WorkerClient
    guard: FaultGuard
    applied: Callable[[], Round]
    """Returns the newest round in the worker's Θ_final."""
    weigh: Callable[[Round, Found], Mapping[Digest, int]]
    """Returns the weight of each contribution of a set."""
    _counted: dict[int, tuple[Counted, ...]] = field(default_factory=dict)
    _asked: dict[int, tuple[Digest, ...]] = field(default_factory=dict)
    """The newest set of each round that the worker was asked about, until the round is final."""

    def is_available(self, number: Round, names: tuple[Digest, ...]) -> bool:
        """Return whether everything that a set needs is on disk."""
        sliced = self.slices.find(number, names)
        return sliced.is_available() if sliced else all(map(self.index.is_held, names))

    def fetch(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Start fetching whatever a set lacks."""
        if sliced := self.slices.find(number, names):
            sliced.fetch()
        else:
            self.fetch_payloads(names)

    def fetch_payloads(self, names: tuple[Digest, ...], until: int = -1) -> None:
        """Start fetching the payloads of these contributions that are not here; see `PayloadFetcher.fetch`."""
        for _, author, record in self.index.find(names):
            self.payloads.fetch(record, author, until)

    def are_correctable(self, corrections: Iterable[Correction], until: Round) -> bool:
        """Return whether all payloads for these corrections are held; if not, get them until round `until`."""
        missing = [one for one in corrections if not all(map(self.index.is_held, one.before))]
        for one in missing:
            self.fetch_payloads(one.before, until)
        return not missing

    def counted(self, number: Round, names: tuple[Digest, ...]) -> tuple[Counted, ...] | None:
        """Return what of this node counts in a final set; None if a Reduction covers what the ledger lacks."""
        if number in self._counted:
            return self._counted[number]
        if sliced := self.slices.find(number, names):
            return sliced.counted()
        mine = [record for _, author, record in self.index.find(names) if author == self.context.me]
        return tuple(Counted(record.payload, self._rows_of(record), number) for record in mine)

    def counted_before(self, first: int, newest: int) -> Iterator[Counted]:
        """What of this node counted in the rounds that were applied once, after `newest` and before `first`."""
        for number in range(newest + 1, first):
            yield from self._counted.get(number, ())

    def set_applied(self, number: Round, names: tuple[Digest, ...]) -> list[PeerId]:
        """Record that the worker's Θ_final holds this set, and return its authors.

        What of it was ours is remembered for good: a snapshot adopted long after needs to know it.
        """
        if (counted := self.counted(number, names)) is not None:
            self._counted[number] = counted
        self.payloads.forget(number)
        self.slices.forget(number)
        return self.index.authors(names)

    def drop(self, before: Round, needed: set[Digest]) -> None:
        """Forget the rounds before `before`, which newer snapshots cover, and delete their payloads.

        A blob in `needed`, or one that a newer record names too, stays: nobody could serve it again.
        """
        old = self.index.forget(before) | self.slices.forget_payloads(before)
        needed = needed | self.index.payloads() | self.slices.payloads(before) | self.context.kept
        for payload in filter(self.blobs.has_blob, old - needed):
            self.guard.delete_blob(payload)

    async def ask(
        self,
        number: Round,
        names: tuple[Digest, ...],
        request_of: RequestOf,
        kind: type[A],
        corrections: tuple[Correction, ...] = (),
    ) -> A:
        """Ask for work on a set; payloads that the disk lost or damaged are fetched again first.

        `corrections`: what the round's state takes out of the rounds before; only with a check or a finalize.

        Where experts are merged, the worker reads the payloads of the other open rounds too. So these are restored
        as well when it did not help to restore the set itself. Raises WorkerDied, or the worker's fault.
        """
        if sliced := self.slices.find(number, names):
            return await sliced.ask(request_of, kind)
        found, life, attempt = self.index.find(names), self.worker.lives, 0
        past = self.index.find(_joined(*(one.before for one in corrections)))
        self._asked = {at: asked for at, asked in self._asked.items() if at > self.applied()}
        self._asked[number] = names
        while True:
            if all(self.blobs.has_blob(record.payload) for _, _, record in (*found, *past)):
                request = request_of(self._members(number, found), ())
                if corrections:
                    request = msgspec.structs.replace(request, excised=tuple(map(self._excised, corrections)))
                try:
                    return await self.worker.ask_until_saved(request, kind)
                except (DecodeError, CorruptFault) as error:
                    self.context.log.event("payload_damaged", error=error.line())
                    await asyncio.sleep(pause_s(attempt) if attempt else 0)
                    attempt += 1
            others = self._asked.values() if attempt > 1 else ()
            for _, author, record in (*self.index.find(_joined(names, *others)), *past):
                await self.payloads.restore(record, author)
            self.worker.check_life(life)

    def _members(self, number: Round, found: Found) -> tuple[Member, ...]:
        weights = self.weigh(number, found)
        return tuple(
            member_of(entry, author, weights[entry], record, self.blobs.blob_path(record.payload))
            for entry, author, record in found
        )

    def _excised(self, one: Correction) -> ExcisedRound:
        members = self._members(one.round, self.index.find(one.before))
        return ExcisedRound(one.round, members, tuple(name for name in one.before if name not in one.after))

    def _rows_of(self, record: records.Contribution) -> tuple[Span, ...]:
        """Return all rows of a payload, as one span."""
        return _whole(size_of(cover_of(self.context.spec, record.round, records.experts_of(record))))


@lru_cache(maxsize=64)
def _whole(chunks: int) -> tuple[Span, ...]:
    # One object for payloads of one size: every own payload that counted is remembered.
    return (Span(0, chunks),)


def _joined(*sets: tuple[Digest, ...]) -> tuple[Digest, ...]:
    """Return each name once, in its first place."""
    return tuple(dict.fromkeys(name for names in sets for name in names))
