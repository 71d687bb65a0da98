"""Goodput and exchange times of a swarm, from what its nodes wrote down. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.cli.formatting import percents
from atoll.protocols.local.control_messages import TimeShares

Lines = Sequence[Mapping[str, Any]]
SHARES = tuple(name.removesuffix("_s") for name in TimeShares.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Trace:
    """One node's rows (`rounds.jsonl`, one per round) and journal (`events.jsonl`); clocks of all nodes agree."""

    peer: str
    rows: Lines
    events: Lines


class Exchange(NamedTuple):
    """Seconds of one outer exchange at one node, to the moment when the fold of everybody's work was in."""

    own_s: float
    """From the end of the node's own training."""
    last_s: float
    """From the end of the training of the last node: nobody could have folded before."""


def goodput(trace: Trace, first: int, last: int) -> float | None:
    """Share of the wall time from the start of round `first` to the start of `last` in inner steps that counted.

    A round counts if the set that the node folded holds its own work. None where the journal lacks either start.
    """
    starts = first_times(trace.events, "training")
    if first not in starts or last not in starts:
        return None
    rows = [row for row in trace.rows if first <= row["round"] < last and trace.peer in row["contributors"]]
    return float(sum(row["steps_s"] for row in rows) / (starts[last] - starts[first]))


def elsewhere(traces: Sequence[Trace], first: int, last: int) -> str:
    """Where the rest of the time went, in percent of all nodes' time: `evaluate 1.1, fold 0.8`."""
    rows = [row for trace in traces for row in trace.rows if first <= row["round"] < last]
    sums = {f"{name}_s": sum(row.get(f"{name}_s", 0.0) for row in rows) for name in SHARES}
    shares = sorted(percents(sums).items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {percent:.1f}" for name, percent in shares if name != "steps" and percent >= 0.05)


def exchanges(traces: Sequence[Trace], first: int, last: int) -> list[Exchange]:
    """Of every node and every round from `first` to before `last` that all nodes worked in and folded whole."""
    ended = [training_ends(trace) for trace in traces]
    found = []
    for number in range(first, last):
        ends_s = [of_node[number] for of_node in ended if number in of_node]
        if len(ends_s) < len(traces):
            continue
        for trace, own_s in zip(traces, ends_s, strict=True):
            folded_s = first_times(trace.events, "closed", contributors=len(traces)).get(number)
            if folded_s is not None:
                found.append(Exchange(folded_s - own_s, folded_s - max(ends_s)))
    return found


def training_ends(trace: Trace) -> dict[int, float]:
    """Round -> when its last inner step ended: before the encoder, which belongs to the exchange."""
    encode_s = {row["round"]: row["encode_s"] for row in trace.rows}
    times = first_times(trace.events, "trained")
    return {number: at_s - encode_s.get(number, 0.0) for number, at_s in times.items()}


def first_times(events: Lines, name: str, **facts: Any) -> dict[int, float]:
    """Round -> when the event of this name, with these facts, happened first."""
    times: dict[int, float] = {}
    for event in events:
        if event["event"] == name and all(event.get(key) == value for key, value in facts.items()):
            times.setdefault(event["round"], event["time"])
    return times
