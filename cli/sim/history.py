"""What the nodes' rows of a simulated swarm add up to: losses, tokens, members, shares of time. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from atoll.cli.formatting import percents
from atoll.protocols.local.control_messages import TimeShares

Rows = Mapping[int, Sequence[Mapping[str, Any]]]
"""Each node's rows, one per round, as `atoll rounds --json` shows them."""


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


def members_of_rounds(rows: Rows, total: int) -> list[int]:
    """Contributors of each round's final set; a killed node is missing in some, a late one in the first."""
    sizes = {
        row["round"]: len(row["contributors"]) for of_node in rows.values() for row in of_node if row["final"]
    }
    return [max(1, sizes.get(number, 0)) for number in range(total)]


def tokens_used(rows: Rows) -> int:
    """Tokens of all contributions in final sets; members that were away, or took fewer steps, add fewer."""
    flat = (row for of_node in rows.values() for row in of_node)
    return sum(row["tokens"] for row in flat if row["final"] and row["peer"] in row["contributors"])


def bpb_at(points: Sequence[Mapping[str, Any]], tokens: int) -> float:
    """Validation loss of an arm after `tokens` tokens, on a line between two of its points; at most its last."""
    for before, after in pairwise(points):
        if tokens < after["tokens"]:
            share = max(0.0, (tokens - before["tokens"]) / (after["tokens"] - before["tokens"]))
            return float(before["val_bpb"] + share * (after["val_bpb"] - before["val_bpb"]))
    return float(points[-1]["val_bpb"])


def share_of(rows: Rows, *names: str) -> dict[str, float]:
    """Per node: the share of `names` in the time of its rounds, but for the newest: that one has not ended."""
    shares = {}
    for number, of_node in rows.items():
        over = sorted(of_node, key=lambda row: row["round"])[:-1]
        whole = {name: sum(row[name] for row in over) for name in TimeShares.__struct_fields__}
        percent = percents(whole)
        shares[str(number)] = sum(percent[name] for name in names) / 100 if percent else 0.0
    return shares
