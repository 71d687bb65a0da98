"""Values as people read them, and as scripts do. Pure but for `print_json`, `print_table` and `give_report`."""

import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import counted
from atoll.protocols.ids import short
from atoll.protocols.local.control_messages import Goodput, Room, RoundStatus, SentPerRound, Status, TimeShares

WORTH_PERCENT = 0.05
"""Smallest share of time that is shown: less would be printed as 0.0."""
LASTING = ("training", "observing", "finished")
"""Activities that are what the node is there for: nobody waits for their end."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def print_json(value: Any) -> None:
    """One line of JSON on stdout; bytes as hex."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    click.echo(msgspec.json.encode(_hexed(plain)).decode())


def give_report(report: Any, show: Callable[[], None], *, as_json: bool, report_file: Path | None) -> None:
    """What `--json` and `-o FILE` do with a report (options.py); `show` prints it for people. Raises DiskFault."""
    if report_file is not None:
        write_whole(report_file, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if as_json:
        print_json(report)
    else:
        show()


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Left-aligned columns on stdout, two blanks between."""
    lines = [list(head), *map(list, rows)]
    widths = [max(columns_of(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        padded = (cell + " " * (width - columns_of(cell)) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def columns_of(text: str) -> int:
    """Columns of a terminal that a text takes: two for a wide letter, none for a mark over another one."""
    marks = sum(unicodedata.category(letter) in ("Mn", "Me") for letter in text)
    return len(text) - marks + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


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


def _hexed(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hexed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hexed(item) for item in value]
    return value


def place_in_run(now: Status) -> str:
    """`round 7 of 54`, counted from 0; `all 54 rounds` once they are trained."""
    done = now.activity in ("done", "finished")
    return f"all {now.rounds} rounds" if done else f"round {now.round} of {now.rounds}"


def progress_parts(now: Status) -> list[str]:
    """How far the work is that the node waits for, and how long the state lasts, or that nobody knows."""
    parts, work = list[str](), now.progress
    if work is not None and work.of_bytes:
        share = (work.done_bytes or 0) / work.of_bytes
        parts.append(f"{size(work.done_bytes)} of {size(work.of_bytes)} ({share:.0%})")
    if work is not None:
        parts.append(f"{span(work.took_s)} so far")
    if now.eta_s is not None:
        parts.append(f"about {span(now.eta_s)} left")
    elif now.activity not in LASTING:
        parts.append("time left unknown")
    return parts


def called(peer: str, name: str) -> str:
    """`…FhPUSkaS otter`: the tail of a PeerID, then what it announces itself as, which is no identity."""
    return f"…{short(peer)} {name}".rstrip()


def members_line(now: Status) -> str:
    """`4 members, 3 connections (2 direct, 1 relayed)`."""
    ways = ", ".join(f"{count} {path}" for path, count in sorted(now.paths.items()) if count)
    known = f"{counted(now.members, 'member')}, {counted(now.peers, 'connection')}"
    return known + (f" ({ways})" if ways else "")


def trains(now: Status) -> bool:
    """Whether the node trains by its roles."""
    return not now.roles or "train" in now.roles


def audits(now: Status) -> str:
    """`audits 30 adopted / 12 made`: those for which an evaluator's finding served, and those measured here."""
    assert now.standing
    made, adopted = now.standing.audits_made or 0, now.standing.audits_adopted or 0
    return f"audits {adopted:,} adopted / {made:,} made" if trains(now) else f"made {counted(made, 'audit')}"


def gives(now: Status) -> str:
    """`trained 122,880 tokens, validated 3 rounds, served 1.5 MB`: what the node gave since its daemon started."""
    told = [f"trained {counted(now.tokens, 'token')}"] if trains(now) else []
    told += [f"validated {counted(now.validated, 'round')}"] if now.validated or "evaluate" in now.roles else []
    told += [audits(now)] if now.standing and now.standing.audits_made is not None else []
    told += [f"served {size(now.blob_bytes_up)}"] if now.roles != ("relay",) else []
    told += [f"relayed {size(now.relay.bytes_relayed)}"] if now.relay else []
    return ", ".join(told)


def validation_line(now: Status) -> str:
    """`2.412 bits per byte of round 17, by …FhPUSkaS otter`; of this node's own nobody is named."""
    of = "" if now.val_round is None else f" of round {now.val_round}"
    by = f", by {called(now.val_by, now.names.get(now.val_by, ''))}" if now.val_by else ""
    return f"{number(now.val_bpb)} bits per byte{of}{by}"


def agreed_line(final: int, digest: str, contributors: Sequence[str]) -> str:
    """`final round 5, digest cdcdcdcdcdcdcdcd by 4`; says so where none is final yet."""
    if not digest:
        return "no round is final yet" if final < 0 else f"final round {final}"
    return f"final round {final}, digest {digest[:16]} by {len(contributors)}"


def room_text(room: Room) -> str:
    """The number of experts that a node offers to train, and the reason of it."""
    where = "of free memory" if room.place == "memory" else f"free on {room.place}"
    why = f"from {size(room.free_bytes)} {where}" if room.place else "`experts` in config.toml"
    return f"room for {room.experts} of {room.of} experts ({why})"


def sent_line(sent: SentPerRound | None) -> str:
    """`41.4 kB a round and node: 2.10 payloads, 53 × below fp32 weights; a copy costs 1.003 × the payload`."""
    if sent is None:
        return "–"
    per_round = f"{size(sent.bytes)} a round and node: {sent.payloads:.2f} payloads"
    return (
        f"{per_round}, {sent.below_fp32:.0f} × below fp32 weights; a copy costs {sent.per_copy:.3f} × the payload"
    )


def percents(shares: Mapping[str, Any]) -> dict[str, float]:
    """Each share of time in percent of all of them, by name without its unit; empty when no time went by."""
    seconds = {name.removesuffix("_s"): shares[name] for name in TimeShares.__struct_fields__}
    whole_s = sum(seconds.values())
    return {name: 100 * value_s / whole_s for name, value_s in seconds.items()} if whole_s > 0 else {}


def steps_share(times: RoundStatus | TimeShares | None) -> str:
    """The share of time in steps that count, as `93.1 %`; a dash when nothing is known."""
    shares = percents(msgspec.structs.asdict(times)) if times else {}
    return f"{shares['steps']:.1f} %" if shares else "–"


def goodput_line(goodput: Goodput | None) -> str:
    """`93.1 % of the last 10 m 00 s: wait 4.0, fold 1.9, encode 0.6`."""
    if goodput is None or goodput.window_s <= 0:
        return "–"
    shares = percents(msgspec.structs.asdict(goodput.window))
    del shares["steps"]
    rest = sorted(shares.items(), key=lambda share: -share[1])
    lost = ", ".join(f"{name} {percent:.1f}" for name, percent in rest if percent >= WORTH_PERCENT)
    return f"{steps_share(goodput.window)} of the last {span(goodput.window_s)}" + (f": {lost}" if lost else "")
