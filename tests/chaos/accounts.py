"""What became of the work of a partition: each contribution, by what its members' homes and journals say.

Pure but for `read_changes`. Tokens are those that the contributions name.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.cli.sim.homes import History
from atoll.cli.sim.oracle import last_rows
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import Contribution

FOLDED, RETURNED, TOO_OLD, LOST = "folded", "in error feedback", "too old", "lost"


class Change(NamedTuple):
    """A node joined the other chain, by its journal."""

    first: int
    """First round that the other chain decides."""
    too_old: int
    """So many of its contributions since are older than the payloads that its worker still has."""


class Account(NamedTuple):
    """Tokens of the contributions to some rounds."""

    announced: int
    folded: int
    """In a final set."""
    returned: int
    """In the error feedback of their authors."""
    too_old: int
    """Of a chain that was left, and not among the newest payloads: what would return is below β^64."""
    lost: tuple[str, ...]
    """A line for each contribution that is nowhere."""

    @property
    def line(self) -> str:
        """For people."""
        parts = f"{self.folded} folded, {self.returned} in error feedback, {self.too_old} too old for it"
        return f"of {self.announced} tokens {parts}, {len(self.lost)} contributions lost"


def read_changes(home: Path) -> list[Change]:
    """When the node of this home changed its chain, in order."""
    (journal,) = home.glob("runs/*/events.jsonl")
    events = map(json.loads, journal.read_text().splitlines())
    return [Change(event["round"], event["lost"]) for event in events if event["event"] == "chain_changed"]


def account(
    authors: Sequence[History],
    ended: Sequence[History],
    at_heal: Sequence[History],
    changes: Mapping[PeerId, Sequence[Change]],
    rounds: range,
) -> Account:
    """What became of these authors' contributions to these rounds, which are final where the run ended.

    `ended` and `at_heal`: all nodes at the end, and at the heal: what returned of rounds that both chains have is
    in either saved state. Each later contribution of a node that changed its chain is pending again, or too old;
    what is pending again and in no final set returns.
    """
    rows = (row for history in ended for row in last_rows(history.rows).values() if row.final)
    sets = {row.round: frozenset(row.contributors) for row in rows}
    tokens, lost = Counter[str](), list[str]()
    for history in authors:
        moved = changes.get(history.peer, ())
        before = _given_back(one for one in at_heal if one.peer == history.peer)
        fork = min((change.first for change in moved), default=None)
        common = {number: where for number, where in before.items() if fork is None or number < fork}
        known = common | _left(history, moved) | _given_back([history])
        for body in contributions_of(history):
            if body.round in rounds:
                where = FOLDED if history.peer in sets.get(body.round, ()) else known.get(body.round, LOST)
                tokens[where] += body.tokens
                if where == LOST:
                    lost.append(f"the contribution of {history.name} to round {body.round} is nowhere")
    return Account(tokens.total(), tokens[FOLDED], tokens[RETURNED], tokens[TOO_OLD], tuple(lost))


def contributions_of(history: History) -> Iterator[Contribution]:
    """Its own, in order."""
    for entry in history.entries:
        if entry.author == history.peer and isinstance(entry.body, Contribution):
            yield entry.body


def _left(history: History, moved: Iterable[Change]) -> dict[int, str]:
    """By round, what its journal says of its work in chains that it left.

    Not of the newest payloads: there the saved state knows.
    """
    found = dict[int, str]()
    oldest = min((past.sent.round for past in history.saved.past), default=0) if history.saved else 0
    for change in moved:
        since = sorted(body.round for body in contributions_of(history) if body.round >= change.first)
        found |= dict.fromkeys((number for number in since[change.too_old :] if number < oldest), RETURNED)
        found |= dict.fromkeys(since[: change.too_old], TOO_OLD)
    return found


def _given_back(histories: Iterable[History]) -> dict[int, str]:
    """By round, the payloads of which no row is in a final set, by the saved states."""
    pasts = (past for history in histories if history.saved is not None for past in history.saved.past)
    return {past.sent.round: RETURNED for past in pasts if not past.rows}


def loss_at(losses: Mapping[int, float], number: int) -> float | None:
    """The loss of a round, on the line between the nearest ones that have one; None: not on both sides of it."""
    below = max((at for at in losses if at <= number), default=None)
    above = min((at for at in losses if at >= number), default=None)
    if below is None or above is None:
        return None
    share = (number - below) / (above - below) if above > below else 0.0
    return losses[below] + share * (losses[above] - losses[below])
