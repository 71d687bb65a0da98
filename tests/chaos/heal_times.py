"""How long a healed partition took, by the journals of its nodes.

A poll sees late what they have to the millisecond. The nodes run on one machine, so their clocks agree.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Final(NamedTuple):
    """A node notes that a round is final."""

    at: float
    """Seconds since 1970."""
    node: int
    round: int
    state: str
    """Digest of its state, shortened."""


class Healed(NamedTuple):
    """One chain after a partition. Times in seconds since the heal."""

    met_s: float | None
    """Until the first node knew that it must change its chain; None: none had to."""
    took_s: float
    """Until all nodes had one state of one round, and it was final nowhere before."""
    rounds: int
    """Rounds that became final meanwhile on the node that is ahead."""

    @property
    def line(self) -> str:
        """For people."""
        met = "" if self.met_s is None else f", {self.met_s:.1f} s of it until the sides met"
        return f"one digest {self.rounds} rounds and {self.took_s:.1f} s after the heal{met}"


def read_journals(homes: Sequence[Path]) -> tuple[list[Final], list[float]]:
    """All finals by their time, and when nodes found that they must change their chain, of homes with one run."""
    events = sorted(_events(homes), key=lambda event: (event[1]["time"], event[0]))
    finals = [Final(e["time"], node, e["round"], e["state"]) for node, e in events if e["event"] == "final"]
    return finals, [e["time"] for _, e in events if e["event"] == "other_chain"]


def _events(homes: Sequence[Path]) -> Iterator[tuple[int, Mapping[str, object]]]:
    for node, home in enumerate(homes):
        for journal in sorted(home.glob("runs/*/events.jsonl")):
            yield from ((node, json.loads(line)) for line in journal.read_text().splitlines())


def healed(finals: Sequence[Final], changes: Iterable[float], count: int, at: float) -> Healed | None:
    """What followed a heal at this time with `count` nodes; `finals` by time. None: they never met.

    Rounds are those of the chain in which all meet: a side that gives way may have been ahead of it by many.
    """
    before = {(final.round, final.state) for final in finals if final.at <= at}
    noted: dict[int, dict[int, Final]] = {}
    for index, final in enumerate(finals):
        # What a node notes later of a round counts: it changed its chain.
        found = noted.setdefault(final.round, {})
        found[final.node] = final
        is_one = len(found) == count and len({one.state for one in found.values()}) == 1
        if final.at > at and is_one and (final.round, final.state) not in before:
            first = min(found.values(), key=lambda one: one.at).node
            chain = {
                (one.round, one.state) for notes in noted.values() for one in notes.values() if one.node == first
            }
            newest = max((number for number, _ in chain & before), default=-1)
            ahead = max(one.round for one in finals[: index + 1] if one.at >= found[one.node].at)
            met = next((when - at for when in changes if when > at), None)
            return Healed(met, final.at - at, ahead - newest)
    return None
