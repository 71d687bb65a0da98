"""The table of seeds for the status: each seed's state, and for failures the reason and the remedy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.p2p.discovery.dial_errors import explain
from atoll.p2p.discovery.dnsaddr import DnsSeed
from atoll.protocols.errors import counted

CONNECTED: Final = "connected"
THIS_NODE: Final = "this node"
DIALLING: Final = "dialling"
WAITING: Final = "not tried yet"
RESOLVING: Final = "asking DNS"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class SeedRow:
    """State of one seed."""

    seed: str
    """The seed, in the form that `--peer` accepts."""
    state: str
    """One of: connected, this node, dialling, not tried yet, asking DNS, failed."""
    reason: str = ""
    """Why it failed, in a few words."""
    remedy: str = ""
    """What the user does next."""
    tries: int = 0
    """Number of failures in a row."""
    next_s: float | None = None
    """Seconds until the next try; None: none is planned."""
    via: str = ""
    """The /dnsaddr seed that named this one; empty for seeds of the user."""


def row_text(row: SeedRow) -> str:
    """State, reason and remedy of a row as one line."""
    if row.state != FAILED:
        return f"{row.state}: {row.reason}" if row.reason else row.state
    why = f"{row.reason} – {row.remedy}" if row.remedy else row.reason
    return f"{why} (tried {counted(row.tries, 'time')}, again in {row.next_s or 0.0:.0f} s)"


def short_text(row: SeedRow) -> str:
    """The same without address and remedy: `seed …gJqxbG: connection refused (tried 6 times, again in 9 s)`."""
    name = f"…{row.seed[-6:]}" if "/p2p/" in row.seed else row.seed
    return f"seed {name}: {row_text(replace(row, remedy=''))}"


def short_texts(rows: Sequence[SeedRow]) -> list[str]:
    """The short texts of some rows: one for a seed with several addresses of which one is connected."""
    up = {_peer_of(row) for row in rows if row.state == CONNECTED}
    told = [row for row in rows if row.state == CONNECTED or _peer_of(row) not in up]
    return list(dict.fromkeys(map(short_text, told)))


def _peer_of(row: SeedRow) -> str:
    return row.seed.rpartition("/p2p/")[2]


def dns_seed_row(name: DnsSeed, found: Sequence[SeedRow], now: float) -> SeedRow:
    """Row of a /dnsaddr seed, which summarises the rows of its addresses."""
    up = [row for row in found if row.state in (CONNECTED, THIS_NODE)]
    if up:
        return SeedRow(name.text, up[0].state, f"{len(up)} of {len(found)}")
    if not found:
        return _unresolved(name, now)
    failed = [row for row in found if row.state == FAILED]
    if len(failed) < len(found):
        return SeedRow(name.text, DIALLING, f"{len(found)} found")
    soonest = min(failed, key=lambda row: row.next_s or 0.0)
    reason = f"none of {len(found)} answers: {failed[0].reason}"
    return SeedRow(name.text, FAILED, reason, failed[0].remedy, soonest.tries, soonest.next_s)


def _unresolved(name: DnsSeed, now: float) -> SeedRow:
    if not name.tries:
        return SeedRow(name.text, RESOLVING)
    found = explain(name.error)
    return SeedRow(name.text, FAILED, found.reason, found.remedy, name.tries, max(0.0, name.next_at - now))
