"""Finds a run: in a file, in this home by its name or the start of its id, or at the seeds of an invite."""

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.node.config.home import Home
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.swarm.run_fetch import fetch_run
from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import ConfigError, PeerFault, Unreachable
from atoll.protocols.ids import RunId
from atoll.protocols.run.run_spec import RunSpec, open_run

MIN_ID_CHARACTERS = 4
PATH_MAX_BYTES = 1 << 16
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 30.0
"""Between two rounds of asking the seeds of an invite."""
_AGAIN = "ask the run's owner for the file again, and copy it whole"
_OTHER_WAYS = "an invite begins with `atoll:`; `atoll run list` has the runs of this home"


class FoundRun(NamedTuple):
    """A verified run and the signed bytes it came from."""

    spec: RunSpec
    data: bytes
    path: Path


def read_run(path: Path) -> FoundRun:
    """The run in a `.run` file. Raises ConfigError."""
    data = read_whole(path, max_bytes=MESSAGE_MAX_BYTES)
    if data is None:
        raise ConfigError(f"there is no run file {path}")
    try:
        return FoundRun(open_run(data), data, path)
    except PeerFault as error:
        raise ConfigError(
            f"{path} is not a run that this node can train: {error}", hint=error.hint or _AGAIN
        ) from error


def parse_run(home: Home, data: bytes) -> FoundRun:
    """The run in these bytes, with the path that it will have here. Raises ConfigError."""
    try:
        spec = open_run(data)
    except PeerFault as error:
        raise ConfigError(f"this is not a run that this node can train: {error}", hint=error.hint) from error
    return FoundRun(spec, data, home.run_file(file_name(spec.name)))


def keep_text_path(home: Home, run: RunId, path: str) -> None:
    """Remember where this machine has its copy of a run's text. Raises DiskFault."""
    whole = str(Path(path).expanduser().absolute())
    if text_path(home, run) != whole:
        write_whole(home.data_path(run), whole.encode(errors="surrogateescape"))


def text_path(home: Home, run: RunId, chosen: str = "") -> str:
    """`chosen`, else the path that was remembered; empty if there is none. Raises ConfigError, DiskFault."""
    found = None if chosen else read_whole(home.data_path(run), max_bytes=PATH_MAX_BYTES)
    return chosen or (found or b"").decode(errors="surrogateescape")


def unread_text(spec: RunSpec, chosen: str) -> str:
    """That nobody reads a path that was given, since the run's text comes with atoll; else empty."""
    is_needless = bool(chosen) and spec.data.source.startswith(("builtin:", "synthetic:"))
    return f"{chosen} is not read: the text of this run is {spec.data.source}" if is_needless else ""


def run_with_id(home: Home, run: RunId) -> FoundRun | None:
    """The run of this home with exactly this id; None if there is none."""
    return next((found for found in runs_of(home) if found.spec.id == run), None)


def runs_of(home: Home) -> list[FoundRun]:
    """All readable runs of this home, sorted by name. Each unreadable one costs a line on stderr."""
    found = []
    for path in sorted(home.runs.glob("*.run")):
        try:
            found.append(read_run(path))
        except ConfigError as error:
            sys.stderr.write(f"left out: {error.line()}\n")
    return found


def find_run(home: Home, wanted: str | None) -> FoundRun:
    """`wanted`: a path, a name, or the first characters of an id; None: the only run here. Raises ConfigError."""
    if wanted is None:
        return _only(runs_of(home))
    if (named := home.run_file(wanted)).is_file() and "/" not in wanted:
        return read_run(named)
    if Path(wanted).is_file():
        return read_run(Path(wanted))
    if "/" in wanted or wanted.endswith(".run"):
        raise ConfigError(f"there is no run file {wanted}", hint=_OTHER_WAYS)
    known = runs_of(home)
    near = [
        run for run in known if len(wanted) >= MIN_ID_CHARACTERS and run.spec.id.hex().startswith(wanted.lower())
    ]
    if len(near) == 1:
        return near[0]
    raise ConfigError(f"no run is called {wanted!r} here", hint=_known(known))


async def fetch_until_found(
    host: Host, seeds: Sequence[PeerAddress], run: RunId, report: Callable[[str], None]
) -> bytes:
    """The verified `.run` file of `run`: seeds that fail are asked again, with back-off, until one has it.

    `report` receives one line after each round of failures.
    """
    failures = 0
    while True:
        try:
            return await fetch_run(host, seeds, run)
        except Unreachable as error:
            failures += 1
            pause_s = backoff_s(failures, first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
            report(f"{error.line()}; trying again in {pause_s:.0f} s (Ctrl-C to stop)")
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))


def check_name(home: Home, run: FoundRun) -> Path:
    """Path of the run's file in this home. Raises ConfigError if another run has its name here."""
    path = home.run_file(file_name(run.spec.name))
    if path.exists() and read_run(path).spec.id != run.spec.id:
        raise ConfigError(f"another run is called {run.spec.name!r} here", hint=f"move {path} away")
    return path


def store_run(home: Home, run: FoundRun) -> None:
    """Write a run that came as a file or by invite into this home. Raises ConfigError if its name is taken."""
    path = check_name(home, run)
    if not path.exists():
        write_whole(path, run.data)


def file_name(name: str) -> str:
    """A run's name where it is a legal file name. Raises ConfigError."""
    if name.startswith(".") or any(letter in name for letter in '/\\:*?"<>|'):
        raise ConfigError(f"the run's name {name!r} cannot be a file name")
    return name


def _only(known: list[FoundRun]) -> FoundRun:
    if len(known) == 1:
        return known[0]
    if not known:
        raise ConfigError(
            "there is no run in this home", hint="make one with `atoll run new NAME`, or give --run FILE"
        )
    raise ConfigError("there is more than one run here", hint=f"say which one: --run NAME; {_known(known)}")


def _known(known: list[FoundRun]) -> str:
    names = ", ".join(run.spec.name for run in known)
    return f"known runs: {names}" if names else "make one with `atoll run new NAME`, or give --run FILE"
