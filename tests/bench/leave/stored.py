"""What `bench leave` measured before: a file for each chain of departures, so that a bench of hours can be ended.

A chain that was broken off is played again from its start: its swarm is gone.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.p2p.system.atomic_files import disk, write_whole
from atoll.protocols.errors import DecodeError
from atoll_bench.leave.departures import Cost, Departure, Way


class PlayedChain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chain of departures that was played to its end."""

    costs: tuple[Cost, ...]
    violations: tuple[str, ...]
    """What the oracle found in the homes of its members."""


def read_chain(folder: Path, chain: Sequence[Departure], way: Way) -> PlayedChain | None:
    """A chain that was played before; None if it was not. Raises DecodeError, DiskFault."""
    path = folder / _name(chain, way)
    with disk(path):
        data = path.read_bytes() if path.exists() else None
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=PlayedChain)
    except msgspec.MsgspecError as error:
        raise DecodeError(f"{path}: {error}", hint="remove the file") from error


def write_chain(folder: Path, chain: Sequence[Departure], way: Way, played: PlayedChain) -> None:
    """Keep a chain, whole or not at all. Raises DiskFault."""
    path = folder / _name(chain, way)
    with disk(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(played), indent=1) + b"\n")


def _name(chain: Sequence[Departure], way: Way) -> str:
    return f"{way}-{'-'.join(f'{gone}of{members}' for members, gone in chain)}.json"
