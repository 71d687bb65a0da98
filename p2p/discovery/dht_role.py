"""Which part a node plays in the DHT: none, a client that only asks and announces, or a server. Pure."""

from enum import StrEnum
from typing import Literal, NamedTuple

from atoll.protocols.nat import Reach

Setting = Literal["auto"] | bool


class Role(StrEnum):
    """What a node does in the DHT."""

    OFF = "off"
    CLIENT = "client"
    SERVER = "server"


class Part(NamedTuple):
    """A role, and the reason of it in a few words."""

    role: Role
    why: str


def choose_part(setting: Setting, reach: Reach, *, is_public: bool, has_bootstrap: bool) -> Part:
    """The part of a node whose run is public or not. A server must be dialled by peers that it never met."""
    if setting is False:
        return Part(Role.OFF, "switched off")
    if setting is True:
        can_serve = reach in ("public", "unknown")
        return Part(Role.SERVER if can_serve else Role.CLIENT, f"switched on; reachability: {reach}")
    if not is_public:
        return Part(Role.OFF, "the run is private")
    if reach in ("public", "punchable"):
        return Part(Role.SERVER if reach == "public" else Role.CLIENT, f"this node is {reach}")
    if has_bootstrap:
        return Part(Role.CLIENT, "dht_bootstrap is given")
    return Part(Role.OFF, "no peer has shown yet that this node is public or punchable")
