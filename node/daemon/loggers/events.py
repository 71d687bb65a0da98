"""What a logger gets: events of rounds, each with its values, from the rows of the round log. Pure."""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from atoll.protocols.local.control_messages import RoundStatus, TimeShares

SHARES: Final = tuple(TimeShares.__struct_fields__)
VALUES: Final[dict[str, tuple[str, ...]]] = {
    "trained": ("train_loss", "steps", "tokens", "train_s", "payload_bytes", "overlapped", "held_s"),
    "closed": ("contributors", "bytes_up", "bytes_down"),
    "final": ("contributors",),
    "evaluated": ("val_bpb",),
    "spent": SHARES,
}
"""Fields of RoundStatus that come with each event; of `contributors` their number."""
COLUMNS: Final = tuple(dict.fromkeys(name for names in VALUES.values() for name in names))
"""All of them, each once."""


class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to a round on this node."""

    time: float
    """Seconds since 1970."""
    event: str
    """A key of VALUES: `trained` and encoded here, `closed` here (again if its set grew), `final`, `evaluated`,
    and `spent` when the training of a later round starts and all time of this one is known."""
    round: int
    values: dict[str, float]
    """Numbers by name; one that is not known is absent."""


class RoundEvents:
    """Makes logged events of the journal's events."""

    def __init__(self, rows: Mapping[int, RoundStatus]) -> None:
        """`rows`: those of the round log, which change as rounds go on."""
        self._rows = rows
        self._training: int | None = None

    def of(self, name: str, facts: Mapping[str, Any], unix_s: float) -> LoggedEvent | None:
        """What loggers get of a journal's event; None where it is not for them."""
        number = facts.get("round")
        if name == "training":
            # The time of a round that is trained again goes on.
            before, self._training = self._training, number
            name, number = "spent", before if before != number else None
        row = self._rows.get(number) if number is not None and name in VALUES else None
        if row is None:
            return None
        return LoggedEvent(time=unix_s, event=name, round=row.round, values=values_of(row, VALUES[name]))


def values_of(row: RoundStatus, names: tuple[str, ...]) -> dict[str, float]:
    """The named fields of a row as numbers, without those that are unknown."""
    found = {name: getattr(row, name) for name in names}
    known = {
        name: float(len(value) if isinstance(value, tuple) else value)
        for name, value in found.items()
        if value is not None
    }
    return {name: value for name, value in known.items() if math.isfinite(value)}  # JSON has no others
