"""How many experts of each layer a node offers to train: as many as its free memory holds. Pure.

Counted once, when the node starts: what it offers must not rise and fall with the worker's own memory. A tenth of
what is free is left alone, for other programs, and for the gaps that an allocator cannot use; what a step and a
validation need for a while is in the arithmetic itself (node/runs/capacity/memory_model.py).
"""

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import Literal

import msgspec

from atoll.node.config.devices import devices_of
from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.memory_model import Free, Needs, needs_of
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.control_messages import Room
from atoll.protocols.run.run_spec import RunSpec

SPARE = 0.1
"""Share of the free memory that is left alone."""
HOST = "memory"
Where = Literal["auto", "host", "device"]


def room_of(spec: RunSpec, config: NodeConfig, free: Free) -> Room | None:
    """Room for experts of each layer: as the user says, else as the fullest memory allows. None: all train all."""
    count = splits(spec)
    if not count:
        return None
    if config.experts:
        return Room(experts=min(config.experts, count), of=count)
    most = _most(spec, config, free.memory_bytes, attrgetter("host"))
    host = Room(experts=most, of=count, free_bytes=free.memory_bytes, place=HOST)
    if free.gpu_bytes is None:
        return host
    most = _most(spec, config, free.gpu_bytes, attrgetter("device"))
    device = Room(experts=most, of=count, free_bytes=free.gpu_bytes, place=devices_of(config.device)[0])
    return min(device, host, key=attrgetter("experts"))


def encoding_of(spec: RunSpec, config: NodeConfig, free: Free, room: Room) -> Where:
    """Where contributions are encoded: `config.exchange_on`, and for `auto` the host unless all offered experts
    fit beside error feedback and anchor. Experts come first."""
    if config.exchange_on != "auto" or free.gpu_bytes is None:
        return config.exchange_on
    there = needs_of(spec, msgspec.structs.replace(config, exchange_on="device"), room.experts).device
    return "auto" if there <= (1 - SPARE) * free.gpu_bytes else "host"


def offer_of(spec: RunSpec, config: NodeConfig, free: Free | None) -> tuple[Room | None, NodeConfig]:
    """The room for experts, and `config` with what follows from it. None, and `config`, if all members train all.

    `free`: what the machine has free when the node starts; None where nobody measured it.
    """
    if free is None or (room := room_of(spec, config, free)) is None:
        return None, config
    return room, msgspec.structs.replace(config, exchange_on=encoding_of(spec, config, free, room))


def share_of(spec: RunSpec, members: int) -> int:
    """Experts of each layer that one of so many members trains, at most, where all have room."""
    count = splits(spec)
    return -(-count * min(spec.outer.holders, members) // max(1, members))


def trained_of(spec: RunSpec, room: Room | None, members: int) -> int | None:
    """Experts that this node will train: as the user says, else its share up to its room. None: all."""
    if room is None:
        return None
    return min(room.experts, share_of(spec, members)) if room.place else room.experts


def _most(spec: RunSpec, config: NodeConfig, free: int, part: Callable[[Needs], int]) -> int:
    """Most experts whose needs fit into the free memory; 0 also if none fits. The needs rise with the experts."""

    def too_many(experts: int) -> bool:
        return part(needs_of(spec, config, experts)) > (1 - SPARE) * free

    return max(0, bisect_left(range(splits(spec) + 1), True, key=too_many) - 1)
