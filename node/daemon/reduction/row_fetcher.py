"""Getting and giving what slices are made of: rows of contributions.

Rows are held when they are under the root of their contribution. What is wanted is tried again and again until its
round is final.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.node.daemon.coordinator.contribution_index import named
from atoll.node.daemon.coordinator.interfaces import Network
from atoll.node.daemon.coordinator.payload_fetcher import ATTEMPT_S, PARALLEL, Payloads, few_in_turn, pause_s
from atoll.node.daemon.reduction.ledger_view import ReducedSets
from atoll.node.daemon.reduction.row_store import RowStore
from atoll.p2p.system.atomic_files import disk
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, DiskFault, Unreachable
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.reduction import Offer, RowsAnswer, RowsAsk, rows_max_bytes
from atoll.protocols.ledger.rows import RowTree, checked_rows
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout

log = logging.getLogger(__name__)

Heard = Callable[[], None]
"""What to do when something wanted is here."""


class SliceSources:
    """Owns the rows on disk and all downloads of rows."""

    def __init__(
        self,
        net: Network,
        sets: ReducedSets,
        payloads: Payloads,
        folder: Path,
        blame: Callable[[PeerId, AtollError], None],
        on_disk: Callable[[DiskFault], None],
    ) -> None:
        """`payloads`: whole ones that are held; rows are cut out of them. `folder`: for rows."""
        self._net, self._sets, self._payloads = net, sets, payloads
        self._blame, self._on_disk = blame, on_disk
        self.shelf = RowStore(folder)
        self._wanted: dict[tuple[Digest, Span], int] = {}
        self._tree: tuple[Digest, RowTree] | None = None
        self._slots = asyncio.Semaphore(PARALLEL)

    def has_rows(self, offer: Offer, span: Span) -> bool:
        """Whether rows of a contribution are on disk, cut out or within a whole payload that is here."""
        if self.shelf.has(offer.entry, span):
            return True
        try:
            rows = self._cut(offer, span)
            if rows is not None:
                self.shelf.put(offer.entry, span, rows)
        except DiskFault as error:
            self._on_disk(error)
            return False
        return rows is not None

    def want_rows(self, group: asyncio.TaskGroup, number: int, offer: Offer, span: Span, heard: Heard) -> None:
        """Get rows until they are here. `heard` is called once, perhaps at once; not while another want waits."""
        if self.has_rows(offer, span):
            heard()
        elif (offer.entry, span) not in self._wanted:
            self._wanted[offer.entry, span] = number
            group.create_task(self._get(offer, span, heard), name=f"rows {number}")

    def forget(self, final: int) -> None:
        """Stop getting what belongs to rounds up to `final`."""
        self._wanted = {key: number for key, number in self._wanted.items() if number > final}

    def damaged(self, offer: Offer, span: Span) -> None:
        """The rows on disk cannot be read: get them again when they are wanted."""
        self.shelf.drop(offer.entry, span)

    def rows_for(self, ask: RowsAsk) -> bytes:
        """The answer to a question for rows; empty where they are not here. Raises DecodeError.

        Nothing is written: who asks may name any span.
        """
        start, stop = ask.span
        if not 0 <= start < stop <= self._sets.rules.chunks:
            raise DecodeError("rows: a span outside the arena")
        offer = next((o for o in self._known(ask.contribution)), None)
        try:
            return b"" if offer is None else self._rows_now(offer, ask.span)
        except DiskFault as error:
            self._on_disk(error)
            return b""

    def _known(self, entry: Digest) -> Iterator[Offer]:
        if entry in self._sets.entries and entry not in self._sets.claims:
            number = self._sets.contribution(entry).round
            yield from (offer for offer in self._sets.offers(number) if offer.entry == entry)

    def _rows_now(self, offer: Offer, span: Span) -> bytes:
        """Encoded rows, empty where they are not here. Raises DiskFault."""
        if not self.shelf.has(offer.entry, span):
            return self._cut(offer, span) or b""
        path = self.shelf.path(offer.entry, span)
        with disk(path):
            return path.read_bytes()

    def _cut(self, offer: Offer, span: Span) -> bytes | None:
        """Rows cut out of a payload that is here as a whole; None where it is not. Raises DiskFault."""
        body = self._sets.contribution(offer.entry)
        if not self._payloads.held(named(body)):
            return None
        try:
            tree = self._tree_of(body.payload)
            if tree.root != body.rows:
                raise DecodeError("rows: not those of the payload")
            return codec.encode(RowsAnswer(*tree.part(span)))
        except DecodeError as error:
            log.debug("payload of %s: %s", offer.author, error)
            return None

    def _tree_of(self, payload: Digest) -> RowTree:
        """One is kept: all reducers ask for their parts of the same payload at the same time."""
        if self._tree is None or self._tree[0] != payload:
            path, rules = self._net.blob_path(payload), self._sets.rules
            with disk(path):
                data = path.read_bytes()
            self._tree = (payload, RowTree(data, Layout("sparse2", rules.chunks, rules.k)))
        return self._tree[1]

    async def _get(self, offer: Offer, span: Span, heard: Heard) -> None:
        """Attempts until one is done. What was forgotten meanwhile is nobody's news."""
        tries, key = 0, (offer.entry, span)
        while key in self._wanted:
            try:
                async with self._slots, asyncio.timeout(ATTEMPT_S):
                    done = await self._rows(offer, span, tries)
            except DiskFault as error:
                self._on_disk(error)
            except (AtollError, TimeoutError) as error:
                log.debug("rows of %s: %s", offer.author, error)
            else:
                if done and self._wanted.pop(key, None) is not None:
                    heard()
                if done:
                    return
            tries += 1
            await asyncio.sleep(pause_s(tries))

    async def _rows(self, offer: Offer, span: Span, attempt: int) -> bool:
        rules, root = self._sets.rules, self._sets.contribution(offer.entry).rows
        cap = rows_max_bytes(span, rules.chunks, rules.k)
        for peer in self._whom(offer.author, attempt):
            try:
                data = await self._net.ask_peer(peer, codec.encode(RowsAsk(offer.entry, span)), cap)
                if not data:
                    continue
                answer = codec.decode(data, RowsAnswer, max_bytes=cap)
                checked_rows(root, rules.chunks, rules.k, span, answer.rows, answer.path)
            except DecodeError as error:
                self._blame(peer, error)
                continue
            except Unreachable as error:
                log.debug("rows of %s: %s", offer.author, error)
                continue
            self.shelf.put(offer.entry, span, data)
            return True
        return False

    def _whom(self, author: PeerId, attempt: int) -> list[PeerId]:
        """The author first; on a further try some of the others, in turn."""
        others = [peer for peer in self._net.neighbours() if peer != author]
        return [author, *(few_in_turn(others, attempt) if attempt else ())]
