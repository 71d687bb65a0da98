"""Gets and serves the rows that slices are made of.

Rows are held when they are under the root that their contribution names. Wanted rows are tried again and again
until their round is final.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.node.daemon.coordinator.payload_fetcher import ATTEMPT_S, PARALLEL, PayloadFetcher
from atoll.node.daemon.core.interfaces import Network
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.p2p.blobs.asking import few_in_turn, pause_s
from atoll.p2p.system.atomic_files import disk, make_folder, write_whole
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, DiskFault, Unreachable
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.reduction import Offer, RowsAnswer, RowsAsk, rows_max_bytes
from atoll.protocols.ledger.rows import RowTree, checked_rows
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout

log = logging.getLogger(__name__)
_SUFFIX = ".rows"


class RowStore:
    """Rows of other members' payloads on disk, by entry id and span. Every method may raise DiskFault.

    Each file holds an encoded RowsAnswer, as it came and as it is served.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create `folder`; files with other names are left alone."""
        self._folder = make_folder(folder)
        self._known: set[tuple[Digest, Span]] = set()
        with disk(folder):
            names = [path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")]
        self._known.update(found for name in names if (found := _read_name(name)) is not None)

    def has(self, entry: Digest, span: Span) -> bool:
        """Return whether these rows are on disk."""
        return (entry, span) in self._known

    def path(self, entry: Digest, span: Span) -> Path:
        """Return the path of these rows, on disk or not."""
        return self._folder / f"{entry.hex()}-{span.start}-{span.stop}{_SUFFIX}"

    def put(self, entry: Digest, span: Span, answer: bytes) -> None:
        """Store rows that were verified."""
        # The file first: a name that is known is a promise to serve these rows, also after a power loss.
        write_whole(self.path(entry, span), answer)
        self._known.add((entry, span))

    def drop(self, entry: Digest, span: Span) -> None:
        """Delete rows that are damaged or not needed."""
        # The name first: a file that cannot be deleted is then only lost space, never served again.
        self._known.discard((entry, span))
        path = self.path(entry, span)
        with disk(path):
            path.unlink(missing_ok=True)

    def keep_only(self, entries: Collection[Digest]) -> None:
        """Delete the rows of all other contributions."""
        for entry, span in [one for one in self._known if one[0] not in entries]:
            self.drop(entry, span)


def _read_name(name: str) -> tuple[Digest, Span] | None:
    try:
        entry, start, stop = name.split("-")
        return Digest(bytes.fromhex(entry)), Span(int(start), int(stop))
    except ValueError:
        return None


@dataclass(kw_only=True)
class RowFetcher:
    """Owns the rows on disk and all downloads of rows."""

    net: Network
    ledger: ReductionLedger
    payloads: PayloadFetcher
    """Knows the whole payloads that are held; rows are cut out of them."""
    store: RowStore
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    on_fault: Callable[[PeerId, AtollError], None]
    on_disk_fault: Callable[[DiskFault], None]
    _wanted: dict[tuple[Digest, Span], int] = field(default_factory=dict)
    _tree: tuple[Digest, RowTree] | None = None
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))

    def has(self, offer: Offer, span: Span) -> bool:
        """Return whether rows of a contribution are on disk, cut out or within a whole payload."""
        if self.store.has(offer.entry, span):
            return True
        try:
            # A whole payload that is held needs no download: its rows are cut out once and kept by their name.
            rows = self._cut(offer, span)
            if rows is not None:
                self.store.put(offer.entry, span, rows)
        except DiskFault as error:
            self.on_disk_fault(error)
            return False
        return rows is not None

    def fetch(self, number: int, offer: Offer, span: Span, on_held: Callable[[], None]) -> None:
        """Get rows until they are here. `on_held` is called once, perhaps now; not while another fetch waits."""
        if self.has(offer, span):
            on_held()
        elif (offer.entry, span) not in self._wanted:
            self._wanted[offer.entry, span] = number
            self.start_task(self._fetch_until_held(offer, span, on_held), f"rows {number}")

    def forget(self, final: int) -> None:
        """Stop getting rows of rounds up to `final`."""
        self._wanted = {key: number for key, number in self._wanted.items() if number > final}

    def answer(self, ask: RowsAsk) -> bytes:
        """Return the answer to a question for rows; empty if they are not here. Raises DecodeError.

        Nothing is written to the disk: a peer may name any span.
        """
        start, stop = ask.span
        if not 0 <= start < stop <= self.ledger.rules.chunks:
            raise DecodeError("rows: a span outside the arena")
        offer = next((o for o in self._known(ask.contribution)), None)
        try:
            return b"" if offer is None else self._rows_now(offer, ask.span)
        except DiskFault as error:
            self.on_disk_fault(error)
            return b""

    def _known(self, entry: Digest) -> Iterator[Offer]:
        if entry in self.ledger.entries and entry not in self.ledger.claims:
            number = self.ledger.contribution(entry).round
            yield from (offer for offer in self.ledger.offers(number) if offer.entry == entry)

    def _rows_now(self, offer: Offer, span: Span) -> bytes:
        """Return encoded rows; empty if they are not here. Raises DiskFault."""
        if not self.store.has(offer.entry, span):
            return self._cut(offer, span) or b""
        path = self.store.path(offer.entry, span)
        with disk(path):
            return path.read_bytes()

    def _cut(self, offer: Offer, span: Span) -> bytes | None:
        """Return rows cut out of a whole payload; None if it is not here. Raises DiskFault."""
        # Only a payload that was verified: rows of another one would be refused, and their sender blamed.
        record = self.ledger.contribution(offer.entry)
        if not self.payloads.is_held(record):
            return None
        try:
            tree = self._tree_of(record.payload)
            if tree.root != record.rows:
                raise DecodeError("rows: not those of the payload")
            return codec.encode(RowsAnswer(*tree.part(span)))
        except DecodeError as error:
            log.debug("payload of %s: %s", offer.author, error)
            return None

    def _tree_of(self, payload: Digest) -> RowTree:
        # The newest tree is kept: all reducers ask for their parts of the same payload at the same time.
        if self._tree is None or self._tree[0] != payload:
            path, rules = self.net.blob_path(payload), self.ledger.rules
            with disk(path):
                data = path.read_bytes()
            self._tree = (payload, RowTree(data, Layout("sparse2", rules.chunks, rules.k)))
        return self._tree[1]

    async def _fetch_until_held(self, offer: Offer, span: Span, on_held: Callable[[], None]) -> None:
        """Try until the rows are here, or were forgotten; forgotten rows are not reported."""
        attempt, key = 0, (offer.entry, span)
        while key in self._wanted:
            try:
                async with self._slots, asyncio.timeout(ATTEMPT_S):
                    is_done = await self._attempt(offer, span, attempt)
            except DiskFault as error:
                self.on_disk_fault(error)
            except (AtollError, TimeoutError) as error:
                log.debug("rows of %s: %s", offer.author, error)
            else:
                # The round may have become final during the download: then nobody wants to hear of the rows.
                if is_done and self._wanted.pop(key, None) is not None:
                    on_held()
                if is_done:
                    return
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _attempt(self, offer: Offer, span: Span, attempt: int) -> bool:
        rules, root = self.ledger.rules, self.ledger.contribution(offer.entry).rows
        cap = rows_max_bytes(span, rules.chunks, rules.k)
        for peer in self._holders(offer.author, attempt):
            try:
                data = await self.net.ask_peer(peer, codec.encode(RowsAsk(offer.entry, span)), cap)
                if not data:  # no fault: the peer may have forgotten the round
                    continue
                answer = codec.decode(data, RowsAnswer, max_bytes=cap)
                checked_rows(root, rules.chunks, rules.k, span, answer.rows, answer.path)
            except DecodeError as error:
                self.on_fault(peer, error)
                continue
            except Unreachable as error:
                log.debug("rows of %s: %s", offer.author, error)
                continue
            self.store.put(offer.entry, span, data)
            return True
        return False

    def _holders(self, author: PeerId, attempt: int) -> list[PeerId]:
        # The author surely has the rows. Another peer has them only if it needed them, or the whole payload.
        others = [peer for peer in self.net.neighbours() if peer != author]
        return [author, *(few_in_turn(others, attempt) if attempt else ())]
