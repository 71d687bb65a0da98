"""Whom to ask for a blob or a part of one, and when to ask again. Pure."""

from collections.abc import Iterable

from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.ids import PeerId

FIRST_RETRY_S = 0.3
LAST_RETRY_S = 10.0
FEW = 3


def peers_to_ask(first: PeerId, neighbours: Iterable[PeerId]) -> list[PeerId]:
    """Return the peer that should have a blob, then all connected peers."""
    return list(dict.fromkeys((first, *neighbours)))


def few_in_turn(peers: list[PeerId], attempt: int) -> list[PeerId]:
    """Return FEW of the peers: with each attempt the next ones."""
    first = FEW * attempt % max(1, len(peers))
    return (peers[first:] + peers[:first])[:FEW]


def holders_in_turn(
    author: PeerId, neighbours: list[PeerId], attempt: int, *, bringer: PeerId | None, is_small: bool
) -> list[PeerId]:
    """Return the author of a payload; if it is large, or on a second try, others too, in turn.

    An author that is not connected is dialled at every other try. `bringer`: who brought a new author, if many
    come at once.
    """
    if bringer is not None:
        # Who lets others bring it has what it contributed; made-up authors are not dialled.
        return [peer for peer in dict.fromkeys((author, bringer)) if peer in neighbours]
    others = [peer for peer in neighbours if peer != author]
    if is_small:
        others = few_in_turn(others, attempt)
    if author in neighbours:
        return [author] if attempt == 0 and is_small else [author, *others]
    return [author, *others] if attempt % 2 or not others else others


def pause_s(attempt: int) -> float:
    """Return the seconds of rest before this attempt, counted from 1."""
    return backoff_s(attempt, first_s=FIRST_RETRY_S, max_s=LAST_RETRY_S)
