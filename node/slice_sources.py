"""Getting and giving what slices are made of: rows of contributions, payloads of Reductions.

Rows are held when they are under the root of their contribution, a reduced payload when its rows are under the
root of its Reduction and the worker decoded it. What is wanted is tried again and again until its round is final.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from atoll.node.needs import Network
from atoll.node.payloads import ATTEMPT_S, FEW, PARALLEL, pause_s
from atoll.node.reduced_sets import ReducedSets
from atoll.node.shelf import Shelf
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, DiskFault, Unreachable
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.payload import Layout, payload_bytes
from atoll.protocols.reduction import Claim, Offer, RowsAnswer, RowsAsk, rows_max_bytes
from atoll.protocols.rows import RowTree, checked_rows
from atoll.protocols.spans import Span

log = logging.getLogger(__name__)

Heard = Callable[[], None]
"""What to do when something wanted is here."""


class SliceSources:
    """Owns the rows on disk and all downloads of rows and reduced payloads."""

    def __init__(
        self,
        net: Network,
        sets: ReducedSets,
        folder: Path,
        verify: Callable[[Path, Claim], Awaitable[None]],
        blame: Callable[[PeerId, AtollError], None],
        on_disk: Callable[[DiskFault], None],
    ) -> None:
        """`verify`: raises DecodeError unless the file is a legal payload of the Reduction."""
        self._net, self._sets, self._verify = net, sets, verify
        self._blame, self._on_disk = blame, on_disk
        self.shelf = Shelf(folder)
        self.void: set[Digest] = set()
        """Reductions whose payload is illegal."""
        self._verified: set[Digest] = set()
        self._wanted: dict[tuple[Digest, Span], int] = {}
        self._tree: tuple[Digest, RowTree] | None = None
        self._slots = asyncio.Semaphore(PARALLEL)

    def has_rows(self, offer: Offer, span: Span) -> bool:
        """Whether rows of a contribution are on disk, cut out or within a whole payload that is here."""
        return self.shelf.has(offer.entry, span) or self._cut(offer, span)

    def has_payload(self, claim: Claim) -> bool:
        """Whether the payload of a Reduction is on disk and legal."""
        return claim.entry in self._verified and self._net.has_blob(claim.body.payload)

    def want_rows(self, group: asyncio.TaskGroup, number: int, offer: Offer, span: Span, heard: Heard) -> None:
        """Get rows until they are here. `heard` is called once, perhaps at once; not while another want waits."""
        if self.has_rows(offer, span):
            heard()
        elif (offer.entry, span) not in self._wanted:
            self._wanted[offer.entry, span] = number
            group.create_task(self._get((offer.entry, span), lambda at: self._rows(offer, span, at), heard))

    def want_payload(self, group: asyncio.TaskGroup, claim: Claim, heard: Heard) -> None:
        """Get the payload of a Reduction until it is here, or found void; as `want_rows`."""
        key = (claim.entry, claim.body.span)
        if self.has_payload(claim):
            heard()
        elif key not in self._wanted and claim.entry not in self.void:
            self._wanted[key] = claim.body.round
            group.create_task(self._get(key, lambda at: self._payload(claim, at), heard))

    def forget(self, final: int) -> None:
        """Stop getting what belongs to rounds up to `final`."""
        self._wanted = {key: number for key, number in self._wanted.items() if number > final}

    def damaged(self, offer: Offer, span: Span) -> None:
        """The rows on disk cannot be read: get them again when they are wanted."""
        self.shelf.drop(offer.entry, span)

    def rows_for(self, ask: RowsAsk) -> bytes:
        """The answer to a question for rows; empty where they are not here. Raises DecodeError."""
        start, stop = ask.span
        if not 0 <= start < stop <= self._sets.rules.chunks:
            raise DecodeError("rows: a span outside the arena")
        offer = next((o for o in self._known(ask.contribution)), None)
        if offer is None or not self.has_rows(offer, ask.span):
            return b""
        return self.shelf.path(ask.contribution, ask.span).read_bytes()

    def _known(self, entry: Digest) -> Iterator[Offer]:
        if entry in self._sets.entries and entry not in self._sets.claims:
            number = self._sets.contribution(entry).round
            yield from (offer for offer in self._sets.offers(number) if offer.entry == entry)

    def _cut(self, offer: Offer, span: Span) -> bool:
        """Cut rows out of a payload that is here as a whole; whether it is."""
        body, rules = self._sets.contribution(offer.entry), self._sets.rules
        if not self._net.has_blob(body.payload):
            return False
        try:
            if self._tree is None or self._tree[0] != body.payload:
                data = self._net.blob_path(body.payload).read_bytes()
                self._tree = (body.payload, RowTree(data, Layout("sparse2", rules.chunks, rules.k)))
            if self._tree[1].root != body.rows:
                raise DecodeError("rows: not those of the payload")
            self.shelf.put(offer.entry, span, codec.encode(RowsAnswer(*self._tree[1].part(span))))
        except DecodeError as error:
            log.debug("payload of %s: %s", offer.author, error)
            return False
        except DiskFault as error:
            self._on_disk(error)
            return False
        return True

    async def _get(
        self, key: tuple[Digest, Span], attempt: Callable[[int], Awaitable[bool]], heard: Heard
    ) -> None:
        """Attempts until one is done. What was forgotten meanwhile is nobody's news."""
        tries = 0
        while key in self._wanted:
            try:
                async with self._slots, asyncio.timeout(ATTEMPT_S):
                    done = await attempt(tries)
            except DiskFault as error:
                self._on_disk(error)
            except (AtollError, TimeoutError) as error:
                log.debug("slice %s: %s", key[1], error)
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

    async def _payload(self, claim: Claim, attempt: int) -> bool:
        body, k = claim.body, self._sets.rules.reduced_k
        size = payload_bytes("sparse2", body.span.chunks, k)
        if not self._net.has_blob(body.payload):
            await self._net.fetch_blob(body.payload, self._whom(claim.author, attempt), size)
        path = self._net.blob_path(body.payload)
        try:
            if RowTree(path.read_bytes(), Layout("sparse2", body.span.chunks, k)).root != body.rows:
                raise DecodeError("the payload of a Reduction has another root than the record says")
            await self._verify(path, claim)
        except DecodeError as error:
            self.void.add(claim.entry)
            self._blame(claim.author, error)
            return True
        self._verified.add(claim.entry)
        return True

    def _whom(self, author: PeerId, attempt: int) -> list[PeerId]:
        """The author first; on a further try some of the others, in turn."""
        others = [peer for peer in self._net.neighbours() if peer != author]
        first = FEW * attempt % max(1, len(others))
        return [author, *(others[first:] + others[:first])[: FEW if attempt else 0]]
