"""The checks of a swarm's promises: history in, verdict out. Pure, so that any history can be judged again.

A history is what the nodes' round logs add up to: losses, tokens, members, shares of time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.cli.formatting import percents
from atoll.protocols.local.control_messages import TimeShares

OVERHEAD_LIMIT = 1.05
"""Bytes on the wire per copy of a payload, over the payload."""
COMPRESSION_FLOOR = 100.0
"""fp32 weights over one payload."""
Rows = Mapping[int, Sequence[Mapping[str, Any]]]
"""Each node's rows, one per round, as `atoll run rounds --json` shows them."""


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """One promise: its name, whether it held, and what was seen."""

    name: str
    ok: bool
    seen: str


def all_folded(rounds: Iterable[Mapping[str, Any]], total: int) -> PromiseCheck:
    """Every round is final, and folded by a worker somewhere. Whether the digests agree is the oracle's matter.

    A row without a digest of its own is an adopted snapshot, which proves nothing about folds.
    """
    sound: set[int] = set()
    folds = adopted = 0
    for entry in rounds:
        folded = [row for row in entry["nodes"] if row["final"] and row["own_digest"]]
        folds += len(folded)
        adopted += sum(row["final"] and not row["own_digest"] for row in entry["nodes"])
        if folded:
            sound.add(int(entry["round"]))
    missing = sorted(set(range(total)) - sound)
    text = f"{len(sound)} of {total} rounds final, {folds} folds of workers, {adopted} rounds adopted"
    if missing:
        text += f" (not final or not folded {missing[:5]})"
    return PromiseCheck("all rounds final and folded", not missing, text)


def all_finished(rows_by_node: Mapping[int, Sequence[Mapping[str, Any]]], total: int) -> PromiseCheck:
    """Every node folded the last round."""
    late = [
        node
        for node, rows in rows_by_node.items()
        if not any(r["round"] == total - 1 and r["final"] for r in rows)
    ]
    return PromiseCheck(
        "all nodes at the last round", not late, f"{len(rows_by_node) - len(late)} of {len(rows_by_node)} nodes"
    )


def returned(rows: Sequence[Mapping[str, Any]], peer: str, from_round: int) -> PromiseCheck:
    """A killed or late node contributed to a final round after `from_round`."""
    rounds = [r["round"] for r in rows if r["round"] >= from_round and r["final"] and peer in r["contributors"]]
    text = f"first contribution at round {rounds[0]}" if rounds else f"none from round {from_round} on"
    return PromiseCheck(f"…{peer[-8:]} contributes from round {from_round}", bool(rounds), text)


def wire_overhead(rows: Iterable[Mapping[str, Any]]) -> PromiseCheck:
    """Bytes of the exchange per copy sent, against the payload."""
    sent = sum(row["blob_bytes_up"] for row in rows)
    ideal = sum(row["blob_payload_up"] for row in rows)
    ratio = sent / ideal if ideal else 0.0
    return PromiseCheck("bytes per payload copy", 0 < ratio <= OVERHEAD_LIMIT, f"{ratio:.4f} × the payload")


def compression(parameters: int, payload_bytes: int) -> PromiseCheck:
    """fp32 weights over one payload."""
    ratio = 4 * parameters / payload_bytes if payload_bytes else 0.0
    return PromiseCheck(
        "payload smaller than fp32", ratio >= COMPRESSION_FLOOR, f"{ratio:.1f} × ({payload_bytes} B)"
    )


class Validation(NamedTuple):
    """A validation loss in bits per byte, and the round after which it was measured."""

    round: int
    bpb: float


def newest_validation(rows: Rows) -> Validation | None:
    """The validation of the newest round that any node validated, from the lowest-numbered node that did."""
    flat = (row for _, of_node in sorted(rows.items()) for row in of_node)
    found = [Validation(row["round"], row["val_bpb"]) for row in flat if row["val_bpb"] is not None]
    return max(found, key=lambda validation: validation.round, default=None)


def by_round(rows_by_node: Rows) -> list[dict[str, Any]]:
    """`rounds[]` of the report: one element per round, the nodes' rows inside."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    for node, rows in sorted(rows_by_node.items()):
        for row in rows:
            rounds.setdefault(int(row["round"]), []).append({"node": node, **row})
    return [{"round": number, "nodes": rounds[number]} for number in sorted(rounds)]


def tokens_used(rows: Rows) -> int:
    """Tokens of all contributions in final sets; members that were away, or took fewer steps, add fewer."""
    flat = (row for of_node in rows.values() for row in of_node)
    return sum(row["tokens"] for row in flat if row["final"] and row["peer"] in row["contributors"])


def share_of(rows: Rows, *names: str) -> dict[str, float]:
    """Per node: the share of `names` in the time of its rounds, but for the newest: that one has not ended."""
    shares = {}
    for number, of_node in rows.items():
        over = sorted(of_node, key=lambda row: row["round"])[:-1]
        whole = {name: sum(row[name] for row in over) for name in TimeShares.__struct_fields__}
        percent = percents(whole)
        shares[str(number)] = sum(percent[name] for name in names) / 100 if percent else 0.0
    return shares
