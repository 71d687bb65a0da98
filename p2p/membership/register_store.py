"""The registers of one run in memory: leases and other values that expire unless their authors renew them.

Merging is a join: the larger (epoch, seq) of an author wins, whatever the order of arrival. Only a larger one is
news: receiving a known register again neither prolongs its life nor revives it. Pulls: register_sync.py.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.ledger.registers import (
    REGISTER_MAX_BYTES,
    Register,
    Value,
    decode_register,
    sign_register,
)

MAX_AUTHORS = 1000
MAX_STRANGERS = 256
"""Most authors with a live register that are neither connected nor known by their work. More are not stored: a
newcomer is known to its neighbours, and to the others as soon as it worked."""
_FLOORS_PER_AUTHOR = 8
_LEASE = "lease"
V = TypeVar("V", bound=Value)
Key = tuple[PeerId, str]
Order = tuple[int, int, bytes]


class StoredRegister(NamedTuple):
    """A live register with its bytes and time of expiry."""

    value: Value
    data: bytes
    expires: float
    """Time of expiry on our own monotonic clock."""


class RegisterStore:
    """All live registers of a run. It reads no clock: methods get `now`, monotonic seconds."""

    def __init__(
        self,
        run: RunId,
        identity: Identity,
        epoch: int,
        *,
        max_authors: int = MAX_AUTHORS,
        admits: Callable[[PeerId], bool] = lambda peer: True,
        is_known: Callable[[PeerId], bool] = lambda peer: True,
        rank: Callable[[PeerId], int] = lambda peer: 0,
    ) -> None:
        """`epoch`: number of this start of the node, see `next_epoch`.

        `admits(peer)`: whether registers of `peer` are stored; others are ignored, without blame.
        `is_known(peer)`: whether `peer` is connected or known by its work; the others are strangers, and give way.
        `rank(peer)`: the number of final sets that name `peer`; who has the fewest is forgotten first.
        """
        self._run = run
        self._identity = identity
        self._epoch = epoch
        self._seq = 0
        self._max_authors = max_authors
        self._admits = admits
        self._is_known = is_known
        self._rank = rank
        self._strangers: dict[PeerId, None] = {}
        """Authors that were strangers when their first register came, in that order."""
        self._held: dict[Key, StoredRegister] = {}
        self._newest: OrderedDict[Key, Order] = OrderedDict()
        self._floors: dict[PeerId, bytes] = {}
        """Leases that an earlier start has seen."""
        self._elsewhere: dict[Key, Order] = {}
        self.echoes = 0
        """Number of newer registers of ours that this process did not write. If it rises, another process with our
        identity is running."""

    def publish(self, value: Value, ttl_s: float, now: float) -> bytes:
        """Sign and store our own next register; return its bytes."""
        self._seq += 1
        register = sign_register(self._run, self._identity, self._epoch, self._seq, ttl_s, value)
        data = codec.encode(register)
        self._store(register, data, now + ttl_s)
        return data

    def merge(self, data: bytes, now: float, age_s: float = 0.0) -> Register | None:
        """Store a register that a peer sent, and return it if it was news. Raises DecodeError or SignatureFault.

        `age_s`, not negative: seconds since the sender received it, which count against its time to live. One
        that is dead by that is ignored: its sender would otherwise end the life of a lease that others renewed.
        """
        draft = codec.decode(data, Register, max_bytes=REGISTER_MAX_BYTES)
        key, order = (draft.author, _tag(draft.value)), _order(draft, data)
        is_dead = age_s >= draft.ttl_s
        if key in self._newest and self._newest[key] >= order:
            return None
        if draft.author == self._identity.peer_id:
            self._on_own_register(key, order, decode_register(data, self._run), is_dead=is_dead)
            return None
        if is_dead or not self._admits(draft.author):
            return None
        if key not in self._held and not self._has_room(draft.author, now):
            return None
        register = decode_register(data, self._run)
        if not self._is_known(draft.author):
            self._strangers.setdefault(draft.author)
        self._store(register, data, now + register.ttl_s - age_s)
        return register

    def newest_leases(self, most: int = MAX_AUTHORS) -> list[bytes]:
        """The newest lease, alive or not, of each author that is connected, known by its work, or remembered.

        Of more than `most` authors those with the highest ranks, of equals the newest leases.
        """
        leases = ((key[0], order[2]) for key, order in self._newest.items() if key[1] == _LEASE)
        # Before the ledger was replayed nobody is known by its work.
        kept = [(author, data) for author, data in leases if author in self._floors or self._is_known(author)]
        if len(kept) > most:
            kept = sorted(kept, key=lambda lease: self._rank(lease[0]))[-most:]
        return [data or self._floors[author] for author, data in kept]

    def raise_floors(self, leases: Iterable[bytes]) -> None:
        """Remember leases that an earlier start of this node has seen: older ones are no news. Damaged ones are
        ignored.
        """
        for data in leases:
            with contextlib.suppress(DecodeError, SignatureFault):
                lease = decode_register(data, self._run)
                if lease.author == self._identity.peer_id:
                    self._epoch = max(self._epoch, lease.epoch + 1)  # the count of starts may be lost
                self._floors[lease.author] = data
                # It may be alive still, so it is taken once more: any bytes are more than none.
                self._newest.setdefault((lease.author, _LEASE), (lease.epoch, lease.seq, b""))

    @property
    def remembered(self) -> frozenset[PeerId]:
        """Authors of the leases that an earlier start has seen."""
        return frozenset(self._floors)

    def newest_of(self, author: PeerId, known: dict[Key, tuple[int, int]]) -> list[tuple[float, bytes]]:
        """The author's newest lease with its time to live as its age, if it is newer than that in `known`."""
        order = self._newest.get((author, _LEASE))
        if order is None or known.get((author, _LEASE), (-1, -1)) >= order[:2]:
            return []
        data = order[2] or self._floors[author]
        return [(codec.decode(data, Register, max_bytes=REGISTER_MAX_BYTES).ttl_s, data)]

    def drop(self, author: PeerId) -> None:
        """Forget the values of an author that takes part no more. Their (epoch, seq) stay."""
        self._held = {key: held for key, held in self._held.items() if key[0] != author}

    def live(self, kind: type[V], now: float) -> dict[PeerId, V]:
        """Live values of one type by author."""
        return {
            author: held.value
            for (author, _), held in self._held.items()
            if held.expires > now and isinstance(held.value, kind)
        }

    def expires(self, author: PeerId, kind: type[Value], now: float) -> float | None:
        """Seconds until the author's register expires; None if it is expired or unknown."""
        held = self._held.get((author, _tag_of(kind)))
        return held.expires - now if held and held.expires > now else None

    def versions(self) -> dict[Key, tuple[int, int]]:
        """Newest (epoch, seq) of every author and key since this start, expired ones included."""
        return {key: order[:2] for key, order in self._newest.items() if order[2]}

    def missing(
        self, known: dict[Key, tuple[int, int]], now: float, limit_bytes: int
    ) -> list[tuple[float, bytes]]:
        """Live registers newer than the versions in `known`, each as (age_s, data), up to `limit_bytes`."""
        found: list[tuple[float, bytes]] = []
        size = 0
        is_pressed = self.is_pressed
        for key, held in self._held.items():
            if is_pressed and self.is_stranger(key[0]):
                continue
            if held.expires <= now or known.get(key, (-1, -1)) >= self._newest[key][:2]:
                continue
            size += len(held.data)
            if found and size > limit_bytes:
                break
            ttl_s = codec.decode(held.data, Register, max_bytes=REGISTER_MAX_BYTES).ttl_s
            found.append((min(ttl_s, max(0.0, ttl_s - (held.expires - now))), held.data))
        return found

    def drop_expired(self, now: float) -> int:
        """Drop expired registers; return how many. Their (epoch, seq) stay, so old copies cannot revive them."""
        dead = [key for key, held in self._held.items() if held.expires <= now]
        for key in dead:
            del self._held[key]
            if key[0] in self._strangers and not self._is_known(key[0]):
                self._forget(key)
        if dead:
            held = {author for author, _ in self._held}
            self._strangers = {author: None for author in self._strangers if author in held}
        if (surplus := len(self._newest) - _FLOORS_PER_AUTHOR * self._max_authors) > 0:
            gone = [key for key in self._newest if key not in self._held]
            # Made-up authors that came and went would else push out members: their old leases were news again.
            for key in sorted(gone, key=lambda key: self._rank(key[0]))[:surplus]:
                del self._newest[key]
        return len(dead)

    def _store(self, register: Register, data: bytes, expires: float) -> None:
        key = (register.author, _tag(register.value))
        self._held[key] = StoredRegister(register.value, data, expires)
        self._newest[key] = _order(register, data)
        self._newest.move_to_end(key)

    def _on_own_register(self, key: Key, order: Order, register: Register, *, is_dead: bool) -> None:
        if not is_dead and (key not in self._elsewhere or self._elsewhere[key] < order):
            self._elsewhere[key] = order
            self.echoes += 1
        # An earlier process of ours reached a higher epoch and its counter was lost: continue above it.
        if (register.epoch, register.seq) > (self._epoch, self._seq):
            self._epoch = register.epoch + 1

    @property
    def is_pressed(self) -> bool:
        """Whether half of the places of strangers are taken: then their registers are not passed on."""
        return 2 * len(self._strangers) >= MAX_STRANGERS

    def is_stranger(self, author: PeerId) -> bool:
        """Whether an author has live registers and is neither connected nor known by its work."""
        return author in self._strangers and not self._is_known(author)

    def _has_room(self, author: PeerId, now: float) -> bool:
        authors = {key[0] for key in self._held}
        if author in authors:
            return True
        if not self._is_known(author) and len(self._strangers) >= MAX_STRANGERS:
            return False  # a place is free again when a register of a stranger expires
        if len(authors) < self._max_authors or (self._is_known(author) and self._drop_stranger()):
            return True
        return self.drop_expired(now) > 0 and self._has_room(author, now)

    def _drop_stranger(self) -> bool:
        """Drop the oldest stranger, with the numbers of its registers: old copies harm nobody. False: none."""
        self._strangers = {author: None for author in self._strangers if not self._is_known(author)}
        oldest = next(iter(self._strangers), None)
        if oldest is None:
            return False
        del self._strangers[oldest]
        for key in [key for key in self._newest if key[0] == oldest]:
            self._held.pop(key, None)
            self._forget(key)
        return True

    def _forget(self, key: Key) -> None:
        """Forget the number of a stranger's register, but that of a lease which an earlier start has seen."""
        # Until the ledger was replayed its author seems to be a stranger.
        if key[1] != _LEASE or key[0] not in self._floors:
            del self._newest[key]


def next_epoch(path: Path) -> int:
    """Count this start of the node in the file `path`, durably. Raises DiskFault, CorruptFault."""
    data = read_whole(path, max_bytes=32)
    if data is not None and not data.strip().isdigit():
        raise CorruptFault(f"{path} does not hold a number", hint="remove the file; peers tell us where we were")
    epoch = int(data or b"0") + 1
    write_whole(path, b"%d\n" % epoch)
    return epoch


def _order(register: Register, data: bytes) -> Order:
    # If an author signs two values with one number, the larger bytes win, on every node.
    return register.epoch, register.seq, data


def _tag(value: Value) -> str:
    return _tag_of(type(value))


def _tag_of(kind: type[Value]) -> str:
    return str(kind.__struct_config__.tag)
