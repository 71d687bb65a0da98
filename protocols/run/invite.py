"""Invites: a signed link with the run to join, seeds to dial, a time of expiry and, if needed, a permit.

    atoll:<base32>      version u8 | length u16 | check 4 bytes | body

Lower-case base32 (RFC 4648, no padding) survives line breaks, double clicks and changes of case; in capitals a QR
code packs it tighter than base64. Length and check distinguish links that are cut off, mistyped or forged; their
places are the same in every version.
"""

import base64
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, SignatureFault
from atoll.protocols.identity import Identity, Key, Signature, verify
from atoll.protocols.ids import PeerId, RunId, digest, peer_id_of, public_key_of, short
from atoll.protocols.run.admission import Expiry, Token, check_name

INVITE_VERSION = 1
SCHEME = "atoll:"
EMBED_MAX_BYTES = 1536
"""Largest signed run, in bytes, that travels inside the link; larger ones are fetched from a seed."""
MAX_SEEDS = 16
MAX_MADDRS = 8
_BODY_MAX_BYTES = 8192
_HEADER_BYTES = 7
_HEADER_CHARACTERS = 16
_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyz234567")
_DOMAIN = "invite/1"
_Maddr: TypeAlias = Annotated[str, Meta(max_length=256, pattern=r"^/[!-~]*\Z")]


class Seed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node that a newcomer dials first."""

    key: Annotated[bytes, Meta(max_length=32)]
    """Public key of the node, 32 bytes; empty for a name (`/dnsaddr/…`) of several nodes."""
    maddrs: Annotated[tuple[_Maddr, ...], Meta(min_length=1, max_length=MAX_MADDRS)]
    """Multiaddrs of the node, without its own `/p2p/…` part."""


class Invite(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The body of a link."""

    run: RunId
    """Run id; it is the hash of the RunSpec, so no other spec has it."""
    expires: Expiry
    """Time of expiry, Unix seconds."""
    seeds: Annotated[tuple[Seed, ...], Meta(max_length=MAX_SEEDS)]
    token: Annotated[tuple[Token, ...], Meta(max_length=1)]
    """At most one token; none if the run needs no permit."""
    run_file: Annotated[bytes, Meta(max_length=EMBED_MAX_BYTES)]
    """The signed RunSpec; empty: fetch it from a seed."""
    key: Key
    """The signer's public key."""
    signature: Signature

    @property
    def signer(self) -> PeerId:
        """PeerID of the signer: the owner or another member."""
        return peer_id_of(self.key)

    @property
    def seed_texts(self) -> tuple[str, ...]:
        """The seeds as configuration texts: `…/p2p/PEERID`, or a `/dnsaddr/…` name alone."""
        tails = [(seed, f"/p2p/{peer_id_of(seed.key)}" if seed.key else "") for seed in self.seeds]
        return tuple(maddr + tail for seed, tail in tails for maddr in seed.maddrs)


def seeds_of(texts: list[str]) -> tuple[Seed, ...]:
    """Seeds of configuration texts (`…/p2p/PEERID` or `/dnsaddr/…`), grouped by peer. Raises ConfigError."""
    grouped: dict[bytes, list[str]] = {}
    for text in texts:
        maddr, separator, peer = text.strip().rpartition("/p2p/")
        if not separator:
            maddr, peer = text.strip(), ""
        try:
            key = public_key_of(PeerId(peer)) if peer else b""
        except DecodeError as error:
            raise ConfigError(f"seed {text!r}: {error}") from error
        if not key and not maddr.startswith("/dnsaddr/"):
            raise ConfigError(f"seed {text!r} does not end in /p2p/PEERID")
        grouped.setdefault(key, []).append(maddr)
    return tuple(Seed(key, tuple(dict.fromkeys(maddrs))) for key, maddrs in grouped.items())


def sign_invite(signer: Identity, draft: Invite) -> str:
    """The signed link of `draft`, which has no key and signature yet. Raises DecodeError for an illegal value."""
    keyed = msgspec.structs.replace(draft, key=signer.public_key, signature=b"")
    body = codec.encode(msgspec.structs.replace(keyed, signature=signer.sign(_DOMAIN, _unsigned(keyed))))
    _decoded(body)
    return link_of(body)


def make_invite(
    signer: Identity,
    run: RunId,
    seeds: tuple[Seed, ...],
    expires: int,
    token: Token | None = None,
    run_file: bytes = b"",
) -> str:
    """A signed link. `expires`: Unix seconds. Raises DecodeError for an illegal value."""
    tokens = (token,) if token is not None else ()
    draft = Invite(run=run, expires=expires, seeds=seeds, token=tokens, run_file=run_file, key=b"", signature=b"")
    return sign_invite(signer, draft)


def read_invite(text: str) -> Invite:
    """The verified invite of a link, expired or not. Raises DecodeError with the reason."""
    version, body = _unpack(text)
    if version > INVITE_VERSION:
        raise DecodeError(
            f"the invite was made by a newer atoll (version {version}; this one reads {INVITE_VERSION})",
            hint="upgrade atoll",
        )
    if version != INVITE_VERSION:
        raise DecodeError(f"the invite has version {version}, which never was")
    invite = _decoded(body)
    try:
        verify(invite.signer, _DOMAIN, _unsigned(invite), invite.signature)
    except SignatureFault as error:
        raise DecodeError(
            f"the invite was changed after {short(invite.signer)} signed it", hint="do not use it; ask for another"
        ) from error
    return invite


def decode_invite(text: str, unix_s: float) -> Invite:
    """The verified invite of a link. Raises DecodeError, also if it has expired at `unix_s`."""
    invite = read_invite(text)
    if unix_s >= invite.expires:
        raise DecodeError(
            f"the invite expired {_span(unix_s - invite.expires)} ago",
            hint=f"ask {short(invite.signer)}, who made it, for a new one (or set this machine's clock)",
        )
    return invite


def is_invite(text: str) -> bool:
    """Whether `text` looks like an atoll link, legal or not."""
    return text.strip().lower().startswith(SCHEME)


def link_of(body: bytes, version: int = INVITE_VERSION) -> str:
    """The link with this body."""
    head = bytes([version]) + len(body).to_bytes(2, "big")
    blob = head + _check_of(head, body) + body
    return SCHEME + base64.b32encode(blob).decode().rstrip("=").lower()


def _unpack(text: str) -> tuple[int, bytes]:
    """Version and body of a link. Raises DecodeError that distinguishes cut and mistyped links."""
    if not is_invite(text):
        raise DecodeError(f"this is not an invite: an invite begins with {SCHEME}")
    if len(text) > 4 * _BODY_MAX_BYTES:
        raise DecodeError("this is not an invite: it is far too long")
    packed = "".join(text.split()).lower().removeprefix(SCHEME).removeprefix("//").rstrip("/")
    for place, letter in enumerate(packed):
        if letter not in _ALPHABET:
            raise _mistyped(f"{letter!r} at place {place + 1} is in no invite")
    if len(packed) < _HEADER_CHARACTERS:
        raise _cut(len(packed), None)
    head = base64.b32decode(packed[:_HEADER_CHARACTERS].upper())
    length = int.from_bytes(head[1:3], "big")
    wanted = -(-(_HEADER_BYTES + length) * 8 // 5)
    if length > _BODY_MAX_BYTES or len(packed) > wanted:
        raise _mistyped(f"{len(packed)} characters where {wanted} belong")
    if len(packed) < wanted:
        raise _cut(len(packed), wanted)
    blob = base64.b32decode(packed.upper() + "=" * (-len(packed) % 8))
    if _check_of(blob[:3], blob[_HEADER_BYTES:]) != blob[3:_HEADER_BYTES]:
        raise _mistyped("its check does not fit")
    if base64.b32encode(blob).decode().rstrip("=").lower() != packed:
        raise _mistyped("its last character does not fit")
    return blob[0], blob[_HEADER_BYTES:]


def _check_of(head: bytes, body: bytes) -> bytes:
    return digest(b"invite", head, body)[:4]


def _cut(have: int, wanted: int | None) -> DecodeError:
    part = f"{have} of {wanted} characters" if wanted else f"only {have} characters"
    return DecodeError(f"the invite is cut off: {part} are here", hint="copy the whole link, in quotes")


def _mistyped(what: str) -> DecodeError:
    return DecodeError(f"the invite is mistyped: {what}", hint="copy it again")


def _unsigned(invite: Invite) -> bytes:
    return codec.encode((invite.run, invite.expires, invite.seeds, invite.token, invite.run_file, invite.key))


def _decoded(body: bytes) -> Invite:
    invite = codec.decode(body, Invite, max_bytes=_BODY_MAX_BYTES)
    for seed in invite.seeds:
        if len(seed.key) not in (0, 32):
            raise DecodeError("invite: a seed with an illegal key")
        if not seed.key and not all(maddr.startswith("/dnsaddr/") for maddr in seed.maddrs):
            raise DecodeError("invite: a seed without a key that is no /dnsaddr name")
    for token in invite.token:
        check_name(token)
    return invite


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes % 60} min"
