"""Reads what a node left behind in its home. A home is only read: the ledger and the saved state from copies.

The node must not run while its home is read, or be stopped (SIGSTOP), or the home be a copy of its disk.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from atoll.node.checkpoint.local import LocalBody
from atoll.node.config.home import Home
from atoll.node.daemon.telemetry.round_log import read_rows
from atoll.node.import_export.export_run import load_saved
from atoll.node.ipc.worker_pipe import WORKER_LOG
from atoll.node.worker.error_feedback import LOST_FEEDBACK
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.membership.reputation import BANNED
from atoll.p2p.system.atomic_files import disk
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import AtollError, ConfigError
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Entry
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.run.run_spec import RunSpec, open_run

_ALL = 1 << 40
"""More entries than any ledger holds."""


class History(NamedTuple):
    """What one node left behind in one run."""

    name: str
    """Of its home."""
    spec: RunSpec
    peer: PeerId
    rows: tuple[RoundStatus, ...]
    """Each line of its round log, in order: several of one round, of which the last counts."""
    entries: tuple[Entry, ...]
    """Its ledger, in the order of arrival."""
    orphans: tuple[Entry, ...]
    """Entries of `forked` that no feed of its ledger holds (p2p/exchange/orphans.py)."""
    forked: frozenset[PeerId]
    """Authors of which it has a proof that they signed two histories."""
    saved: LocalBody | None
    """Body of its worker's saved state, whose weights have the digest that it names; None before the first."""
    damage: str
    """Why what it saved cannot be used; empty where it can."""
    whole: frozenset[Digest]
    """Its own payloads on disk that have their hash."""
    banned: tuple[str, ...]
    """Lines of its log about peers that it banned."""
    lost_feedback: int
    """How often its worker found its error feedback older than what it had sent, and dropped it."""


def read_homes(folder: Path) -> list[History]:
    """The histories of all homes in `folder`. Raises ConfigError where there is none."""
    homes = sorted(path.parent for path in folder.glob("*/identity.key"))
    found = [read_home(home) for home in homes if any((home / "runs").glob("*/rounds.jsonl"))]
    if not found:
        raise ConfigError(f"{folder} holds no home of a node that began a run")
    if len({history.spec.id for history in found}) > 1:
        raise ConfigError(f"the homes in {folder} are of different runs")
    return found


def read_home(root: Path) -> History:
    """What the node of this home left behind in its only run. Raises ConfigError, DiskFault, LocalFault."""
    home = Home(root)
    spec = _only_run(home)
    folder = home.run(spec.id)
    with tempfile.TemporaryDirectory(prefix="atoll-oracle-") as scratch:
        entries, orphans, forked = _read_ledger(folder, spec, Path(scratch))
        saved, damage = _read_saved(folder, spec, Path(scratch))
    return History(
        name=root.name,
        spec=spec,
        peer=load_or_create(home.identity).peer_id,
        rows=_rows(folder / "rounds.jsonl"),
        entries=entries,
        orphans=orphans,
        forked=forked,
        saved=saved,
        damage=damage,
        whole=frozenset(_whole_payloads(folder / "spool")),
        banned=tuple(_banned(home)),
        lost_feedback=_text(folder / WORKER_LOG).count(LOST_FEEDBACK),
    )


def _only_run(home: Home) -> RunSpec:
    specs = [open_run(path.read_bytes()) for path in sorted(home.runs.glob("*.run"))]
    begun = [spec for spec in specs if home.run(spec.id).is_dir()]
    if len(begun) != 1:
        raise ConfigError(f"{home.root} holds {len(begun)} runs that began; the oracle reads homes with one")
    return begun[0]


def _read_ledger(
    folder: Path, spec: RunSpec, scratch: Path
) -> tuple[tuple[Entry, ...], tuple[Entry, ...], frozenset[PeerId]]:
    path = folder / LEDGER_FILE
    with disk(path):
        for file in (path, path.with_name(f"{LEDGER_FILE}-wal")):
            if file.exists():
                shutil.copy(file, scratch)
    if not (scratch / LEDGER_FILE).exists():
        return (), (), frozenset()
    ledger = Ledger(scratch / LEDGER_FILE, spec.id)
    try:
        entries = tuple(entry for _, entry in ledger.since(0, _ALL))
        return entries, tuple(ledger.orphans()), ledger.equivocators()
    finally:
        ledger.close()


def _read_saved(folder: Path, spec: RunSpec, scratch: Path) -> tuple[LocalBody | None, str]:
    with disk(folder):
        if (folder / "state").is_dir():
            shutil.copytree(folder / "state", scratch / "state")
    try:
        found = load_saved(spec, scratch)
    except AtollError as error:
        return None, error.line()
    return (None, "") if found is None else (found.body, "; ".join(found.report))


def _rows(path: Path) -> tuple[RoundStatus, ...]:
    with disk(path):
        return tuple(read_rows(path))


def _whole_payloads(spool: Path) -> Iterator[Digest]:
    with disk(spool):
        for path in spool.glob("*.payload"):
            blob = manifest_of_bytes(path.read_bytes()).id
            if blob.hex() == path.stem:
                yield blob


def _banned(home: Home) -> Iterator[str]:
    for path in sorted(home.root.glob(f"{home.log.name}*")):
        for line in _text(path).splitlines():
            if BANNED in line:
                yield _message(line)


def _message(line: str) -> str:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return line
    return str(found.get("message", line))


def _text(path: Path) -> str:
    with disk(path):
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
