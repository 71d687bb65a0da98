"""One reading of a node for `top`: what its control socket says now."""

from typing import NamedTuple

import msgspec

from atoll.cli.client import call, stream
from atoll.node.config.home import Home
from atoll.protocols.local.control_messages import (
    GetLogs,
    GetPeers,
    GetRounds,
    GetStatus,
    LogLine,
    LogLines,
    PeerList,
    PeerStatus,
    RoundList,
    RoundStatus,
    Status,
)

ROUNDS = 200
"""Rounds that the charts show."""
LOG_LINES = 200


class Reading(msgspec.Struct, frozen=True, kw_only=True, tag="top"):
    """What a node says of itself at one moment."""

    status: Status
    peers: tuple[PeerStatus, ...]
    rounds: tuple[RoundStatus, ...]
    """Oldest first."""
    log: tuple[LogLine, ...]
    """Newest lines, oldest first."""


class Chart(NamedTuple):
    """The values of a chart, oldest first, and its line of text."""

    values: list[float]
    label: str


def read_node(home: Home) -> Reading:
    """Ask the node for all of it. Raises as `call`."""
    log: list[LogLine] = []
    for batch in stream(home, GetLogs(LOG_LINES), LogLines):
        if not batch.lines:
            break
        log += batch.lines
    return Reading(
        status=call(home, GetStatus(), Status),
        peers=call(home, GetPeers(), PeerList).peers,
        rounds=call(home, GetRounds(ROUNDS), RoundList).rounds,
        log=tuple(log),
    )


def loss_chart(rounds: tuple[RoundStatus, ...]) -> Chart:
    """This node's training loss of each round that it trained. Pure."""
    values = [row.train_loss for row in rounds if row.train_loss is not None]
    return Chart(values, _label("loss", values, "nats per token", 3))


def speed_chart(rounds: tuple[RoundStatus, ...]) -> Chart:
    """Tokens that this node trained on in a second, of each round that it trained. Pure."""
    values = [row.tokens / row.train_s for row in rounds if row.tokens and row.train_s > 0]
    return Chart(values, _label("speed", values, "tokens/s", 0))


def _label(name: str, values: list[float], unit: str, digits: int) -> str:
    if not values:
        return f"{name}: no round yet"
    low, high = min(values), max(values)
    return f"{name} {values[-1]:.{digits}f} {unit}, {low:.{digits}f} … {high:.{digits}f} in {len(values)} rounds"
