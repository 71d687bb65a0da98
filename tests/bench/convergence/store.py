"""What was trained already: one JSON line for each finished arm, so that a bench of hours can end and go on.

A line counts again only for the same setting and the same code: the digest of all that trains, encodes and folds.
Most changes of code leave every bit of a training as it was. Who has seen that, by training some lines again, may
name older codes whose lines count too.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import msgspec
import torch

import atoll.node.learning
import atoll.node.worker
import atoll.protocols.run
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import digest
from atoll_bench.convergence import trial
from atoll_bench.convergence.arms import Arm
from atoll_bench.convergence.trial import Point

FILE = "convergence.jsonl"
_ROOMS = (atoll.node.learning, atoll.node.worker, atoll.protocols.run)


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished arm."""

    key: str
    """`Arm.key` as it was when the arm was trained."""
    code: str
    """`code_name` of that time."""
    arm: Arm
    points: tuple[Point, ...]
    parameters: int
    cpu_s: float
    """CPU time of the process; that of a busy machine is longer."""
    device: str = "cpu"
    torch: str = ""
    failed: str = ""
    """Why it ended early; empty if it did not."""

    @property
    def val_bpb(self) -> float:
        """Validation loss at the end, bits per byte; infinite for an arm that failed."""
        return float("inf") if self.failed else self.points[-1].val_bpb


@cache
def code_name() -> str:
    """A short name of the sources that the result depends on; the settings are in the key of an arm."""
    rooms = [Path(next(iter(room.__path__))) for room in _ROOMS]
    files = [(path.relative_to(room), path) for room in rooms for path in sorted(room.rglob("*.py"))]
    files.append((Path("trial.py"), Path(trial.__file__)))
    parts = (part for name, path in files for part in (str(name).encode(), digest(path.read_bytes())))
    return digest(*parts).hex()[:12]


def line_of(
    arm: Arm, points: Sequence[Point], *, parameters: int, cpu_s: float, device: str, failed: str = ""
) -> Line:
    """The line of an arm that was trained just now."""
    return Line(
        key=arm.key,
        code=code_name(),
        arm=arm,
        points=tuple(points),
        parameters=parameters,
        cpu_s=round(cpu_s, 1),
        device=device,
        torch=str(torch.__version__),
        failed=failed,
    )


def read_lines(path: Path) -> list[Line]:
    """All lines of a file, in the order in which they were written; none if it is not there.

    Raises DecodeError for a line that is none, unless it is a last one that was cut off by a crash; DiskFault.
    """
    with disk(path):
        data = path.read_bytes() if path.exists() else b""
    found: list[Line] = []
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            found.append(msgspec.json.decode(text, type=Line))
        except msgspec.MsgspecError as error:
            raise DecodeError(f"{path}, line {number}: {error}", hint="remove the line") from error
    return found


def add_line(path: Path, line: Line) -> None:
    """Append a line in one write: two processes may share a file. Raises DiskFault."""
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        with path.open("ab", buffering=0) as file:
            if is_cut:
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
            file.write(msgspec.json.encode(line) + b"\n")


def reusable(lines: Iterable[Line], device: str, codes: Sequence[str] = ()) -> dict[Arm, Line]:
    """Lines of this device, and of this code or one of `codes`, whose RunSpec still follows from their arm."""
    good = {code_name(), *codes}
    own = (line for line in lines if line.code in good and line.device == device)
    return {line.arm: line for line in own if line.key == line.arm.key}


def check_codes(lines: Iterable[Line], codes: Sequence[str]) -> None:
    """Raise ConfigError for a code that trained none of the lines."""
    known = sorted({line.code for line in lines})
    for code in codes:
        if code not in known:
            raise ConfigError(
                f"--codes {code}: no stored line has it", hint=f"use some of {', '.join(known) or 'none'}"
            )
