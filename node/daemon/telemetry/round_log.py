"""What happened in each round on this node: one row per round, and a journal of events.

Rows live in memory and in `rounds.jsonl` (a line each time a row changed; the last line of a round
counts). Telemetry only: nothing that a run computes is read from here.
"""

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec

from atoll.node.daemon.telemetry.goodput import Shares, add, take_back
from atoll.p2p.system.atomic_files import disk, write_whole
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.local.worker_messages import TrainReply

log = logging.getLogger(__name__)

KEEP_ROWS = 10_000
JOURNAL_BYTES = 16 << 20
"""A longer journal is set aside as `events.1.jsonl` at the next start, in place of the one before."""


@dataclass(slots=True)
class RoundRecord:
    """One round as this node saw it. Times in seconds, losses in nats per token, bpb in bits per byte."""

    round: int
    peer: str
    digest: str = ""
    """State digest: of Θ_final once final, of the view at closing before."""
    set: str = ""
    final: bool = False
    contributors: list[str] = field(default_factory=list)
    train_loss: float | None = None
    val_bpb: float | None = None
    steps: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    blob_bytes_up: int = 0
    blob_payload_up: int = 0
    train_s: float = 0.0
    """From the first of our inner steps to the last, folds between them included."""
    overlap_allowed: int = 0
    """Steps that might be taken before the fold of the round before was in."""
    overlapped: int = 0
    """Steps that were."""
    held_s: float = 0.0
    """How long the worker then waited for that fold; a part of `wait_s` and `transfer_s`."""
    steps_s: float = 0.0
    """This and what follows: shares of the time from the start of this round's training to the next one's."""
    wait_s: float = 0.0
    transfer_s: float = 0.0
    encode_s: float = 0.0
    fold_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluate_s: float = 0.0
    recompute_s: float = 0.0
    start_s: float = 0.0
    down_s: float = 0.0


class RoundLog:
    """Owns the rows and the two files."""

    def __init__(self, folder: Path, peer: PeerId, wall: Callable[[], float]) -> None:
        """`wall`: seconds since 1970, for people's logs only. Raises DiskFault."""
        self._peer, self._wall = peer, wall
        self.rows: dict[int, RoundRecord] = {}
        self.newest_payload: tuple[int, int] | None = None
        """Round and bytes of the newest payload that this daemon's worker made."""
        self.tokens = 0
        """That this daemon's worker trained on, in rounds that it finished."""
        self._at_hand: int | None = None
        """Round whose row the time goes to: the newest one whose training began."""
        self._moved = (0, 0, 0, 0)
        path = folder / "rounds.jsonl"
        with disk(folder):
            self._load(path)
            self._rows_file: TextIO = path.open("a", encoding="utf-8")
            journal = folder / "events.jsonl"
            if journal.exists() and journal.stat().st_size > JOURNAL_BYTES:
                journal.replace(folder / "events.1.jsonl")
            self._events_file: TextIO = journal.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the files, once. What a full disk refused is lost."""
        if self._at_hand is not None:
            self._save(self._at_hand)
            self._at_hand = None
        for file in (self._rows_file, self._events_file):
            with contextlib.suppress(OSError):
                file.close()

    def event(self, name: str, **facts: Any) -> None:
        """One line in the journal: a stable snake_case name and its facts."""
        line = json.dumps({"time": round(self._wall(), 3), "event": name, **facts}, default=str)
        self._write(self._events_file, line)
        log.info("%s %s", name, " ".join(f"{key}={value}" for key, value in facts.items()))

    def training(self, number: Round) -> None:
        """Training of a round starts: from now on the time goes to its row.

        Steps that an earlier start of the same round left there without a payload were in vain.
        """
        if self._at_hand is not None:
            self._save(self._at_hand)
        self._at_hand = number
        row = self._row(number)
        if not row.payload_bytes:
            take_back([row], row.steps_s)
        self.event("training", round=number)

    def spend(self, shares: Shares, lost_s: float) -> None:
        """Time went by; `lost_s` of the newest steps were in vain. Written with the row's next change."""
        if self._at_hand is None:
            return
        add(self._row(self._at_hand), shares)
        if lost_s > 0.0:
            take_back((self.rows[at] for at in sorted(self.rows, reverse=True) if at <= self._at_hand), lost_s)

    def trained(self, done: TrainReply, overlap_allowed: int) -> None:
        """Our own work of a round is encoded, and being saved."""
        row = self._row(done.pending.round)
        row.train_loss, row.steps, row.tokens = done.pending.loss, done.pending.steps, done.pending.tokens
        row.train_s, row.payload_bytes = done.train_s, done.payload_bytes
        row.overlap_allowed, row.overlapped, row.held_s = overlap_allowed, done.overlapped, done.held_s
        self.newest_payload = (row.round, row.payload_bytes)
        self.tokens += row.tokens
        self._save(row.round)
        self.event("trained", round=row.round, steps=row.steps)

    def kept(self, number: Round) -> None:
        """Our own work of a round is safe on the disk."""
        self.event("kept", round=number)

    def closed(
        self,
        number: Round,
        members: Digest,
        state: Digest,
        authors: list[PeerId],
        moved: tuple[int, int, int, int],
    ) -> None:
        """The round closed here, or its set grew. `moved`: totals up, down, blob up, blob contents up."""
        row = self._row(number)
        if not row.final:
            row.digest, row.set, row.contributors = state.hex(), members.hex(), sorted(authors)
        row.bytes_up += moved[0] - self._moved[0]
        row.bytes_down += moved[1] - self._moved[1]
        row.blob_bytes_up += moved[2] - self._moved[2]
        row.blob_payload_up += moved[3] - self._moved[3]
        self._moved = moved
        self._save(number)
        self.event("closed", round=number, state=state.hex()[:16], contributors=len(authors))

    def finalized(self, number: Round, members: Digest, state: Digest, authors: list[PeerId]) -> None:
        """The round is final here. After a restart it is said again, and written once."""
        row = self._row(number)
        if row.final and row.digest == state.hex():
            return
        row.final, row.digest, row.set, row.contributors = True, state.hex(), members.hex(), sorted(authors)
        self._save(number)
        self.event("final", round=number, state=state.hex()[:16], contributors=len(authors))

    def evaluated(self, number: Round, val_bpb: float) -> None:
        """Validation loss of the view after this round."""
        self._row(number).val_bpb = val_bpb
        self._save(number)
        self.event("evaluated", round=number, val_bpb=round(val_bpb, 4))

    def newest_closed(self) -> RoundRecord | None:
        """The row of the highest round with a state."""
        return self._newest(lambda row: bool(row.digest))

    def newest_trained(self) -> RoundRecord | None:
        """The row of the highest round that this node worked in."""
        return self._newest(lambda row: row.payload_bytes > 0)

    def newest_bpb(self) -> float | None:
        """The newest validation loss, bits per byte."""
        row = self._newest(lambda row: row.val_bpb is not None)
        return row.val_bpb if row else None

    def _newest(self, wanted: Callable[[RoundRecord], bool]) -> RoundRecord | None:
        return next(
            (self.rows[number] for number in sorted(self.rows, reverse=True) if wanted(self.rows[number])), None
        )

    def _row(self, number: int) -> RoundRecord:
        if number not in self.rows:
            self.rows[number] = RoundRecord(number, self._peer)
            while len(self.rows) > KEEP_ROWS:
                del self.rows[min(self.rows)]
        return self.rows[number]

    def _save(self, number: int) -> None:
        self._write(self._rows_file, json.dumps(asdict(self._row(number))))

    @staticmethod
    def _write(file: TextIO, line: str) -> None:
        """Telemetry must never stop a node: a full disk loses lines here, and is reported where it matters."""
        try:
            file.write(line + "\n")
            file.flush()
        except OSError:
            return

    def _load(self, path: Path) -> None:
        """Read the rows. A file that is mostly rows written again later is written anew."""
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            try:
                row = msgspec.json.decode(line, type=RoundRecord)
            except msgspec.MsgspecError:
                continue
            self.rows[row.round] = row
        for number in sorted(self.rows)[:-KEEP_ROWS]:
            del self.rows[number]
        if len(lines) > 100 + 2 * len(self.rows):
            kept = "".join(f"{json.dumps(asdict(self.rows[number]))}\n" for number in sorted(self.rows))
            with contextlib.suppress(DiskFault):
                write_whole(path, kept.encode())
