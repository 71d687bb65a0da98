"""Registers: ephemeral signed state; per author and type the newest value counts, until its time to live ends.

Registers are ordered by (epoch, seq), never by wall clock: `epoch` rises by one each time a node starts, `seq`
with each write. A receiver counts the time to live from the arrival of the register, on its own clock.
"""

from typing import Literal

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import SIGNATURE_BYTES, Identity, verify
from atoll.protocols.ids import DIGEST_BYTES, PeerId, Round, RunId
from atoll.protocols.run.model_spec import MAX_EXPERTS
from atoll.protocols.run.moments import MAX_OFFERED
from atoll.protocols.wires import REGISTER

REGISTER_VERSION = REGISTER.newest
REGISTER_MAX_BYTES = 4096
MAX_TTL_S = 3600.0
"""Longest legal time to live, in seconds."""
_DOMAIN = "register/1"

Activity = Literal["syncing", "training", "paused", "observing", "done"]


class Lease(msgspec.Struct, frozen=True, array_like=True, tag="lease", forbid_unknown_fields=True):
    """`author` is a member of the run: its activity and progress."""

    activity: Activity
    round: Round
    """Round that it trains, or would train next."""
    final: int
    """Newest round that it knows to be final; -1: none."""
    snapshot: bytes
    """BLAKE3 of its newest snapshot blob; empty if it has none."""
    snapshot_round: int
    """Round whose final state the snapshot holds; -1: none."""
    tokens_per_s: float
    """Training throughput of the member."""


class Holding(msgspec.Struct, frozen=True, array_like=True, tag="holding", forbid_unknown_fields=True):
    """Experts that `author` trains and could train; published in runs with `outer.holders` only."""

    experts: bytes
    """Bitmap of the experts that it trains (protocols/run/experts.py); empty: all."""
    room: int
    """Number of experts of each layer that it could train."""
    moments: tuple[tuple[int, bytes], ...] = ()
    """Experts that it gave up, each with the blob id of its optimizer moments (protocols/run/moments.py)."""


class Addresses(msgspec.Struct, frozen=True, array_like=True, tag="addresses", forbid_unknown_fields=True):
    """Addresses at which `author` may be dialled."""

    maddrs: tuple[str, ...]
    """Multiaddrs without the `/p2p/…` part, at most 16."""


Value = Lease | Addresses | Holding


class Register(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One signed register. Its key is (author, tag of the value)."""

    version: int
    run: RunId
    author: PeerId
    epoch: int
    seq: int
    ttl_s: float
    """Time to live, in seconds."""
    value: Value
    signature: bytes


def unsigned(reg: Register) -> bytes:
    """The bytes that the signature covers."""
    return codec.encode((reg.version, reg.run, reg.author, reg.epoch, reg.seq, reg.ttl_s, reg.value))


def sign_register(run: RunId, author: Identity, epoch: int, seq: int, ttl_s: float, value: Value) -> Register:
    """A register, signed by its author."""
    draft = Register(
        version=REGISTER_VERSION,
        run=run,
        author=author.peer_id,
        epoch=epoch,
        seq=seq,
        ttl_s=ttl_s,
        value=value,
        signature=b"",
    )
    return msgspec.structs.replace(draft, signature=author.sign(_DOMAIN, unsigned(draft)))


def decode_register(data: bytes, run: RunId) -> Register:
    """A legal, signed register of this run. Raises DecodeError or SignatureFault."""
    reg = codec.decode(data, Register, max_bytes=REGISTER_MAX_BYTES)
    if reg.version != REGISTER_VERSION or reg.run != run:
        raise DecodeError("register of another version or run")
    if len(reg.signature) != SIGNATURE_BYTES or not 0 < reg.ttl_s <= MAX_TTL_S:
        raise DecodeError("register: illegal signature length or time to live")
    if not (0 <= reg.epoch < 1 << 48 and 0 <= reg.seq < 1 << 48):
        raise DecodeError("register: epoch or sequence number outside its range")
    _check_value(reg.value)
    verify(reg.author, _DOMAIN, unsigned(reg), reg.signature)
    return reg


def _check_value(value: Value) -> None:
    if isinstance(value, Addresses):
        if len(value.maddrs) > 16 or not all(map(_is_plain, value.maddrs)):
            raise DecodeError("addresses: more than 16, or one that is not 1 to 256 printable ASCII characters")
    elif isinstance(value, Holding):
        if len(value.experts) > MAX_EXPERTS // 8 or not 0 <= value.room <= MAX_EXPERTS:
            raise DecodeError("holding: more experts than any model has")
        offered = [expert for expert, _ in value.moments]
        if len(offered) > MAX_OFFERED or not all(0 <= expert < MAX_EXPERTS for expert in offered):
            raise DecodeError(f"holding: moments of more than {MAX_OFFERED} experts, or of none that a model has")
        if any(len(blob) != DIGEST_BYTES for _, blob in value.moments):
            raise DecodeError("holding: a blob that is no digest")
    elif (
        len(value.snapshot) not in (0, 32) or not (0 <= value.round < 1 << 24) or not (-1 <= value.final < 1 << 24)
    ):
        raise DecodeError("lease: number or digest outside its range")
    elif not (-1 <= value.snapshot_round < 1 << 24 and 0 <= value.tokens_per_s < 1e12):
        raise DecodeError("lease: number outside its range")


def _is_plain(maddr: str) -> bool:
    """Addresses are shown on terminals: no control characters."""
    return 1 <= len(maddr) <= 256 and maddr.isascii() and maddr.isprintable()
