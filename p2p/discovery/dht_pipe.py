"""Daemon <-> DHT child: u32 length (little-endian) + msgpack, on the child's stdin and stdout."""

from typing import TypeAlias

import msgspec

FRAME_MAX_BYTES = 2 << 20
"""Largest frame on the pipe."""


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The child's one argument, as JSON."""

    folder: str = ""
    """Private folder for sockets; the supervisor fills it in and removes it."""
    control_socket: str = ""
    """Unix socket of a running p2pd to attach to; empty: the child starts its own."""
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Multiaddrs of the child's own p2pd."""
    bootstrap: tuple[str, ...] = ()
    """Peers with `/p2p/…` that the child's own p2pd dials, again and again."""


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Keep this signed record in the DHT."""

    id: int
    record: bytes


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """All records under a key."""

    id: int
    key: bytes


class DhtReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The child serves; where its p2pd listens, with `/p2p/…`."""

    maddrs: tuple[str, ...]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Whether somebody keeps the record."""

    id: int
    is_kept: bool


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """Records as their authors signed them; the daemon verifies them again."""

    id: int
    records: tuple[bytes, ...]


Ask: TypeAlias = Store | Find
Answer: TypeAlias = DhtReady | Stored | Found
