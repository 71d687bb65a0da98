"""Messages of NAT traversal: what you see of me, dial me back, punch with a third, relay me to a third.

Each ask is one frame on a stream of its own, and so is its answer. Pages: docs/wires/nat.md, docs/wires/relay.md.
"""

from typing import Annotated, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.identity import SIGNATURE_BYTES, Identity, verify
from atoll.protocols.ids import PeerId, RunId, public_key_of

NAT_MAX_BYTES = 4096
REASON_CHARACTERS = 160
MADDRS = 8
_PUNCH_DOMAIN = "punch/1"

Reach = Literal["unknown", "public", "punchable", "relay-only"]
"""How others may reach a node: by a plain dial; by a hole punched with a rendezvous; through a relay only."""

Maddr: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern="^[!-~]+$")]
Maddrs: TypeAlias = Annotated[tuple[Maddr, ...], Meta(max_length=MADDRS)]
Run: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Reason: TypeAlias = Annotated[str, Meta(max_length=REASON_CHARACTERS)]


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look", forbid_unknown_fields=True):
    """Where do you see me?"""

    run: Run


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen", forbid_unknown_fields=True):
    """There; and what I am."""

    maddrs: Maddrs
    """Remote addresses of the asker's connections, as the answerer sees them."""
    reach: Reach
    """How the answerer may be reached itself."""
    relays: bool
    """The answerer relays for others."""
    unix_s: float
    """The answerer's clock."""


class DialBack(msgspec.Struct, frozen=True, array_like=True, tag="dial-back", forbid_unknown_fields=True):
    """Try to reach me there. Only addresses with the IP that the answerer sees are tried."""

    run: Run
    maddrs: Maddrs


class Reached(msgspec.Struct, frozen=True, array_like=True, tag="reached", forbid_unknown_fields=True):
    """Those answered."""

    maddrs: Maddrs


class Punch(msgspec.Struct, frozen=True, array_like=True, tag="punch", forbid_unknown_fields=True):
    """Let `target` and me dial each other now. Signed, so that no rendezvous can make peers dial by itself."""

    run: Run
    source: str
    target: str
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    claims: Maddrs
    """Where anybody may dial the source; empty behind a NAT."""
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Summons(msgspec.Struct, frozen=True, array_like=True, tag="summons", forbid_unknown_fields=True):
    """The rendezvous passes a punch on, with the source's addresses as it sees them."""

    punch: Punch
    seen: Maddrs


class Coming(msgspec.Struct, frozen=True, array_like=True, tag="coming", forbid_unknown_fields=True):
    """The target dials now."""

    claims: Maddrs
    """Where anybody may dial the target; empty behind a NAT."""
    seen: Maddrs
    """Where the rendezvous sees the target; the target leaves it empty."""


class NatRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused", forbid_unknown_fields=True):
    """Not done, and why."""

    reason: Reason


class Circuit(msgspec.Struct, frozen=True, array_like=True, tag="circuit", forbid_unknown_fields=True):
    """First frame to a relay: connect me with `target`. The answer is Open or Refused, then frames pass."""

    run: Run
    target: str


class Incoming(msgspec.Struct, frozen=True, array_like=True, tag="incoming", forbid_unknown_fields=True):
    """First frame from a relay: `source` wants you. The answer is Open or Refused."""

    run: Run
    source: str


class OpenCircuit(msgspec.Struct, frozen=True, array_like=True, tag="open", forbid_unknown_fields=True):
    """The circuit is there: every frame that follows belongs to the two ends."""


Ask: TypeAlias = Look | DialBack | Punch | Summons
Answer: TypeAlias = Seen | Reached | Coming | NatRefused


def sign_punch(run: RunId, source: Identity, target: PeerId, nonce: bytes, claims: tuple[str, ...]) -> Punch:
    """A punch that `source` asks for."""
    draft = Punch(run, source.peer_id, target, nonce, claims[:MADDRS], b"")
    return msgspec.structs.replace(draft, signature=source.sign(_PUNCH_DOMAIN, _unsigned(draft)))


def check_punch(punch: Punch) -> PeerId:
    """The peer that signed it. Raises DecodeError or SignatureFault."""
    source = PeerId(punch.source)
    public_key_of(source)
    public_key_of(PeerId(punch.target))
    verify(source, _PUNCH_DOMAIN, _unsigned(punch), punch.signature)
    return source


def decode_ask(data: bytes) -> Ask:
    """One ask. Raises DecodeError."""
    return codec.decode(data, cast(type[Ask], Ask), max_bytes=NAT_MAX_BYTES)


def decode_answer(data: bytes) -> Answer:
    """One answer. Raises DecodeError."""
    return codec.decode(data, cast(type[Answer], Answer), max_bytes=NAT_MAX_BYTES)


def decode_opening(data: bytes) -> OpenCircuit | NatRefused:
    """The answer to Circuit and Incoming. Raises DecodeError."""
    return codec.decode(
        data, cast(type[OpenCircuit | NatRefused], OpenCircuit | NatRefused), max_bytes=NAT_MAX_BYTES
    )


def peer_named(text: str) -> PeerId:
    """A PeerID out of a message. Raises DecodeError."""
    public_key_of(PeerId(text))
    return PeerId(text)


def refused(reason: str) -> NatRefused:
    """A refusal with a printable, bounded reason."""
    return NatRefused(printable(reason)[:REASON_CHARACTERS])


def printable(reason: str) -> str:
    """What of a peer's words may go to a log or a terminal."""
    return "".join(letter for letter in reason if letter.isprintable())


def _unsigned(punch: Punch) -> bytes:
    return codec.encode((punch.run, punch.source, punch.target, punch.nonce, punch.claims))
