"""How many experts this machine has room for, and whether the members have room for all of them."""

from collections.abc import Iterator

import msgspec

from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.rounds.queries import MORE_ROOM
from atoll.node.doctor.checks import DoctorCheck, Finding, Patient
from atoll.node.runs.capacity.expert_capacity import trained_of
from atoll.node.runs.capacity.free_resources import room_here
from atoll.node.runs.capacity.join_preview import MEMBERS
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.control_messages import Room

GB = 1e9
MORE_MEMORY = 'close other programs, or store the others\' experts narrow: frozen = "int8" in config.toml'


def experts(patient: Patient) -> Iterator[Finding]:
    """What a running node says, else what it would offer now; nothing where all members train all."""
    room = room_found(patient)
    if room is not None:
        yield judge_room(room, str((patient.status or {}).get("shortage") or ""))


def judge_room(room: Room, shortage: str) -> Finding:
    """`shortage`: why the members cannot train all experts; empty where they can, or nobody runs."""
    why = f"from {(room.free_bytes or 0) / GB:.1f} GB free" if room.place else "as config.toml says"
    text = f"room for {room.experts} of {room.of} experts ({why})"
    if shortage:
        return Finding("experts", "warn", f"{text}; of all members {shortage}", MORE_ROOM)
    if not room.experts:
        return Finding("experts", "warn", f"{text}: this node trains only what all members train", MORE_MEMORY)
    return Finding("experts", "pass", text)


def room_found(patient: Patient) -> Room | None:
    """Of the node that runs; else of this machine in the patient's run, if its members share the experts."""
    if patient.status is not None:
        found = patient.status.get("room")
        return msgspec.convert(found, Room) if found else None
    if patient.run is None or not splits(patient.run):
        return None
    return room_here(patient.run, config_of(patient), patient.home.root)


def trained_found(patient: Patient) -> int | None:
    """Experts of each layer to count with in the patient's run; None: all."""
    if patient.run is None or not splits(patient.run):
        return None
    members = int((patient.status or {}).get("members") or MEMBERS)
    return trained_of(patient.run, room_found(patient), max(members, patient.run.pace.min_members))


def config_of(patient: Patient) -> NodeConfig:
    """The patient's; where it cannot be read, one that computes on the CPU."""
    return patient.config or NodeConfig(device="cpu", threads=1)


CHECKS = (DoctorCheck("experts", 15.0, experts),)
