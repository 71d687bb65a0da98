"""Shares of a ledger: how many bytes each author may write, so that no few of them fill the file for all.

Each contribution in a final set lets its author write `round_bytes` more: fifty times what a
member writes in a round. Members that final sets pass over, as in the smaller part of a divided run, write on into
a spare of the file. Its last quarter is for those who used little, its last eighth for those of them that work,
its last 32nd for this node's own entries: a file that others fill would else stop all nodes at once. The table is
in docs/ledger.md.

Nothing here is agreed on between nodes. So what a set or a ballot names comes past a share (`Need`).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum

import msgspec

from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import PeerId, short
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES

log = logging.getLogger(__name__)

SHARE_BYTES = 64 * 1024 + ENTRY_MAX_BYTES
"""Bytes that any author may hold: a contribution and its ack in each of 64 open rounds, and one Epoch."""
ROUND_BYTES = 64 * 1024
"""Bytes for each final set that names an author. A member writes some 1.3 kB a round; a Proposal of a full set has
35 kB, and a Reduction at most as many."""
AHEAD_ROUNDS = 8
"""Rounds whose bytes an accepted author may write before they are final: some 500 rounds of a member."""
STRICT = 4
"""A strict share has a quarter of `round_bytes` for each round."""
_PARTS = 4, 8, 32
"""The rooms of the file begin where so small a part of it is left."""
_SPARE = 64
"""One part in so many of the file is the spare: what authors hold beyond their shares together."""
_EACH = 8
"""An author takes one part in so many of the spare."""
_ROW_BYTES = 512
"""What an entry takes in the file's tables and indexes beside itself."""
_LONG = 8
"""An author worked long if final sets name it an eighth as often as the one that they name most."""


class Quota(msgspec.Struct, frozen=True):
    """Limits of a ledger's size, from its node's NodeConfig."""

    disk_bytes: int = 8 << 30
    """Largest file; `ledger_bytes`."""
    author_bytes: int = 256 << 20
    """Most bytes of one author, whatever its share; `ledger_author_bytes`."""
    round_bytes: int = ROUND_BYTES
    """Bytes that an author may write for each final set that names it; `ledger_round_bytes`."""
    authors: int = 4000
    author_entries: int = 1 << 20


class LedgerRoom(IntEnum):
    """For whom there is room in the file, by what is taken of it."""

    ALL = 0
    """For all authors, up to their shares, and while there is a spare beyond them."""
    MODEST = 1
    """For those within their strict shares, and what others name."""
    WORKING = 2
    """For those within their strict shares that are in the newest final set, worked long, or are named."""
    OWN = 3
    """For this node."""


class Need(IntEnum):
    """Whether others name an entry that is not here, so that it comes past its author's share."""

    NONE = 0
    NAMED = 1
    """A proposer does, who may lie."""
    DECIDED = 2
    """A quorum voted for its set, so honest nodes had room for it. What lies before it in its feed comes too."""


class Shares:
    """The bytes of each author in one ledger, and how many it may have."""

    def __init__(self, own: PeerId, quota: Quota) -> None:
        """`own`: this node, which has room to the end of the file."""
        self.own, self.quota = own, quota
        self.used_bytes = 0
        """Bytes of the file that are taken."""
        self._rounds: Counter[PeerId] = Counter()
        self._sizes: dict[PeerId, int] = {}
        self._had: dict[PeerId, int] | None = None
        self._beyond = 0
        """Bytes that authors hold beyond their shares together."""
        self._newest: frozenset[PeerId] = frozenset()
        self._most = 0
        self._warned = LedgerRoom.ALL

    # --- what happens ----------------------------------------------------------------------------

    def count_round(self, authors: Iterable[PeerId]) -> None:
        """A round is final with the work of these authors, the newest one so far."""
        self._newest, self._had = frozenset(authors), {}
        for author in self._newest:
            self._beyond -= self._excess(author)
            self._rounds[author] += 1
            self._beyond += self._excess(author)
            self._most = max(self._most, self._rounds[author])

    def rounds(self, author: PeerId) -> int:
        """How many final sets name this author."""
        return self._rounds[author]

    def holds(self, author: PeerId) -> bool:
        """Whether a feed of this author is here."""
        return author in self._sizes

    def reset(self, sizes: Mapping[PeerId, int]) -> None:
        """Know exactly these feeds, with the bytes of each."""
        self._sizes = dict(sizes)
        # Before the replay nobody knows who worked. A node that refused its members until then would tell them
        # that they wrote too much, and take its first exchange, which brought nothing, for a whole one.
        self._had = dict(sizes) if self._had is None else self._had
        self._beyond = sum(map(self._excess, sizes))

    def grow(self, author: PeerId, size_bytes: int) -> None:
        """An entry of so many bytes was stored."""
        self.used_bytes += size_bytes + size_bytes // 8 + _ROW_BYTES  # until it is measured, after the batch
        self._beyond -= self._excess(author)
        self._sizes[author] = self._sizes.get(author, 0) + size_bytes
        self._beyond += self._excess(author)

    def forget(self, author: PeerId) -> None:
        """The feed of this author is gone."""
        self._beyond -= self._excess(author)
        self._sizes.pop(author, None)

    def measure(self, used_bytes: int) -> None:
        """So many bytes of the file are taken. The first time that fewer authors have room is logged."""
        before, self.used_bytes = self.room, used_bytes
        if self.room > max(before, self._warned):
            self._warned = self.room
            log.warning("%s", self.fault().line())

    # --- who has room ----------------------------------------------------------------------------

    @property
    def room(self) -> LedgerRoom:
        """For whom there is room."""
        left_bytes = self.quota.disk_bytes - self.used_bytes
        return LedgerRoom(sum(part * left_bytes <= self.quota.disk_bytes for part in _PARTS))

    def is_full(self, author: PeerId, need: Need = Need.NONE) -> bool:
        """Whether no more is stored of an accepted author."""
        spare_bytes, is_long = self.quota.disk_bytes // _SPARE, _LONG * self._rounds[author] >= max(1, self._most)
        return author != self.own and not self._has_room(
            self._sizes.get(author, 0),
            need,
            share=self._share(author),
            strict=self._share(author, STRICT),
            has_spare=self._beyond < spare_bytes,
            is_working=is_long or author in self._newest,
        )

    def is_full_for_new(self, author: PeerId, need: Need = Need.NONE, *, has_spare: bool) -> bool:
        """The same of a newcomer, and before the replay of anybody. `has_spare`: all newcomers hold few bytes."""
        had = (self._had or {}).get(author, 0)
        return not self._has_room(
            self._sizes.get(author, 0),
            need,
            share=SHARE_BYTES + had,
            strict=SHARE_BYTES + had,
            has_spare=has_spare,
            is_working=had > 0,
        )

    def _has_room(
        self, held: int, need: Need, *, share: int, strict: int, has_spare: bool, is_working: bool
    ) -> bool:
        # An honest node that counted the same rounds holds no more than this, so what it names lies within it.
        in_spare = held < share + self.quota.disk_bytes // _SPARE // _EACH
        match self.room:
            case LedgerRoom.OWN:
                return False
            case _ if need is Need.DECIDED:
                return True
            case LedgerRoom.ALL:
                return held < share or (in_spare and (has_spare or need > Need.NONE))
            case LedgerRoom.MODEST:
                return held < strict or (in_spare and need > Need.NONE)
            case LedgerRoom.WORKING:
                return held < strict and (is_working or need > Need.NONE)

    def reason(self, author: PeerId) -> str:
        """Why no more is stored of an author for which there is no room."""
        wrote = f"{short(author)} wrote {self._sizes.get(author, 0) / 2**20:.1f} MiB"
        worked = f"{wrote} with work in {self._rounds[author]} final rounds"
        match self.room:
            case LedgerRoom.OWN:
                return "this ledger is full (ledger_bytes) and stores its own node's records only"
            case LedgerRoom.ALL:
                return f"{worked}, and no more of it is stored (ledger_round_bytes); a new identity begins anew"
            case _:
                return (
                    f"this ledger is nearly full (ledger_bytes) and stores no more of who works little: {worked}"
                )

    def fault(self) -> DiskFault:
        """What the user is told of a file that is filling up."""
        whose = (
            "records of others that are short" if self.room < LedgerRoom.OWN else "this node's own records only"
        )
        taken, most = (size_bytes >> 20 for size_bytes in (self.used_bytes, self.quota.disk_bytes))
        return DiskFault(
            f"the ledger has {taken} of at most {most} MiB, and room for {whose}",
            hint="raise ledger_bytes (config.toml), and start the node again",
        )

    def _share(self, author: PeerId, part: int = 1) -> int:
        return SHARE_BYTES + self.quota.round_bytes // part * (self._rounds[author] + AHEAD_ROUNDS)

    def _excess(self, author: PeerId) -> int:
        return max(0, self._sizes.get(author, 0) - self._share(author)) if author != self.own else 0
