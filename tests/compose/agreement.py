"""What rows of `atoll run rounds --json` from several nodes say together. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def agreed_rounds(nodes: Mapping[str, Rows], *, by: Collection[str] = ()) -> dict[int, str]:
    """Rounds that are final on every node with one digest, and that all of `by` contributed to: round, digest."""
    if not nodes:
        return {}
    finals = [{row["round"]: row for row in rows if row["final"]} for rows in nodes.values()]
    shared = set.intersection(*map(set, finals))
    return {
        number: finals[0][number]["digest"]
        for number in sorted(shared)
        if len({final[number]["digest"] for final in finals}) == 1
        and set(by) <= set(finals[0][number]["contributors"])
    }


def disputed_rounds(nodes: Mapping[str, Rows]) -> list[int]:
    """Rounds that are final on two nodes with two digests: there must never be one."""
    seen: dict[int, set[str]] = {}
    for rows in nodes.values():
        for row in rows:
            if row["final"]:
                seen.setdefault(row["round"], set()).add(row["digest"])
    return sorted(number for number, digests in seen.items() if len(digests) > 1)


def newest_round(nodes: Mapping[str, Rows]) -> int:
    """The newest round that any node has closed, -1 before the first."""
    return max((row["round"] for rows in nodes.values() for row in rows), default=-1)
