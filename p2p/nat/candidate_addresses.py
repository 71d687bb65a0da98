"""Multiaddrs of a peer sorted by what they are good for, and our own in the order in which others should try."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.p2p.host.endpoint import is_global, is_loopback
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import PeerId
from atoll.protocols.nat import peer_named

PUBLISHED = 16
CIRCUITS = 4
_CIRCUIT = "/p2p-circuit"


@dataclass(frozen=True, slots=True)
class CandidateAddresses:
    """Where a peer may be met."""

    direct: tuple[str, ...]
    through: Mapping[PeerId, tuple[str, ...]] = field(default_factory=dict)
    """Peer that it is connected to -> where that one may be dialled; empty where it is not said."""


def split(maddrs: Sequence[str]) -> CandidateAddresses:
    """Direct addresses and circuits (`…/p2p/RELAY/p2p-circuit`) apart.

    Circuits through a relay that cannot be one of us (its PeerID is no Ed25519 key) are left out.
    """
    direct = []
    through: dict[PeerId, tuple[str, ...]] = {}
    for maddr in maddrs:
        if not maddr.endswith(_CIRCUIT):
            direct.append(maddr)
            continue
        where, _, relay = maddr.removesuffix(_CIRCUIT).rpartition("/p2p/")
        try:
            helper = peer_named(relay)
        except DecodeError:
            continue
        known = through.get(helper, ())
        through[helper] = (*known, where) if where and where not in known else known
    return CandidateAddresses(tuple(direct), through)


def circuits_through(dialled: Mapping[PeerId, str], relays: Collection[PeerId] = ()) -> tuple[str, ...]:
    """Circuit addresses of ours through public peers that we dialled there; those known to relay first."""
    best = sorted(dialled.items(), key=lambda item: item[0] not in relays)
    return tuple(f"{maddr}/p2p/{peer}{_CIRCUIT}" for peer, maddr in best[:CIRCUITS])


def publishable(listen: Sequence[str], reached: Sequence[str], circuits: Sequence[str]) -> tuple[str, ...]:
    """Confirmed addresses first, then circuits, then those of our own network; loopback only where all is.

    A global listen address that no peer could dial back stays in: a firewall may let others through.
    """
    far = [maddr for maddr in listen if not is_loopback(maddr)]
    own = far or listen
    ordered = (*reached, *filter(is_global, own), *circuits, *own)
    return tuple(dict.fromkeys(ordered))[:PUBLISHED]
