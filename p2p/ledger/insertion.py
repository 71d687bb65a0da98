"""What comes of a batch of entries that a ledger is given."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from atoll.p2p.ledger.history import FeedEnd
from atoll.protocols.errors import SignatureFault
from atoll.protocols.ids import PeerId, short
from atoll.protocols.ledger.records import Entry


class Equivocation(SignatureFault):
    """`author` signed two different histories. Peers that relay one of them are not at fault."""

    def __init__(self, author: PeerId, seq: int) -> None:
        super().__init__(f"{short(author)} signed two feeds that differ at entry {seq}")
        self.author = author


class InsertResult(NamedTuple):
    """Result of inserting a batch of entries."""

    fresh: tuple[Entry, ...]
    """Entries that were new and are stored now."""
    gap: bool
    """Whether an entry arrived before its predecessor, so that the sender has more."""
    forks: tuple[Equivocation, ...]
    """Authors that this batch proves to have signed two histories."""
    refused: tuple[tuple[PeerId, str], ...] = ()
    """Authors that the run does not admit, each with a reason that is new. No peer is at fault."""
    pruned: tuple[PeerId, ...] = ()
    """Authors whose feeds had to go: newcomers that gave their places to others."""


class Verdict(Enum):
    FRESH = "fresh"
    KNOWN = "known"
    GAP = "gap"
    FORK = "fork"
    REFUSED = "refused"


@dataclass(slots=True)
class Batch:
    """What a transaction has changed so far. The ledger's own state follows once it is committed."""

    sender: PeerId | None
    feeds: dict[PeerId, FeedEnd] = field(default_factory=dict)
    fresh: list[Entry] = field(default_factory=list)
    forks: dict[PeerId, Equivocation] = field(default_factory=dict)
    refused: list[tuple[PeerId, str]] = field(default_factory=list)
    pruned: list[PeerId] = field(default_factory=list)
    gap: bool = False
