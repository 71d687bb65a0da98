"""One simulated member: its ledger, what it holds and serves, and the machine that says what to get."""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from atoll.node.daemon.reduction import machine as rounds
from atoll.node.learning.reduction.judging import proves_fault
from atoll.node.learning.reduction.reducer import Made, Reducer
from atoll.node.learning.reduction.reducing import ReducerErrorFeedback
from atoll.node.worker.folding.reduction_work import ARITHMETIC
from atoll.p2p.gossip.gossip import Gossip
from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.rpc import frames
from atoll.p2p.rpc.calls import Calls
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.records import (
    ENTRY_MAX_BYTES,
    Body,
    Entry,
    Reduction,
    ReductionFault,
    SlicedContribution,
    decode_entry,
    encode_entry,
    sign_entry,
)
from atoll.protocols.ledger.reduction import (
    ASK_MAX_BYTES,
    PROOF_VERSION,
    Ask,
    Claim,
    FaultProof,
    Offer,
    Opening,
    OpeningAsk,
    ReductionRules,
    RowsAnswer,
    RowsAsk,
    cover,
    covered_by,
    decode_ask,
    decode_proof,
    opening_max_bytes,
    proof_max_bytes,
    rows_max_bytes,
)
from atoll.protocols.ledger.rows import RowPart, RowTree, checked_rows
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.slices import SlicePlan
from atoll.protocols.wires import REDUCTION

T = TypeVar("T")

ASKS = REDUCTION.protocol()
BLOBS = "/atoll/trial-blobs/1"
ANSWER_S = 120.0

Behaviour = Literal["honest", "missing", "lying"]


def sampled_chunks(seed: bytes, span: Span, count: int) -> list[int]:
    """Chunks to open, rising. `seed` must be unknown to the reducer until its Reduction was published."""
    return sorted(random.Random(seed).sample(range(span.start, span.stop), min(count, span.chunks)))


class BlobAsk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The bytes of a blob; stands for the blob wire."""

    blob: Digest


class CountedCalls(Calls):
    """Calls that count the bytes of their notices: records, ids of records and requests for them."""

    notice_bytes = 0

    def notify(self, peer: PeerId, method: str, message: Any) -> None:
        """See Calls.notify."""
        self.notice_bytes += 4 + len(frames.notice(method, codec.encode(message)))
        super().notify(peer, method, message)


class World(Protocol):
    """What a member needs of the swarm around it."""

    rules: ReductionRules

    def neighbours(self, peer: PeerId) -> list[PeerId]:
        """Living peers that this one gossips with, in a fixed order."""

    def spawn(self, work: Awaitable[None]) -> None:
        """Run beside the rest."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives for this key: what one member checked need not be checked again by 63 others."""

    def take_back(self, peer: PeerId, rest: ReducerErrorFeedback) -> None:
        """Hand what a reducer keeps no longer to the member's own error feedback."""

    def kill(self, peer: PeerId) -> None:
        """The member is gone."""


class TrialPeer:
    """A member over many rounds."""

    def __init__(self, identity: Identity, host: Host, world: World, behaviour: Behaviour) -> None:
        self.me, self.behaviour = identity.peer_id, behaviour
        self._identity, self._host, self._world = identity, host, world
        self.reducer = Reducer(world.rules, ARITHMETIC)
        self.entries: dict[Digest, Entry] = {}
        self.rows: dict[tuple[Digest, Span], RowPart] = {}
        self.payloads: dict[Digest, bytes] = {}
        """Of Reductions, by entry id."""
        self.openings = self.faults = 0
        self.fold: rounds.FoldSlices | None = None
        self.state: rounds.State | None = None
        self._tree: RowTree | None = None
        self._blobs: dict[Digest, bytes] = {}
        self._seq, self._last = 0, b""
        self._streams: dict[tuple[PeerId, str], Stream] = {}
        self._turns: dict[tuple[PeerId, str], asyncio.Lock] = {}
        host.set_handler(ASKS, self._serve_asks)
        host.set_handler(BLOBS, self._serve_blobs)
        self.calls = CountedCalls(host, world.rules.run)
        luck = random.Random(identity.peer_id)
        near = functools.partial(world.neighbours, self.me)
        self.gossip = Gossip(self.me, self.calls, near, asyncio.get_running_loop().time, luck)
        self.gossip.subscribe("entry", self._take_record, max_bytes=ENTRY_MAX_BYTES)

    def begin(self, number: Round, plan: SlicePlan) -> None:
        """A round starts. Entries of earlier rounds stay; bytes of earlier rounds are dropped."""
        known = {} if self.state is None else dict(self.state.claims)
        wrong = frozenset() if self.state is None else self.state.wrong
        self.state, self.fold = rounds.State(self.me, number, plan, claims=known, wrong=wrong), None
        self.rows.clear()
        self.payloads.clear()

    async def contribute(self, payload: bytes, weight: int) -> None:
        """Offer a payload to everybody."""
        assert self.state is not None
        rules = self._world.rules
        self._tree = RowTree(payload, Layout("sparse2", rules.chunks, rules.k))
        blob = manifest_of_bytes(payload).id
        body = SlicedContribution(self.state.number, Digest(bytes(32)), blob, 1, 1, weight, 1.0, self._tree.root)
        await self.publish(body)

    async def publish(self, body: Body, made: Made | None = None) -> Digest:
        """Write an entry, take note of it and gossip it."""
        entry = sign_entry(self._world.rules.run, self._identity, self._seq, self._last, body)
        self._seq, self._last = self._seq + 1, entry.id
        if made is not None:
            self.reducer.published(entry.id, made)
            self.payloads[entry.id] = made.payload
        self._world.spawn(self._note(entry))
        self.gossip.publish("entry", encode_entry(entry), self.me)
        if made is not None:
            self.tell(rounds.ClaimSeen(Claim(entry.id, self.me, made_body(entry))))
            self.tell(rounds.ReductionHeld(entry.id))
        return entry.id

    def tell(self, event: rounds.Event) -> None:
        """One step of the machine, and what it asks for."""
        assert self.state is not None
        self.state, actions = rounds.step(self.state, event)
        for action in actions:
            match action:
                case rounds.FetchRows(offer, span):
                    self._world.spawn(self._fetch_rows(offer, span))
                case rounds.FetchReduction(claim):
                    self._world.spawn(self._fetch_reduction(claim))
                case rounds.ReduceSlice(span, offers):
                    self._world.spawn(self._reduce(span, offers))
                case rounds.FoldSlices():
                    self.fold = action

    def is_complete(self, expected: int) -> bool:
        """Whether there is nothing to wait for before the round closes here."""
        assert self.state is not None
        span = self.state.plan.span_of(self.me)
        offers = [offer for offer in self.state.offers if offer.author != self.me]
        return len(offers) >= expected - 1 and all(
            span is None or (offer.entry, span) in self.state.rows for offer in offers
        )

    def missing(self) -> bool:
        """Whether a slice waits for its Reduction."""
        assert self.state is not None
        return bool(rounds.missing_slices(self.state))

    async def sample(self, luck: random.Random) -> None:
        """Open one chunk of somebody's Reduction; publish a proof if it is wrong."""
        assert self.state is not None
        counted = [part.reduced for part in self.state.parts if part.reduced is not None]
        claims = [claim for claim in counted if claim.author != self.me]
        if not claims:
            return
        claim = luck.choice(claims)
        chunk = sampled_chunks(luck.randbytes(32), claim.body.span, 1)[0]
        covered = covered_by(claim.body, self.state.plan, tuple(self.state.offers)) or ()
        cap = opening_max_bytes(self._world.rules, len(covered))
        try:
            data = await self._ask(claim.author, OpeningAsk(claim.entry, chunk), cap)
        except (Unreachable, TimeoutError):
            return
        opening = codec.decode(data, Opening, max_bytes=cap)
        self.openings += 1
        proof = self._proof(claim, covered, opening)
        if proves_fault(proof, self._world.rules, ARITHMETIC):
            data = codec.encode(proof)
            blob = manifest_of_bytes(data).id
            self._blobs[blob] = data
            await self.publish(ReductionFault(claim.body.round, claim.entry, blob))

    def _proof(self, claim: Claim, covered: tuple[Offer, ...], opening: Opening) -> FaultProof:
        previous = claim.body.previous
        return FaultProof(
            PROOF_VERSION,
            encode_entry(self.entries[claim.entry]),
            encode_entry(self.entries[Digest(previous)]) if previous else b"",
            tuple(encode_entry(self.entries[offer.entry]) for offer in covered),
            opening,
        )

    async def _note(self, entry: Entry) -> None:
        """An entry is in our ledger."""
        self.entries[entry.id] = entry
        match entry.body:
            case SlicedContribution():
                self.tell(rounds.OfferSeen(Offer(entry.id, entry.author, entry.body.weight, entry.seq)))
            case Reduction() if entry.author != self.me:
                self.tell(rounds.ClaimSeen(Claim(entry.id, entry.author, entry.body)))
            case ReductionFault():
                await self._note_fault(entry.author, entry.body)

    async def _note_fault(self, author: PeerId, body: ReductionFault) -> None:
        """Believe it when the proof says so."""
        cap = proof_max_bytes(self._world.rules, len(self.entries))
        data = self._blobs.get(body.proof) or await self._ask(author, BlobAsk(body.proof), cap)
        proof = decode_proof(data, self._world.rules)
        named = decode_entry(proof.reduction, self._world.rules.run).id == body.reduction
        if named and proves_fault(proof, self._world.rules, ARITHMETIC):
            self.faults += 1
            self.tell(rounds.Wrong(body.reduction))

    async def _reduce(self, span: Span, offers: tuple[Offer, ...]) -> None:
        assert self.state is not None
        if self.behaviour == "missing":
            self._world.kill(self.me)
            return
        rows = {offer: self._part(offer, span) for offer in offers}
        made, rest = self.reducer.reduce(span, rows)
        if rest is not None:
            self._world.take_back(self.me, rest)
        if self.behaviour == "lying":
            made = twisted(made, self._world.rules.reduced_k)
        covered, more, members = cover(offers, self.state.plan)
        blob = manifest_of_bytes(made.payload).id
        await self.publish(
            Reduction(
                self.state.number,
                span,
                covered,
                more,
                members,
                blob,
                made.tree.root,
                made.kept_root,
                made.previous,
            ),
            made,
        )

    def _part(self, offer: Offer, span: Span) -> RowPart:
        """Rows that we hold; our own are cut when they are needed."""
        if (offer.entry, span) not in self.rows:
            assert self._tree is not None
            assert offer.author == self.me
            rows, path = self._tree.part(span)
            root = self._tree.root
            self.rows[offer.entry, span] = checked_rows(
                root, self._world.rules.chunks, self._world.rules.k, span, rows, path
            )
        return self.rows[offer.entry, span]

    def raw(self, offer: Offer, span: Span) -> bytes:
        """Rows for the fold."""
        return self._part(offer, span).rows

    async def _fetch_rows(self, offer: Offer, span: Span) -> None:
        body = self.entries[offer.entry].body
        assert isinstance(body, SlicedContribution)
        rules = self._world.rules
        cap = rows_max_bytes(span, rules.chunks, rules.k)
        try:
            data = await self._ask(offer.author, RowsAsk(offer.entry, span), cap)
            answer = codec.decode(data, RowsAnswer, max_bytes=cap)
            part = self._world.once(
                (body.rows, span, digest(answer.rows), answer.path),
                lambda: checked_rows(body.rows, rules.chunks, rules.k, span, answer.rows, answer.path),
            )
        except (Unreachable, DecodeError, TimeoutError):
            self.tell(rounds.Gone(offer.entry))
            return
        self.rows[offer.entry, span] = part
        self.tell(rounds.RowsHeld(offer.entry, span))

    async def _fetch_reduction(self, claim: Claim) -> None:
        layout = Layout("sparse2", claim.body.span.chunks, self._world.rules.reduced_k)
        try:
            data = await self._ask(claim.author, BlobAsk(claim.body.payload), layout.size_bytes)
        except (Unreachable, TimeoutError):
            return
        if manifest_of_bytes(data).id != claim.body.payload:
            return
        try:
            payload = self._world.once((claim.entry, digest(data)), lambda: checked_payload(claim, data, layout))
        except DecodeError:
            self.tell(rounds.Wrong(claim.entry))
            return
        self.payloads[claim.entry] = payload
        self.tell(rounds.ReductionHeld(claim.entry))

    async def _ask(self, peer: PeerId, ask: Ask | BlobAsk, max_bytes: int) -> bytes:
        """One answer. Raises Unreachable or TimeoutError."""
        protocol = BLOBS if isinstance(ask, BlobAsk) else ASKS
        async with self._turn(peer, protocol), asyncio.timeout(ANSWER_S):
            stream = await self._stream(peer, protocol)
            await write_frame(stream, codec.encode(ask))
            return await read_frame(stream, max_bytes)

    def _turn(self, peer: PeerId, protocol: str) -> asyncio.Lock:
        return self._turns.setdefault((peer, protocol), asyncio.Lock())

    async def _stream(self, peer: PeerId, protocol: str) -> Stream:
        if (peer, protocol) not in self._streams:
            self._streams[peer, protocol] = await self._host.open_stream(peer, protocol)
        return self._streams[peer, protocol]

    def _take_record(self, sender: PeerId, data: bytes) -> PeerId:
        entry = decode_entry(data, self._world.rules.run)
        self._world.spawn(self._note(entry))
        return entry.author

    async def _serve_asks(self, stream: Stream) -> None:
        await serve_until_end(stream, self._answer)

    async def _answer(self, stream: Stream) -> None:
        match decode_ask(await read_frame(stream, ASK_MAX_BYTES)):
            case RowsAsk(_, span):
                assert self._tree is not None
                await write_frame(stream, codec.encode(RowsAnswer(*self._tree.part(span))))
            case OpeningAsk(reduction, chunk):
                await write_frame(stream, codec.encode(self.reducer.open(reduction, chunk)))

    async def _serve_blobs(self, stream: Stream) -> None:
        await serve_until_end(stream, self._answer_blob)

    async def _answer_blob(self, stream: Stream) -> None:
        ask = codec.decode(await read_frame(stream, ASK_MAX_BYTES), BlobAsk)
        await write_frame(stream, self._blob(ask.blob))

    def _blob(self, blob: Digest) -> bytes:
        if blob in self._blobs:
            return self._blobs[blob]
        for entry, payload in self.payloads.items():
            body = self.entries[entry].body
            if isinstance(body, Reduction) and body.payload == blob:
                return payload
        raise DecodeError("no such blob")


async def serve_until_end(stream: Stream, answer: Callable[[Stream], Awaitable[None]]) -> None:
    """Answer one question after the other until the other side ends."""
    try:
        while True:
            await answer(stream)
    except Unreachable:
        await stream.close()


def checked_payload(claim: Claim, data: bytes, layout: Layout) -> bytes:
    """The payload that a Reduction names. Raises DecodeError if it is illegal or has another root."""
    if RowTree(data, layout).root != claim.body.rows:
        raise DecodeError("the rows of the payload have another root than the Reduction says")
    ARITHMETIC.decode(data, layout.chunks, layout.k)
    return data


def made_body(entry: Entry) -> Reduction:
    """The Reduction that an entry carries."""
    assert isinstance(entry.body, Reduction)
    return entry.body


def twisted(made: Made, k: int, most: int | None = None) -> Made:
    """The lie: a legal payload of other values, signed like an honest one.

    Every code's sign is turned, in all chunks or in the first `most` that hold any value.
    """
    layout = Layout("sparse2", made.span.chunks, k)
    codes_at = layout.offsets[3]
    words = memoryview(made.payload)[layout.offsets[0] : layout.offsets[1]]
    silent = {c for c in range(layout.chunks) if not (words[2 * c] or words[2 * c + 1] & 0x3F)}
    size = layout.row_bytes[3]
    body = bytearray(made.payload)
    loud = [chunk for chunk in range(layout.chunks) if chunk not in silent]
    for chunk in loud[:most]:
        for at in range(codes_at + chunk * size, codes_at + (chunk + 1) * size):
            body[at] ^= 0xAA
    payload = bytes(body)
    return made._replace(payload=payload, tree=RowTree(payload, layout))
