"""Checks how many experts fit into this machine, and whether the members together have room for all of them."""

from collections.abc import Iterator

import msgspec

from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.rounds.queries import MORE_ROOM
from atoll.node.doctor.checks import DoctorCheck, DoctorInput, Finding
from atoll.node.runs.capacity.free_resources import measure_room, trained_of
from atoll.node.runs.capacity.join_preview import MEMBERS
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.control_messages import Room

GB = 1e9
MORE_MEMORY = 'close other programs, or store the others\' experts narrow: frozen = "int8" in config.toml'


def experts(given: DoctorInput) -> Iterator[Finding]:
    """Room for experts of the running node, or what it would offer now; nothing if members train all of them."""
    room = available_room(given)
    if room is not None:
        yield room_finding(room, str((given.status or {}).get("shortage") or ""))


def room_finding(room: Room, shortage: str) -> Finding:
    """Judge room for experts; `shortage` says why the members cannot train all of them, empty if unknown."""
    why = f"from {(room.free_bytes or 0) / GB:.1f} GB free" if room.place else "as config.toml says"
    text = f"room for {room.experts} of {room.of} experts ({why})"
    if shortage:
        return Finding("experts", "warn", f"{text}; of all members {shortage}", MORE_ROOM)
    if not room.experts:
        return Finding("experts", "warn", f"{text}: this node trains only what all members train", MORE_MEMORY)
    return Finding("experts", "pass", text)


def available_room(given: DoctorInput) -> Room | None:
    """Room of the running node, else of this machine for the run; None if its members do not share experts."""
    if given.status is not None:
        found = given.status.get("room")
        return msgspec.convert(found, Room) if found else None
    if given.run is None or not splits(given.run):
        return None
    return measure_room(given.run, config_or_cpu(given), given.home.root)


def trained_experts(given: DoctorInput) -> int | None:
    """How many experts of each layer this node would train in the run; None for all."""
    if given.run is None or not splits(given.run):
        return None
    members = int((given.status or {}).get("members") or MEMBERS)
    return trained_of(given.run, available_room(given), max(members, given.run.pace.min_members))


def config_or_cpu(given: DoctorInput) -> NodeConfig:
    """The configuration; if it cannot be read, one that computes on the CPU."""
    return given.config or NodeConfig(device="cpu", threads=1)


CHECKS = (DoctorCheck("experts", 15.0, experts),)
