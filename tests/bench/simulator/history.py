"""What a node leaves behind, for the oracle: its round log, its ledger, and where it stood at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from atoll.protocols.ids import Digest, PeerId

Kind = Literal["final", "other_chain", "accused", "diverged"]


class Row(NamedTuple):
    """One line of a node's round log."""

    at: float
    """Virtual seconds."""
    kind: Kind
    round: int
    epoch: bytes = b""
    """The epoch whose voters decided the round."""
    names: tuple[Digest, ...] = ()
    """The final set."""
    state: Digest = Digest(b"")
    """State of the weights with it."""
    voters: tuple[PeerId, ...] = ()
    """Who decided the round."""
    authors: frozenset[PeerId] = frozenset()
    """Authors of the final set."""
    excluded: tuple[PeerId, ...] = ()
    """Whom its proposal excludes from the next round on, sorted."""
    peer: PeerId | None = None
    """Whom the node accused of a fault."""


@dataclass(slots=True)
class History:
    """One node's rows in order, with what its ledger says of its own feed."""

    peer: PeerId
    is_liar: bool
    is_up: bool
    """It runs at the end."""
    chain: tuple[bytes, ...]
    """The epochs that it follows at the end."""
    applied: int
    """Newest round in its weights."""
    round: int
    """Round at hand."""
    is_stranded: bool
    """Nobody that runs at the end has the payloads of its next final round, or a snapshot after it."""
    voting: tuple[PeerId, ...]
    """Voters of the round that is decided next, without those that left."""
    forked: frozenset[PeerId]
    """Authors that its ledger holds a proof against."""
    announced: tuple[int, ...]
    """Rounds of the contributions in its own feed."""
    votes_against: frozenset[tuple[PeerId, PeerId]] = frozenset()
    """Author and member of each Exclude in its ledger."""
    by_owner: Mapping[PeerId, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By member that the run's owner excluded: the first round without it, and when this node knew it."""
    rows: list[Row] = field(default_factory=list)
