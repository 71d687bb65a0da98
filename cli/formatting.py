"""Values as people read them, and as scripts do. Pure but for the two that print."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec

from atoll.protocols.local.control_messages import Room

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def print_json(value: Any) -> None:
    """One line of JSON on stdout; bytes as hex."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    click.echo(msgspec.json.encode(_hexed(plain)).decode())


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Left-aligned columns on stdout, two blanks between."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def size(count: float | None) -> str:
    """A number of bytes as `612 B` or `1.5 MB`; a dash for None."""
    if count is None:
        return "–"
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def span(seconds: float | None) -> str:
    """A duration as `85 ms`, `12.3 s`, `4 m 05 s`, `3 h 12 m` or `2 d 4 h`; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` decimals, or a dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def tail(peer: str) -> str:
    """A PeerID's last eight characters, as `protocols.ids.short` gives them."""
    return peer[-8:]


def _hexed(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hexed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hexed(item) for item in value]
    return value


def room_text(room: Room) -> str:
    """The number of experts that a node offers to train, and the reason of it."""
    where = "of free memory" if room.place == "memory" else f"free on {room.place}"
    why = f"from {size(room.free_bytes)} {where}" if room.place else "`experts` in config.toml"
    return f"room for {room.experts} of {room.of} experts ({why})"
