"""Brings a certified summary to a newcomer: links, the summary in parts, and the records that it names.

A *link* is a proposal that names a summary, with votes for it. Three calls bring all of it: `history.link` the
links of a peer's chain one by one, `history.part` a summary, `history.records` entries by id. Nothing of it is
believed here: entries are signed, a summary must have the blob id that was asked for, and what links prove is
checked by node/daemon/certificates/links.py.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.p2p.ledger.history import Link, SignedEntry
from atoll.p2p.ledger.store import Ledger
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, Entry, decode_entry, encode_entry

LINK, PART, RECORDS = "history.link", "history.part", "history.records"
MAX_LINKS = 256
"""Most links of a chain that a newcomer follows."""
SUMMARY_MAX_BYTES = 1 << 24
"""Largest summary, in bytes."""
PART_BYTES = 256 * 1024
MAX_NAMES = 256
LINK_BYTES = 1 << 20
"""Largest link, in bytes: a proposal names MAX_SET entries at most, and a vote has some 350 bytes."""
ANSWER_BYTES = PART_BYTES + ENTRY_MAX_BYTES
OnAnswer: TypeAlias = Callable[[int], None]
"""Receives the size of each answer in bytes."""


def _ignore(size_bytes: int) -> None:
    """Nobody measures it."""


class LinkQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for one link of the chain that leads to the newest summary of a ledger that was cut."""

    number: Annotated[int, Meta(ge=0, lt=MAX_LINKS)]


class LinkAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The link; none after the last."""

    link: Annotated[tuple[Link, ...], Meta(max_length=1)] = ()


class PartQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for PART_BYTES of a summary of the chain, by its blob id."""

    summary: Digest
    part: Annotated[int, Meta(ge=0, lt=SUMMARY_MAX_BYTES // PART_BYTES)]


class PartAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The bytes; a shorter part is the last."""

    data: Annotated[bytes, Meta(max_length=PART_BYTES)] = b""


class RecordsQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for entries by id."""

    names: Annotated[tuple[Digest, ...], Meta(max_length=MAX_NAMES)]


class RecordsAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Those that are here, as many as fit, in the order that was asked for."""

    entries: Annotated[tuple[SignedEntry, ...], Meta(max_length=MAX_NAMES)]


@dataclass(frozen=True, slots=True)
class SummaryExchange:
    """Asks peers for a chain of links and what it leads to, and answers others. The caller owns all deadlines."""

    ledger: Ledger
    calls: Calls

    def register(self) -> None:
        """Answer others from now on."""
        self.calls.register(LINK, LinkQuery, LinkAnswer, self._answer_link, max_bytes=LINK_BYTES)
        self.calls.register(PART, PartQuery, PartAnswer, self._answer_part, max_bytes=ANSWER_BYTES)
        self.calls.register(RECORDS, RecordsQuery, RecordsAnswer, self._answer_records, max_bytes=ANSWER_BYTES)

    async def link(self, peer: PeerId, number: int, on_answer: OnAnswer = _ignore) -> Link | None:
        """The peer's link of this number; None after the last. Raises what `Calls.call` raises."""
        found = await self.calls.call(peer, LINK, LinkQuery(number), LinkAnswer, max_bytes=LINK_BYTES)
        for link in found.link:
            on_answer(sum(map(len, (link.proposal, *link.votes))))
        return found.link[0] if found.link else None

    async def summary(self, peer: PeerId, name: Digest, on_answer: OnAnswer = _ignore) -> bytes:
        """The summary with this blob id. Raises DecodeError for other bytes, and what `Calls.call` raises."""
        data = bytearray()
        for part in range(SUMMARY_MAX_BYTES // PART_BYTES):
            found = await self.calls.call(peer, PART, PartQuery(name, part), PartAnswer, max_bytes=ANSWER_BYTES)
            on_answer(len(found.data))
            data += found.data
            if len(found.data) < PART_BYTES:
                break
        if manifest_of_bytes(bytes(data)).id != name:
            raise DecodeError("not the summary that was asked for")
        return bytes(data)

    async def records(
        self,
        peer: PeerId,
        names: Collection[Digest],
        found: dict[Digest, Entry],
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Add to `found` the verified entries by id that the peer has.

        A peer that has not all brings what it has of the next 256, and is asked no more: so it cannot hold this
        node up with one record after the other. Raises DecodeError, and what `Calls.call` raises.
        """
        while wanted := tuple(name for name in names if name not in found)[:MAX_NAMES]:
            query = RecordsQuery(wanted)
            answer = await self.calls.call(peer, RECORDS, query, RecordsAnswer, max_bytes=ANSWER_BYTES)
            on_answer()
            entries = {entry.id: entry for entry in (decode_entry(e, self.ledger.run) for e in answer.entries)}
            if not entries.keys() <= set(wanted):
                raise DecodeError("records: other entries than were asked for")
            found |= entries
            is_full = sum(map(len, answer.entries)) > PART_BYTES - ENTRY_MAX_BYTES
            if len(entries) < len(wanted) and not is_full:
                break

    async def _answer_link(self, peer: PeerId, query: LinkQuery) -> LinkAnswer:
        links = self.ledger.history.links
        return LinkAnswer((links[query.number].link,) if query.number < len(links) else ())

    async def _answer_part(self, peer: PeerId, query: PartQuery) -> PartAnswer:
        found = next((one for one in self.ledger.history.links if one.name == query.summary), None)
        first = query.part * PART_BYTES
        return PartAnswer(found.summary[first : first + PART_BYTES] if found is not None else b"")

    async def _answer_records(self, peer: PeerId, query: RecordsQuery) -> RecordsAnswer:
        data: list[bytes] = []
        for entry in map(self.ledger.get, query.names):
            encoded = encode_entry(entry) if entry is not None else b""
            if sum(map(len, data)) + len(encoded) > PART_BYTES and data:
                break
            data += [encoded] if encoded else []
        return RecordsAnswer(tuple(data))
