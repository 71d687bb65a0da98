"""What a node that does not run left on its disk: the run that it trained last, and its rounds."""

import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from atoll.cli.client import start_hint
from atoll.cli.formatting import agreed_line, number, span
from atoll.node.config.home import Home
from atoll.node.config.node_config import load_config
from atoll.node.daemon.telemetry.round_log import LOG_FILE, newest_rows
from atoll.node.runs.run_files import FoundRun, runs_of, text_path
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import NotRunning, counted
from atoll.protocols.local.control_messages import EvaluationResult, RoundStatus


class LastStatus(msgspec.Struct, frozen=True, kw_only=True, tag="last"):
    """How far a node came, by the round log on its disk. Unknown numbers are null."""

    run: str
    """Run id, hex."""
    run_name: str
    rounds: int
    """Number of rounds of the whole run."""
    trained: int
    """Newest round that this node trained; -1: none."""
    final: int
    """Newest final round that it knew; -1: none."""
    digest: str
    """State digest after round `final`, hex."""
    contributors: tuple[str, ...]
    """Authors of the set of round `final`."""
    open: int
    """Rounds after `final` with work of this node."""
    train_loss: float | None
    """Of the newest round that it trained, nats per token."""
    val_bpb: float | None
    """Newest validation loss, bits per byte."""
    tokens: int
    """That it trained on in the rounds of its log."""
    unix_s: float
    """When the log changed last, seconds since 1970."""


def last_run(home: Home) -> FoundRun:
    """The run of this home that was trained last. Raises NotRunning where none was begun."""
    begun = [(path.stat().st_mtime, run) for run in runs_of(home) if (path := _log(home, run)).exists()]
    if not begun:
        raise NotRunning(f"no node runs in {home.root}, and none did before", hint=start_hint(home))
    return max(begun, key=lambda found: found[0])[1]


def last_rows(home: Home, run: FoundRun) -> list[RoundStatus]:
    """A row for each round of the run's log, oldest first; none without a log. Raises DiskFault."""
    path = _log(home, run)
    if not path.exists():
        return []
    with disk(path):
        return newest_rows(path)


def last_status(home: Home) -> LastStatus:
    """How far the node of this home came in the run that it trained last. Raises NotRunning, DiskFault."""
    run = last_run(home)
    rows = last_rows(home, run)
    final = max((row for row in rows if row.final), key=lambda row: row.round, default=None)
    trained = [row for row in rows if row.payload_bytes]
    first_open = final.round + 1 if final else 0
    return LastStatus(
        run=run.spec.id.hex(),
        run_name=run.spec.name,
        rounds=run.spec.outer.rounds,
        trained=trained[-1].round if trained else -1,
        final=first_open - 1,
        digest=final.digest if final else "",
        contributors=final.contributors if final else (),
        open=sum(row.round >= first_open for row in trained),
        train_loss=trained[-1].train_loss if trained else None,
        val_bpb=next((row.val_bpb for row in reversed(rows) if row.val_bpb is not None), None),
        tokens=sum(row.tokens for row in rows),
        unix_s=_log(home, run).stat().st_mtime,
    )


def last_evaluation(home: Home) -> EvaluationResult:
    """Validation loss of the weights saved last. Raises NotRunning, and as `evaluate_saved`."""
    from atoll.node.import_export.evaluate_saved import evaluate_saved  # imports torch

    run = last_run(home)
    config = load_config(home.config_toml)
    config = replace(config, data=text_path(home, run.spec.id, config.data))
    return evaluate_saved(run.spec, home.run(run.spec.id), config)


def last_lines(last: LastStatus, *, runs: bool) -> list[str]:
    """The same for a screen. `runs`: whether a node of this home runs, or starts."""
    then = "a node runs here: `atoll status` asks it" if runs else "`atoll start` goes on from there"
    ago = span(max(0.0, time.time() - last.unix_s))
    behind = f"; {counted(last.open, 'later round')} of its own not final" if last.open else ""
    done = f"up to round {last.trained} of {last.rounds}" if last.trained >= 0 else "no round"
    loss = f"loss {number(last.train_loss)}, validation {number(last.val_bpb)} bits per byte"
    return [
        f"last      {ago} ago; {then}",
        f"run       {last.run_name}  {last.run[:16]}",
        f"trained   {done}, {last.tokens:,} tokens",
        f"model     {loss}",
        f"agreed    {agreed_line(last.final, last.digest, last.contributors)}{behind}",
    ]


def _log(home: Home, run: FoundRun) -> Path:
    return home.run(run.spec.id) / LOG_FILE
