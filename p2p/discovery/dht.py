"""The DHT (Kademlia): announces this node, finds the members of a run, lists runs. Results are hints only.

Its peers belong to any run. A server answers lookups and keeps records; a client only asks, and no peer names it
to others. Addresses travel with the names of peers, so that each can be dialled. Wire: docs/wires/dht.md.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from atoll.p2p.discovery import dht_records as records
from atoll.p2p.discovery.dht_lookup import Answer, Answers, look_up, merged
from atoll.p2p.discovery.dht_records import DhtRequest, distance
from atoll.p2p.discovery.dht_role import Part, Role
from atoll.p2p.discovery.dht_store import RecordStore
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.host.maddrs import legal_maddrs
from atoll.p2p.limits.token_bucket import PeerRateLimit
from atoll.p2p.rpc.single_request import SingleRequests
from atoll.p2p.system.waiting import Notifier, backoff_s
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable, counted
from atoll.protocols.identity import Identity
from atoll.protocols.ids import DIGEST_BYTES, Digest, PeerId, RunId, digest
from atoll.protocols.ledger.registers import Addresses
from atoll.protocols.wires import DHT

TTL_S = 600
"""Time to live of our records, in seconds."""
WANTED_RECORDS = 64
"""Records of one run above which most members do not announce: each answer carries all of them."""
WANTED_LISTINGS = 8
"""Listings of one run above which members other than its owner do not list it."""
REPLICAS = 5
"""Servers that keep a record: the nearest ones that answer."""
BUCKET = 20
"""Most contacts in one range of distances, each half as wide as the next. The old ones stay."""
ASK_S = 4.0
"""Deadline of one request with its dial, in seconds."""
REFRESH_S = 300.0
"""Time between two looks at the servers that are known, in seconds."""
NEWCOMERS = 16
"""Connected peers that are asked in one refresh whether they serve the DHT."""
REQUESTS_PER_MINUTE = 600
"""Requests of one peer that are answered; all peers together get ten times as many."""
REQUEST_BYTES = 4096
"""An answer counts as one more request for each so many bytes."""
REQUEST_MAX_BYTES = 8192
ANSWER_MAX_BYTES = 1 << 20


@dataclass(eq=False)
class Dht:
    """One node of the DHT."""

    host: Host
    identity: Identity
    bootstrap: Sequence[PeerAddress]
    """Servers to begin with, tried again in every refresh."""
    rng: random.Random
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._part = Part(Role.OFF, "not started yet")
        self._maddrs: tuple[str, ...] = ()
        self._changed = Notifier()
        self._contacts: dict[PeerId, PeerAddress] = {}
        self._records = RecordStore()
        self._limit, self._limit_of_all = (
            PeerRateLimit(most, lambda: asyncio.get_running_loop().time())
            for most in (REQUESTS_PER_MINUTE, 10 * REQUESTS_PER_MINUTE)
        )
        self._requests = SingleRequests(self.host, DHT.protocol(), REQUEST_MAX_BYTES, answer_s=ASK_S)
        self._requests.set_handler(self._answer)

    @property
    def is_on(self) -> bool:
        """Whether this node plays a part in the DHT."""
        return self._part.role is not Role.OFF

    @property
    def state(self) -> str:
        """What this node does in the DHT now and why, as one line."""
        count = len(self._contacts)
        known = f", knows {counted(count, 'server') if count else 'no server yet'}" if self.is_on else ""
        return f"{self._part.role}{known}: {self._part.why}"

    def play(self, part: Part, maddrs: tuple[str, ...] = ()) -> None:
        """Play this part from now on; `maddrs`: where a server can be dialled."""
        before, self._part = self._part, part
        self._maddrs = maddrs if part.role is Role.SERVER else ()
        if part.role is Role.OFF:
            self._contacts.clear()
        if before.role is not part.role:
            self._changed.notify()

    async def serve(self) -> None:
        """Keep contacts fresh while this node plays a part, until cancelled."""
        tries = 0
        while True:
            tries = 0 if not self.is_on or await self.refresh() else tries + 1
            pause_s = backoff_s(tries, self.rng) if tries else REFRESH_S
            try:
                async with asyncio.timeout(pause_s if self.is_on else None):
                    await self._changed.wait()
                    tries = 0
            except TimeoutError:
                continue

    async def refresh(self) -> bool:
        """Meet servers, and ask our neighbours in the DHT, and servers anywhere; whether one is left."""
        await self.meet()
        # Servers that left long ago are found out, wherever they stand.
        anywhere = digest(self.rng.randbytes(DIGEST_BYTES))
        await asyncio.gather(*map(self._look_up, (records.place(self.identity.peer_id), anywhere)))
        return bool(self._contacts)

    async def meet(self) -> bool:
        """Ask bootstrap peers and some connected ones; whether a server is known. It takes ASK_S at most."""
        place = records.place(self.identity.peer_id)
        met = [link.peer for link in await self.host.connections() if link.peer not in self._contacts]
        newcomers = [PeerAddress(peer, ()) for peer in self.rng.sample(met, min(NEWCOMERS, len(met)))]
        await asyncio.gather(*(self._find_at(place, address) for address in (*self.bootstrap, *newcomers)))
        return bool(self._contacts)

    async def announce(
        self, run: RunId, maddrs: tuple[str, ...], listing: records.Listing, *, is_owner: bool
    ) -> list[PeerAddress]:
        """Store our addresses under the run, and the run in the list; return what `find` does.

        Members other than the owner do neither where there are enough records. Raises Unreachable, also if no
        server keeps our record.
        """
        key, answers = records.run_key(run), await self._servers_near(records.run_key(run))
        members = self._members(run, answers)
        if is_owner or len(members) <= WANTED_RECORDS or self.rng.random() <= WANTED_RECORDS / len(members):
            if not await self._store(key, codec.encode(Addresses(maddrs)), list(answers)):
                raise Unreachable("no server of the DHT keeps our record")
            await self._list(listing, is_owner=is_owner)
        return members

    async def _list(self, listing: records.Listing, *, is_owner: bool) -> None:
        """Put the run in the list of runs, unless one of the servers there has enough listings of it."""
        # The key beside this one has the same neighbours, and no records that would come with their answers.
        near = list(await self._look_up(Digest(records.RUNS_KEY[:-1] + bytes([records.RUNS_KEY[-1] ^ 1]))))
        if near and not is_owner:
            asked = await self._find_at(records.RUNS_KEY, self.rng.choice(near[:REPLICAS]))
            if asked and sum(listing.run_file in record for record in asked[0]) >= WANTED_LISTINGS:
                return
        if len(value := codec.encode(listing)) <= records.VALUE_MAX_BYTES:
            await self._store(records.RUNS_KEY, value, near)

    async def find(self, run: RunId) -> list[PeerAddress]:
        """Peers that announce themselves as members of the run, unverified. Raises Unreachable."""
        return self._members(run, await self._servers_near(records.run_key(run)))

    async def runs(self) -> dict[RunId, records.PublicRun]:
        """Listed runs, each signed by its owner. Raises Unreachable."""
        answers = await self._servers_near(records.RUNS_KEY)
        return records.read_runs(self._merged(records.RUNS_KEY, answers), self.clock())

    def _members(self, run: RunId, answers: Answers) -> list[PeerAddress]:
        found = self._merged(records.run_key(run), answers)
        return records.read_addresses(found, run, self.clock())

    def _merged(self, key: Digest, answers: Answers) -> tuple[bytes, ...]:
        return merged([self._records.at(key), *answers.values()])

    async def _servers_near(self, key: Digest) -> Answers:
        """What a lookup found. Raises Unreachable if nobody was there to be asked."""
        if not self._contacts and self._part.role is not Role.SERVER:
            raise Unreachable("no server of the DHT is known")
        return await self._look_up(key)

    async def _store(self, key: Digest, value: bytes, near: list[PeerAddress]) -> bool:
        """Whether one of the servers `near` the key, or this one, keeps our record."""
        data = records.sign_record(self.identity, key, value, int(self.clock()) + TTL_S)
        if self._part.role is Role.SERVER:
            near = sorted((*near, PeerAddress(self.identity.peer_id, ())), key=lambda one: distance(key, one.peer))
        return any(await asyncio.gather(*(self._put(address, data) for address in near[:REPLICAS])))

    async def _put(self, address: PeerAddress, data: bytes) -> bool:
        if address.peer == self.identity.peer_id:
            return self._records.put(data, address.peer, self.clock())
        return bool(await self._ask(address, records.StoreRecord(data)))

    async def _look_up(self, key: Digest) -> Answers:
        start = self._contacts.values()
        return await look_up(start, lambda peer: distance(key, peer), lambda peer: self._find_at(key, peer))

    async def _find_at(self, key: Digest, address: PeerAddress) -> Answer | None:
        """A server's answer; None, and no contact any more, if it is silent or answers nonsense."""
        data = await self._ask(address, records.FindRecords(key, self._maddrs))
        try:
            found = codec.decode(data, records.Found, max_bytes=ANSWER_MAX_BYTES)
            named = [PeerAddress(one.peer, legal_maddrs(one.maddrs)) for one in found.contacts]
            known = self._contacts.get(address.peer, address)
            self._learn(known if known.maddrs else address)
            return found.records, tuple(one for one in named if one.maddrs and self._bucket(one.peer))
        except DecodeError:
            if self._contacts.pop(address.peer, None) and not self._contacts:
                self._changed.notify()
            return None

    async def _ask(self, address: PeerAddress, request: DhtRequest) -> bytes:
        """The answer; empty if there is none."""
        try:
            async with asyncio.timeout(ASK_S):
                if address.maddrs:
                    await self.host.connect(address)
                return await self._requests.ask(address.peer, codec.encode(request), ANSWER_MAX_BYTES)
        except (Unreachable, PeerFault, TimeoutError):
            return b""

    async def _answer(self, peer: PeerId, request: bytes) -> bytes:
        """Serve one request. Raises DecodeError."""
        if self._part.role is not Role.SERVER or not self._is_within_limits(peer):
            return b""
        match codec.decode(request, cast(type[DhtRequest], DhtRequest), max_bytes=REQUEST_MAX_BYTES):
            case records.StoreRecord(record):
                return b"\1" * self._records.put(record, peer, self.clock())
            case records.FindRecords(key, maddrs):
                others = [one for one in self._contacts.values() if one.maddrs and one.peer != peer]
                near = sorted(others, key=lambda one: distance(key, one.peer))[: records.NAMED]
                contacts = tuple(records.Contact(one.peer, one.maddrs) for one in near)
                if found := legal_maddrs(maddrs):
                    self._learn(PeerAddress(peer, found))
                answer = codec.encode(records.Found(self._records.at(key), contacts))
                return answer if self._is_within_limits(peer, len(answer) / REQUEST_BYTES) else b""

    def _is_within_limits(self, peer: PeerId, requests: float = 1) -> bool:
        return self._limit.take(peer, requests) and self._limit_of_all.take(None, requests)

    def _learn(self, address: PeerAddress) -> None:
        """Add a contact, unless there are enough in its bucket, or give a known one its newest address."""
        bucket = self._bucket(address.peer)
        others = sum(self._bucket(peer) == bucket for peer in self._contacts if peer != address.peer)
        if bucket and others < BUCKET and (address.maddrs or address.peer not in self._contacts):
            self._contacts[address.peer] = address

    def _bucket(self, peer: PeerId) -> int:
        """Number of the range of distances in which a peer is; 0 for ourselves. Raises DecodeError."""
        return distance(records.place(self.identity.peer_id), peer).bit_length()
