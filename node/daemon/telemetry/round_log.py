"""Records what happened in each round on this node: one row per round, and a journal of events.

Rows are in `rounds.jsonl`, the newest ones in memory too (round_rows.py).
This is telemetry only: nothing that a run computes is read from here.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atoll.node.daemon.telemetry.goodput import add, move_to_recompute
from atoll.node.daemon.telemetry.logfile import FewLines, Journal
from atoll.node.daemon.telemetry.round_rows import RoundRows
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import counted
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.registers import Validation
from atoll.protocols.local.contribution_forms import age_of
from atoll.protocols.local.control_messages import RoundStatus, SentPerRound, TimeShares
from atoll.protocols.local.worker_messages import StartReply, TrainReply

log = logging.getLogger(__name__)

LOG_FILE, JOURNAL_FILE = "rounds.jsonl", "events.jsonl"
FAULTS = "failed", "crashed", "not_saved"
"""Events of an end that was not in good order."""
OF_OTHERS = ("equivocation", "peer_fault")
"""Events about faults of others."""


class TrafficTotals(NamedTuple):
    """Bytes moved since the start of the node."""

    up: int
    down: int
    blobs_up: int
    """Blob transfers with their framing."""
    blob_contents_up: int
    blob_contents_down: int


class RoundLog:
    """Owns the rows and the two files."""

    def __init__(self, folder: Path, peer: PeerId, wall: Callable[[], float]) -> None:
        """`wall` gives seconds since 1970, which go to the journal only. Raises DiskFault."""
        self._wall = wall
        self.newest_payload: tuple[int, int] | None = None
        """Round and size in bytes of the newest payload that this daemon's worker made."""
        self.tokens = 0
        """Tokens that this daemon's worker trained on, in rounds that it finished."""
        self.listeners: list[Callable[[str, Mapping[str, Any]], None]] = []
        """Receive each event of the journal, once the rows have it. They neither wait nor raise."""
        self.on_closed: Callable[[bool], None] = lambda is_end_lost: None
        """Called by `close` with whether the disk refused the line that says what went wrong at the end."""
        self._is_end_lost = False
        self._current: int | None = None
        """Round whose row gets the time: the newest one whose training began."""
        self._moved = TrafficTotals(0, 0, 0, 0, 0)
        path = folder / LOG_FILE
        with disk(folder):
            self.rows = RoundRows(path, peer)
            """Known rows by round; `_row` gives one that may be changed."""
        self.journal = folder / JOURNAL_FILE
        self._journal, self._few = Journal(self.journal), {name: FewLines() for name in OF_OTHERS}

    def close(self) -> None:
        """Write the current row and close the files, once. Lines that a full disk refused are lost."""
        if self._current is not None:
            self._save(self._current)
            self._current = None
        self.rows.close()
        self._note_left_out(is_end=True)
        try:
            self._journal.close()
        except OSError:
            self.on_closed(self._is_end_lost)
        else:
            # Where it could not be made again, nothing was left to write.
            self.on_closed(self._is_end_lost and not self.journal.exists())

    def event(self, name: str, **facts: Any) -> None:
        """Write a line to the journal: a stable snake_case name and its facts.

        Of those of OF_OTHERS few an hour are written, and once how many were not (`equivocations_left_out`).
        """
        self._note_left_out()
        if name in OF_OTHERS and not self._few[name].takes(str(facts.get("peer"))):
            return
        self._journal.is_ending = self._journal.is_ending or name in (*FAULTS, "stopping")
        line = json.dumps({"time": round(self._wall(), 3), "event": name, **facts}, default=str)
        if not self._journal.write(line) and name in FAULTS:
            self._is_end_lost = True
        for listener in self.listeners:
            listener(name, facts)
        log.info("%s %s", name, " ".join(f"{key}={value}" for key, value in facts.items()))

    def training_started(self, number: Round) -> None:
        """Record that training of a round starts; its row gets the time from now on.

        Steps that an earlier start of the same round left there without a payload were in vain.
        """
        if self._current is not None:
            self._save(self._current)
        self._current = number
        self.rows.pin(number)
        row = self._row(number)
        if not row.payload_bytes:
            move_to_recompute([row], row.steps_s)
        self.event("training", round=number)

    def add_time(self, shares: TimeShares, lost_s: float) -> None:
        """Add time to the current row; `lost_s` of the newest steps were in vain. Written when the row changes."""
        if self._current is None:
            return
        add(self._row(self._current), shares)
        if lost_s > 0.0:
            # What is lost was not saved: it is of the newest rounds, which are in memory.
            move_to_recompute((row for row in self.rows.held() if row.round <= self._current), lost_s)

    def trained(self, done: TrainReply, overlap_allowed: int) -> None:
        """Record that our own work of a round is encoded, and being saved."""
        row = self._row(done.pending.round)
        row.train_loss = done.pending.loss
        row.steps = done.pending.steps
        row.tokens = done.pending.tokens
        row.train_s = done.train_s
        row.payload_bytes = done.payload_bytes
        row.overlap_allowed = overlap_allowed
        row.overlapped = done.overlapped
        row.held_s = done.held_s
        row.pulls = done.pulls
        self.newest_payload = (row.round, row.payload_bytes)
        self.tokens += row.tokens
        self._save(row.round)
        older = {"age": age} if (age := age_of(done.pending)) else {}
        self.event("trained", round=row.round, steps=row.steps, **older)

    def chain_changed(self, started: StartReply, ours: Iterable[Round]) -> None:
        """Record that the worker left a chain, if it did; `ours`: our contributions to what is open again."""
        if started.settled <= started.final:
            return
        again, first = {pending.round for pending in started.pending}, started.settled + 1
        for number in [at for at, row in self.rows.items() if at >= first and row.digest]:
            # The other chain decides these rounds anew. A fold unlike its certificate stays: that is a divergence.
            row = self._row(number)
            row.own_digest = "" if row.own_digest == row.digest else row.own_digest
            row.final, row.digest, row.set, row.contributors = False, "", "", ()
            row.val_bpb, row.val_by = None, ""
            self._save(number)
        lost = sum(number not in again for number in ours)
        self.event("chain_changed", round=first, again=len(again), lost=lost)
        if lost:
            log.warning("%s since round %d cannot return any more", counted(lost, "contribution"), first)

    def saved(self, number: Round) -> None:
        """Record that our own work of a round is safe on the disk."""
        self.event("kept", round=number)

    def closed(
        self,
        number: Round,
        members: Digest,
        state: Digest,
        authors: list[PeerId],
        moved: TrafficTotals,
    ) -> None:
        """Record that the round closed here, or that its set grew."""
        row = self._row(number)
        if not row.final:
            self._set_state(row, members, state, authors)
        row.bytes_up += moved.up - self._moved.up
        row.bytes_down += moved.down - self._moved.down
        row.blob_bytes_up += moved.blobs_up - self._moved.blobs_up
        row.blob_payload_up += moved.blob_contents_up - self._moved.blob_contents_up
        self._moved = moved
        self._save(number)
        self.event("closed", round=number, state=state.hex()[:16], contributors=len(authors))

    def folded(self, number: Round, state: Digest) -> None:
        """Record the state digest that this node's own fold of the final set has, before it is compared."""
        self._row(number).own_digest = state.hex()
        self._save(number)

    def finalized(self, number: Round, members: Digest, state: Digest, authors: list[PeerId]) -> None:
        """Record that the round is final here. After a restart this is called again, and written once."""
        row = self._row(number)
        if row.final and row.digest == state.hex():
            return
        # Another chain of the run decides the round: this node's own fold was of the set before. A fold that
        # differs from what its set was certified with stays, because that is a divergence.
        if row.final and row.own_digest == row.digest:
            row.own_digest = ""
        row.final = True
        self._set_state(row, members, state, authors)
        self._save(number)
        self.event("final", round=number, state=state.hex()[:16], contributors=len(authors))

    def evaluated(self, number: Round, state: Digest, val_bpb: float) -> None:
        """Record the validation loss of this state, bits per byte, if it still is that of the round."""
        row = self._known(number)
        if row is None or row.digest != state.hex():
            return
        row.val_bpb, row.val_by = val_bpb, ""
        self._save(number)
        self.event("evaluated", round=number, val_bpb=round(val_bpb, 4))

    def validated_by(self, peer: PeerId, said: Validation) -> None:
        """Record what another found of a round that this node did not validate, if it has the same state here."""
        row = self._known(said.round)
        if row is not None and row.val_bpb is None and row.digest == said.state.hex():
            row.val_bpb, row.val_by = said.val_bpb, peer
            self._save(said.round)
            self.event("evaluated", round=said.round, val_bpb=round(said.val_bpb, 4), by=peer)

    def newest_final(self) -> RoundStatus | None:
        """The row of the highest round that is final."""
        return self.rows.newest("final")

    def newest_of(self, state: Digest) -> RoundStatus | None:
        """The row of the highest round that closed with this state; the highest closed one if none did."""
        found = (row for row in self.rows.held() if row.digest == state.hex())
        return next(found, None) or self.rows.newest("closed")

    def newest_trained(self) -> RoundStatus | None:
        """The row of the highest round that this node worked in."""
        return self.rows.newest("trained")

    def newest_validated(self) -> RoundStatus | None:
        """The row of the highest round with a validation loss."""
        return self.rows.newest("validated")

    def _set_state(self, row: RoundStatus, members: Digest, state: Digest, authors: list[PeerId]) -> None:
        if row.digest != state.hex():
            # The loss is that of a state: a set that grew has another one.
            row.val_bpb, row.val_by = None, ""
        # One text for both digests: hundreds of rows are in memory.
        row.digest = row.own_digest if row.own_digest == state.hex() else state.hex()
        row.set = members.hex()
        row.contributors = self.rows.share(authors)

    def _row(self, number: int) -> RoundStatus:
        return self.rows.open(number)

    def _known(self, number: int) -> RoundStatus | None:
        return self.rows.open(number) if number in self.rows else None

    def _save(self, number: int) -> None:
        self.rows.save(self._row(number))

    def _note_left_out(self, *, is_end: bool = False) -> None:
        for name, few in self._few.items():
            if lines := few.left_out(self._wall(), is_end=is_end):
                self.event(f"{name}s_left_out", lines=lines)


def read_rows(path: Path) -> list[RoundStatus]:
    """Every line of a `rounds.jsonl` that is whole, in order; none where there is no file. Raises OSError."""
    found: list[RoundStatus] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(msgspec.json.decode(line, type=RoundStatus))
        except msgspec.MsgspecError:  # the end of the file may be lost with the power
            continue
    return found


def newest_rows(path: Path) -> list[RoundStatus]:
    """The newest row of each round in a `rounds.jsonl`, by rising round. Raises OSError."""
    rows = {row.round: row for row in read_rows(path)}
    return [rows[number] for number in sorted(rows)]


def sent_per_round(rows: Iterable[RoundStatus], fp32_bytes: int) -> SentPerRound | None:
    """Averages over the closed rounds in `rows` with a payload, of one node or several; None before one went."""
    rows = [row for row in rows if row.payload_bytes and row.digest]
    total, copies = sum(row.bytes_up for row in rows), sum(row.blob_payload_up for row in rows)
    if not total or not copies:
        return None
    return SentPerRound(
        bytes=total / len(rows),
        payloads=total / sum(row.payload_bytes for row in rows),
        below_fp32=fp32_bytes * len(rows) / total,
        per_copy=sum(row.blob_bytes_up for row in rows) / copies,
    )
