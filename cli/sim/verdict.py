"""The checks of a swarm's promises: history in, verdict out. Pure, so that any history can be judged again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OVERHEAD_LIMIT = 1.05
"""Bytes on the wire per copy of a payload, over the payload."""
COMPRESSION_FLOOR = 100.0
"""fp32 weights over one payload."""


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """One promise: its name, whether it held, and what was seen."""

    name: str
    ok: bool
    seen: str


def one_digest(rounds: Iterable[Mapping[str, Any]], total: int) -> PromiseCheck:
    """Every round is final somewhere, and has one digest on all nodes that folded it."""
    seen: dict[int, set[str]] = {}
    folded = 0
    for entry in rounds:
        digests = {row["digest"] for row in entry["nodes"] if row["final"]}
        folded += sum(bool(row["final"]) for row in entry["nodes"])
        if digests:
            seen[int(entry["round"])] = digests
    forks = sorted(number for number, digests in seen.items() if len(digests) > 1)
    missing = sorted(set(range(total)) - set(seen))
    text = f"{len(seen)} of {total} rounds final, {folded} folds compared, {len(forks)} with two digests"
    if forks or missing:
        text += f" (forks {forks[:5]}, not final {missing[:5]})"
    return PromiseCheck("one digest per round", not forks and not missing, text)


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
    """A killed or late node contributed again after `from_round`."""
    rounds = [r["round"] for r in rows if r["round"] >= from_round and peer in r["contributors"]]
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


def learned(val_bpb: float, unigram_bpb: float) -> PromiseCheck:
    """Validation bits per byte far below the byte-unigram entropy of the text."""
    ok = val_bpb < 0.8 * unigram_bpb
    return PromiseCheck("learns", ok, f"{val_bpb:.3f} bits per byte, unigram {unigram_bpb:.3f}")


def against(name: str, val_bpb: float, baseline_bpb: float, limit: float) -> PromiseCheck:
    """Validation loss no more than `limit` × a baseline at equal tokens."""
    ratio = val_bpb / baseline_bpb
    return PromiseCheck(
        f"against {name}", ratio <= limit, f"{val_bpb:.3f} / {baseline_bpb:.3f} = {ratio:.3f} (≤ {limit})"
    )
