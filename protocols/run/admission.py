"""Who may take part in a run: everybody, those on a list, or holders of a permit that the owner signed.

A permit certifies a key: whoever knows its secret signs its own PeerID with it, and opens its feed with both
signatures (`Admit`). Whether an `Admit` is genuine depends on RunSpec and entry alone, on every replica, for ever.
The time of expiry and the number of members are looked at only when a stranger shows its permit
(`refusal_now`): replays and what members vouch for are not judged by anybody's clock.
"""

from typing import Literal

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, SignatureFault
from atoll.protocols.identity import SIGNATURE_BYTES, Identity, verify
from atoll.protocols.ids import PeerId, RunId, peer_id_of, public_key_of, short

Mode = Literal["open", "invite", "allowlist"]
MODES: tuple[Mode, ...] = ("open", "invite", "allowlist")
MAX_LISTED = 512
"""Peers that a RunSpec may name: its signed bytes must stay below 64 KiB."""
MAX_NAME = 32
MAX_UNIX_S = 1 << 40
CLOCK_SKEW_S = 3600
"""A permit counts for so long after its end: volunteers' clocks are off."""
_PERMIT_DOMAIN = "permit/1"
_ADMIT_DOMAIN = "admit/1"


class AdmissionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Part of RunSpec."""

    mode: Mode = "open"
    members: tuple[PeerId, ...] = ()
    """Sorted PeerIDs that are admitted besides the owner; must be empty where the mode is `open`."""

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for what no run can have."""
        if self.mode not in MODES:
            raise ConfigError(f"admission.mode {self.mode!r} is not one of {', '.join(MODES)}")
        if len(self.members) > MAX_LISTED:
            raise ConfigError(f"admission.members: {len(self.members)} peers; at most {MAX_LISTED} are legal")
        if self.mode == "open" and self.members:
            raise ConfigError("admission.members must be empty in an open run")
        if list(self.members) != sorted(set(self.members)):
            raise ConfigError("admission.members must be sorted, each peer once")
        for peer in self.members:
            try:
                public_key_of(peer)
            except DecodeError as error:
                raise ConfigError(f"admission.members: {peer!r}: {error}") from error


class Permit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The owner's word that holders of a secret may join."""

    key: bytes
    """Public half of the secret, 32 bytes."""
    expires: int
    """Unix seconds."""
    name: str
    """Whom it was made for; may be empty."""
    members: int
    """Most members that join with it; 0: any number. Kept as well as concurrent replicas can."""
    signature: bytes


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A permit with its secret: what an invite carries."""

    secret: bytes
    """Ed25519 seed, 32 bytes."""
    expires: int
    name: str
    members: int
    signature: bytes

    @property
    def permit(self) -> Permit:
        """What may be shown to everybody."""
        return Permit(Identity(self.secret).public_key, self.expires, self.name, self.members, self.signature)


class Rule(msgspec.Struct, frozen=True):
    """What of a RunSpec decides on admission."""

    run: RunId
    owner: PeerId
    admission: AdmissionSpec

    def admits_by_name(self, peer: PeerId) -> bool:
        """Admitted without any permit."""
        return self.admission.mode == "open" or peer == self.owner or peer in self.admission.members


def make_token(
    run: RunId, owner: Identity, secret: bytes, expires: int, name: str = "", members: int = 0
) -> Token:
    """A token that the owner signed. `secret`: 32 random bytes. Raises DecodeError for an illegal value."""
    permit = Permit(Identity(secret).public_key, expires, name, members, b"")
    signature = owner.sign(_PERMIT_DOMAIN, _permit_body(run, permit))
    permit = msgspec.structs.replace(permit, signature=signature)
    check_permit(permit)
    return Token(secret, expires, name, members, signature)


def check_token(token: Token) -> None:
    """Raise DecodeError for shapes that no owner writes."""
    if len(token.secret) != 32:
        raise DecodeError("token: a secret has 32 bytes")
    check_permit(token.permit)


def check_permit(permit: Permit) -> None:
    """Raise DecodeError for shapes that no owner writes."""
    if len(permit.key) != 32 or len(permit.signature) != SIGNATURE_BYTES:
        raise DecodeError("permit: illegal length of key or signature")
    if not (0 < permit.expires < MAX_UNIX_S and 0 <= permit.members < 1 << 20):
        raise DecodeError("permit: expiry or number of members outside its range")
    if len(permit.name) > MAX_NAME or not permit.name.isprintable():
        raise DecodeError(f"permit: a name has at most {MAX_NAME} printable characters")


def verify_permit(rule: Rule, permit: Permit) -> None:
    """Raise SignatureFault unless the run's owner signed it for this run."""
    verify(rule.owner, _PERMIT_DOMAIN, _permit_body(rule.run, permit), permit.signature)


def prove(run: RunId, token: Token, author: PeerId) -> bytes:
    """The secret's signature over `author`."""
    return Identity(token.secret).sign(_ADMIT_DOMAIN, codec.encode((run, author)))


def refusal(rule: Rule, author: PeerId, permit: Permit | None, proof: bytes = b"") -> str:
    """Why `author` may never write in this run; empty if it may. The same on every replica, at any time."""
    if rule.admits_by_name(author):
        return ""
    if rule.admission.mode == "allowlist":
        return f"{short(author)} is not on the list of peers that this run admits"
    if permit is None:
        return f"this run is by invitation, and {short(author)} has shown no permit"
    try:
        verify_permit(rule, permit)
    except SignatureFault:
        return f"the permit of {short(author)} was not signed by the owner of this run"
    try:
        verify(peer_id_of(permit.key), _ADMIT_DOMAIN, codec.encode((rule.run, author)), proof)
    except SignatureFault:
        return f"the permit of {short(author)} was made out for another peer"
    return ""


def refusal_now(permit: Permit, unix_s: float, used: int) -> str:
    """Why a genuine permit is not taken from a stranger now; empty if it is. `used`: members who came with it."""
    if unix_s > permit.expires + CLOCK_SKEW_S:
        return f"the permit expired {_ago(unix_s - permit.expires)} ago; ask for a new invite"
    if permit.members and used >= permit.members:
        return f"the permit is used up: {used} of {permit.members} have joined with it; ask for a new invite"
    return ""


def _permit_body(run: RunId, permit: Permit) -> bytes:
    return codec.encode((run, permit.key, permit.expires, permit.name, permit.members))


def _ago(seconds: float) -> str:
    hours = int(seconds // 3600)
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {int(seconds % 3600 // 60)} m"
