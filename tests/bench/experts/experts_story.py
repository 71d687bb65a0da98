"""A member is killed, comes back, is killed for good: when what happens, what becomes of its experts. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Held = Mapping[int, frozenset[int]]
"""Member -> the experts that it trains."""
Phase = Literal["there", "dead", "back", "dead for good"]
PHASES: tuple[Phase, ...] = ("there", "dead", "back", "dead for good")
ROUNDS = 5
"""That become final in each phase, at least."""


class Seen(NamedTuple):
    """What the members said of themselves at one moment."""

    round: int
    """The newest that one of them trains."""
    final: int
    """The newest that is final on one of them."""
    takes_part: bool
    """Whether the newest closed round has a contribution of the one that is killed."""
    held: Held
    """Of those that answered."""


class Moment(NamedTuple):
    """A phase, and the round at hand when it began."""

    phase: Phase
    since: int


class Move(NamedTuple):
    """From the end of one phase to the end of the next."""

    moved: int
    """Experts that have another holder now."""
    needless: int
    """Of these, the experts that neither were the victim's nor are now."""
    orphans: int
    """Experts without a holder at the end."""


BEGIN = Moment("there", 0)


def step(now: Moment, seen: Seen) -> Moment | None:
    """The phase after `now`, or still the same; None: the story is over."""
    if seen.final < now.since + ROUNDS - 1 or (now.phase == "back" and not seen.takes_part):
        return now
    later = PHASES[PHASES.index(now.phase) + 1 :]
    return Moment(later[0], seen.round) if later else None


def move(before: Held, after: Held, victim: int, experts: int) -> Move:
    """What changed hands among `experts` experts."""
    pairs = {expert: (_holders(before, expert), _holders(after, expert)) for expert in range(experts)}
    moved = {expert for expert, (was, now) in pairs.items() if now and was != now}
    theirs = before.get(victim, frozenset()) | after.get(victim, frozenset())
    return Move(len(moved), len(moved - theirs), sum(not now for _, now in pairs.values()))


def _holders(held: Held, expert: int) -> frozenset[int]:
    return frozenset(member for member, experts in held.items() if expert in experts)


Rows = Mapping[int, Mapping[int, Mapping[str, Any]]]
"""Of each member, by round: the node's own books."""


def waits_s(rows: Rows) -> dict[int, float]:
    """Round -> the longest time that a member was idle in it, for others or for their payloads."""
    found: dict[int, float] = {}
    for of_member in rows.values():
        for number, row in of_member.items():
            found[number] = max(found.get(number, 0.0), row["wait_s"] + row["transfer_s"])
    return found


def folds(rows: Rows) -> dict[int, list[str]]:
    """Round -> the digests of the members for whom it is final."""
    found: dict[int, list[str]] = {}
    for of_member in rows.values():
        for number, row in of_member.items():
            if row["final"]:
                found.setdefault(number, []).append(row["digest"])
    return found


def losses(rows: Rows) -> dict[int, float]:
    """Round -> mean training loss of the members that took part."""
    found: dict[int, list[float]] = {}
    for of_member in rows.values():
        for number, row in of_member.items():
            if row["train_loss"] is not None:
                found.setdefault(number, []).append(row["train_loss"])
    return {number: sum(each) / len(each) for number, each in sorted(found.items())}


class Told(NamedTuple):
    """A story as far as it came."""

    turns: Sequence[int]
    """The round at hand when each phase after the first began."""
    ends: Sequence[Held]
    """What was held at the end of each phase that ended."""
