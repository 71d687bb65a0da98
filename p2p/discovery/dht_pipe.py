"""Daemon <-> DHT child: messages as length frames of msgpack, on the child's stdin and stdout."""

from typing import TypeAlias

import msgspec

FRAME_MAX_BYTES = 2 << 20
"""Largest frame on the pipe."""


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the child, its one argument, as JSON."""

    folder: str = ""
    """Private folder for sockets; the supervisor creates and removes it."""
    control_socket: str = ""
    """Unix socket of a running p2pd to attach to; empty: the child starts its own."""
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Listen multiaddrs of the child's own p2pd."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs with `/p2p/…` of peers that the child's own p2pd dials repeatedly."""


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Request to store a signed record in the DHT."""

    id: int
    record: bytes


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Request for all records under a key."""

    id: int
    key: bytes


class DhtReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The child serves requests."""

    maddrs: tuple[str, ...]
    """Listen multiaddrs of its p2pd, with `/p2p/…`."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Answer to Store: whether any node keeps the record."""

    id: int
    is_kept: bool


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """Answer to Find: signed records, which the daemon verifies again."""

    id: int
    records: tuple[bytes, ...]


Ask: TypeAlias = Store | Find
Answer: TypeAlias = DhtReady | Stored | Found
