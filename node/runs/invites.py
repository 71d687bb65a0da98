"""Invites as a node keeps, uses and makes them: the one that it joined with, and the one that it gives away."""

import ipaddress
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from atoll.node.config.home import Home
from atoll.p2p.system.atomic_files import make_folder, read_whole, write_whole
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.ledger.records import Admit, Solved
from atoll.protocols.run.admission import Rule, Token, make_token, prove, refusal_now, solutions, verify_permit
from atoll.protocols.run.invite import EMBED_MAX_BYTES, Invite, make_invite, read_invite, seeds_of
from atoll.protocols.run.run_spec import RunSpec

EXPIRES_S = 7 * 86400
ADDRESSES = 4
"""Most addresses of one node in a link: each costs about 50 characters."""
SEED_PEERS = 4
_INVITE_MAX_BYTES = 1 << 16
FIRST_TRY = 1 << 61
"""The search for a puzzle's solution begins below this; solutions are below twice as much."""


class InviteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of the user who makes an invite."""

    expires_s: int = EXPIRES_S
    name: str = ""
    """Name of the person whom the permit is for."""
    members: int = 0
    """Most members that may join with the permit; 0: any number."""
    run_file: bytes = b""
    """The signed run, to be put into the link unless it is too large; empty: seeds are asked for it."""


def store_invite(home: Home, run: RunId, link: str) -> None:
    """Remember the invite that this home joins `run` with. Raises DiskFault."""
    folder = make_folder(home.run(run))
    write_whole(folder / "invite", link.strip().encode())


def load_invite(home: Home, run: RunId) -> Invite | None:
    """The invite that this home joined with, expired or not; None without one. Raises DiskFault, CorruptFault."""
    path = home.run(run) / "invite"
    data = read_whole(path, max_bytes=_INVITE_MAX_BYTES)
    if data is None:
        return None
    try:
        return read_invite(data.decode("ascii", "replace"))
    except DecodeError as error:
        raise CorruptFault(f"{path}: {error}", hint="remove the file and start with the invite again") from error


def opening_entry(
    spec: RunSpec, me: PeerId, invite: Invite | None, first: int | None = None
) -> Iterator[Admit | Solved | None]:
    """The entry with which this node's feed must begin, after a None for each part of the work on a puzzle.

    `first`: number with which that work begins; None: a random one, so that a restart tries no number again.
    Nothing if the run admits this node by name, or without a permit.
    """
    rule = Rule(spec.id, spec.owner, spec.admission)
    if rule.admits_by_name(me):
        return
    if spec.admission.mode == "open":
        begin = secrets.randbelow(FIRST_TRY) if first is None else first
        yield from (None if nonce is None else Solved(nonce) for nonce in solutions(rule, me, begin))
    elif invite is not None and invite.token:
        (token,) = invite.token
        yield Admit(token.permit, prove(spec.id, token, me))


def check_admission(spec: RunSpec, me: PeerId | None, invite: Invite | None, unix_s: float) -> None:
    """Raise ConfigError if peers would not admit `me` (None: a new identity) at `unix_s`."""
    rule = Rule(spec.id, spec.owner, spec.admission)
    token = invite.token[0] if invite is not None and invite.token else None
    if spec.admission.mode == "open" or (me is not None and rule.admits_by_name(me)):
        return
    if spec.admission.mode == "allowlist":
        who = str(me) if me is not None else "this node's (see `atoll id show`)"
        raise ConfigError(
            f"the run admits only the peers on its owner's list, and {who} is not on it",
            hint="ask the owner for a run that lists this PeerID",
        )
    if token is None:
        raise ConfigError("the run is by invitation, and no permit came along", hint="ask its owner for an invite")
    try:
        verify_permit(rule, token.permit)
    except SignatureFault as error:
        raise ConfigError(
            "the invite's permit was not signed by the run's owner", hint="ask the owner for an invite"
        ) from error
    if reason := refusal_now(token.permit, unix_s, 0):
        raise ConfigError(reason)


def invite_text(
    spec: RunSpec,
    me: Identity,
    seeds: Sequence[str],
    unix_s: float,
    *,
    options: InviteOptions | None = None,
    kept: Invite | None = None,
) -> str:
    """A link that lets others join `spec` through `seeds` (`…/p2p/PEERID`).

    `kept`: the invite that this node joined with; members other than the owner pass its permit on. Raises
    ConfigError.
    """
    options = options or InviteOptions()
    expires = int(unix_s) + options.expires_s
    run_file = options.run_file if len(options.run_file) <= EMBED_MAX_BYTES else b""
    try:
        token = _token(spec, me, options, expires, kept)
        if token is not None:
            expires = min(expires, token.expires)
        return make_invite(me, spec.id, seeds_of(list(seeds)), expires, token, run_file)
    except DecodeError as error:
        raise ConfigError(f"no invite can say this: {error}") from error


def own_seeds(addresses: Iterable[str], me: PeerId, others: Iterable[str] = ()) -> list[str]:
    """Seeds for an invite: our best addresses, then those of `others` (`…/p2p/PEERID`) of different peers.

    Public addresses first; those that mean something else on another machine only where there are no others.
    """
    ranked = sorted(dict.fromkeys(addresses), key=reach_rank)
    limit = max(reach_rank(ranked[0]), 1) if ranked else 0
    best = [f"{maddr}/p2p/{me}" for maddr in ranked if reach_rank(maddr) <= limit][:ADDRESSES]
    peers, chosen = {str(me)}, best
    for seed in others:
        peer = seed.rpartition("/p2p/")[2]
        if peer not in peers and len(peers) < SEED_PEERS:
            peers.add(peer)
            chosen.append(seed)
    return chosen


def reach_rank(maddr: str) -> int:
    """0: anybody can dial it; 1: through a relay; 2: in the same network; 3: on this machine only."""
    if "/p2p-circuit" in maddr:
        return 1
    parts = maddr.split("/")
    try:
        address = ipaddress.ip_address(parts[2])
    except (ValueError, IndexError):
        return 0  # a name: its owner knows what it means
    if address.is_loopback or address.is_unspecified:
        return 3
    return 0 if address.is_global else 2


def _token(spec: RunSpec, me: Identity, options: InviteOptions, expires: int, kept: Invite | None) -> Token | None:
    if spec.admission.mode != "invite":
        return None
    if spec.owner == me.peer_id:
        return make_token(spec.id, me, os.urandom(32), expires, options.name, options.members)
    if kept is not None and kept.token:
        return kept.token[0]
    raise ConfigError("only the owner of this run can make permits", hint=f"ask {spec.owner} for an invite")
