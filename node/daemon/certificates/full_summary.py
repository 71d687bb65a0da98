"""The summary that the voters of a run certify: enough to begin with, without any record of the rounds before.

Beside what `summary.py` holds it names where each feed goes on. An author's newest contribution that counts is the
floor of its feed. The entry's id fixes the whole feed below it, so what is said about these records is the same on
all nodes: which of them outlive a cut. The records themselves are signed, and are fetched by their ids.

An author that is proven to have signed two histories has no floor: nodes hold different ones, and nobody adds to
either. What later rounds need of it is fetched by name, as where a feed holds the other history.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.certificates.summary import (
    AUDITED_VERSION,
    MAX_BYTES,
    VERSION,
    AuditedSummary,
    Summary,
    is_audited,
    summarize,
)
from atoll.node.daemon.consensus.types import FinalityState
from atoll.p2p.ledger.history import Below
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId


class Floor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a feed goes on."""

    author: PeerId
    entry: Digest
    """Its newest contribution, by its place in the feed, that a final set names."""
    records: tuple[Digest, ...]
    """Entries before that one that outlive a cut, in the order of the feed."""


class FullSummary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that stands for the rounds up to `summary.round`. Lists are sorted: equal chains have equal bytes."""

    version: int
    summary: Summary
    floors: tuple[Floor, ...]
    """Of each author of a final set but those with two histories. No cut touches the feeds of others."""
    reducers: ReducerHistory

    @property
    def places(self) -> dict[PeerId, Digest]:
        """The floors by author."""
        return {floor.author: floor.entry for floor in self.floors}

    @property
    def blob(self) -> Digest:
        """The blob id of its bytes: what proposals name."""
        return manifest_of_bytes(encode_full(self)).id


class AuditedFullSummary(FullSummary, frozen=True, array_like=True, forbid_unknown_fields=True):
    """That of a run whose voters must have shown work."""

    summary: AuditedSummary


def encode_full(full: FullSummary) -> bytes:
    """Canonical bytes."""
    return codec.encode(full)


def decode_full(data: bytes) -> FullSummary:
    """The summary in these bytes. Raises DecodeError, or LocalFault for another version."""
    full = codec.decode(data, AuditedFullSummary if is_audited(data) else FullSummary, max_bytes=MAX_BYTES)
    if full.summary.version != full.version:
        raise DecodeError("a summary of two versions")
    return full


class Feeds(Protocol):
    """The ledger's feeds, as a summary reads them (`RecordHistory`)."""

    def place_of(self, entry: Digest) -> int | None: ...

    def below(self, author: PeerId, first: int, end: int, last: int, forks: tuple[int, ...]) -> list[Below]: ...


@dataclass(slots=True)
class SummaryMaker:
    """Follows the final sets of this node's chain, to summarize them at any round."""

    feeds: Feeds
    _counted: dict[PeerId, list[Digest]] = field(default_factory=dict)
    """Contributions of each author that count since the newest summary; first the floor of that."""
    _below: dict[PeerId, tuple[int, list[Below]]] = field(default_factory=dict)
    """The place of each floor of the newest summary, and the records below it that stay."""

    def resume(self, full: FullSummary) -> None:
        """Go on after a summary, as if the sets before had been counted here."""
        self._counted = {author: [entry] for author, entry in full.places.items()}

    def on_counted(self, named: Iterable[tuple[PeerId, Digest]]) -> None:
        """A final set names these contributions."""
        for author, entry in named:
            self._counted.setdefault(author, []).append(entry)

    def make(
        self, state: FinalityState, reducers: ReducerHistory, proven: Collection[PeerId] = ()
    ) -> FullSummary | None:
        """The summary of all final rounds; None where the feeds here are not those that the final sets name.

        `proven`: authors whose two histories are proven here. The summary is None only where a set names the
        history of an author that is not here, and the proof has not come: it spreads in seconds, so nodes differ
        in one summary for each such author at most.
        """
        for author in proven:
            self._counted.pop(author, None)
        summary = summarize(state)
        if summary is None:
            return None
        found = {author: self._floor(author, summary) for author in sorted(self._counted)}
        floors = tuple(floor for floor in found.values() if floor is not None)
        if len(floors) < len(found):
            return None
        if isinstance(summary, AuditedSummary):
            return _bounded(AuditedFullSummary(AUDITED_VERSION, summary, floors, reducers))
        return _bounded(FullSummary(VERSION, summary, floors, reducers))

    def _floor(self, author: PeerId, summary: Summary) -> Floor | None:
        # By place, not by round: who wrote contributions in another order must not lower its floor again, below
        # records that others have deleted.
        places: Mapping[Digest, int | None] = {
            entry: self.feeds.place_of(entry) for entry in self._counted[author]
        }
        if None in places.values():
            return None
        entry = max(places, key=lambda name: places[name] or 0)
        place, last, forks = places[entry] or 0, summary.round, summary.forks
        first, before = self._below.get(author, (0, []))
        kept = [record for record in before if record.stays(last, forks)]
        kept += self.feeds.below(author, first, place, last, forks)
        self._counted[author], self._below[author] = [entry], (place, kept)
        return Floor(author, entry, tuple(record.id for record in kept))


def _bounded(full: FullSummary) -> FullSummary | None:
    """The summary, or None where it is larger than any node reads: then its round is final without one."""
    return full if len(encode_full(full)) <= MAX_BYTES else None
