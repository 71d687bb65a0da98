"""The contributions that the ledger knows, by entry, as the driver needs them; without any I/O."""

from collections.abc import Iterable

from atoll.node.daemon.coordinator.payload_fetcher import Named, Payloads
from atoll.node.daemon.rounds.participants import Known, known_of
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.ledger.records import (
    Contribution,
    Entry,
    PartContribution,
    Reduction,
    ReductionFault,
    SlicedContribution,
    experts_of,
)
from atoll.protocols.local.worker_messages import Pending
from atoll.protocols.run.experts import check_bitmap
from atoll.protocols.run.run_spec import RunSpec


class Contributions:
    """All of rounds whose payloads are not dropped."""

    def __init__(self, me: PeerId, payloads: Payloads) -> None:
        self._me, self._payloads = me, payloads
        self._found: dict[Digest, tuple[PeerId, Contribution]] = {}
        self._own_rounds: dict[int, Digest] = {}

    def note(self, entry: Digest, author: PeerId, body: Contribution) -> None:
        """One more. Our own worker made ours: their payloads need no look."""
        self._found[entry] = (author, body)
        if author == self._me:
            self._own_rounds[body.round] = entry
            self._payloads.trust(named(body))

    def held(self, entry: Digest) -> bool:
        """Whether it can be folded now."""
        return entry in self._found and self._payloads.held(named(self._found[entry][1]))

    def is_ours(self, number: int) -> bool:
        """Whether we contributed to a round (that was not forgotten)."""
        return number in self._own_rounds

    def said(self, above: int) -> tuple[Round, ...]:
        """Rounds above this one that we contributed to, rising."""
        return tuple(Round(number) for number in sorted(self._own_rounds) if number > above)

    def authors(self, entries: Iterable[Digest]) -> list[PeerId]:
        """Of those that are known."""
        return [self._found[entry][0] for entry in entries if entry in self._found]

    def named(self, entries: Iterable[Digest]) -> list[tuple[PeerId, Named]]:
        """Authors and payloads of those that are known."""
        found = (self._found[entry] for entry in entries if entry in self._found)
        return [(author, named(body)) for author, body in found]

    def known(self, entries: Iterable[Digest]) -> tuple[Known, ...]:
        """As the fold needs them; entries that the ledger lacks, and Reductions, are left out."""
        found = [(entry, *self._found[entry]) for entry in entries if entry in self._found]
        return tuple(known_of(entry, author, c, self.held(entry)) for entry, author, c in found)

    def held_with(self, payload: Digest) -> list[tuple[Round, Digest]]:
        """Rounds and entries of the contributions that name a payload and can be folded with it, rising."""
        naming = [(body.round, entry) for entry, (_, body) in self._found.items() if body.payload == payload]
        return sorted(one for one in naming if self.held(one[1]))

    def payloads(self) -> set[Digest]:
        """All that these name."""
        return {body.payload for _, body in self._found.values()}

    def forget(self, before: Round) -> set[Digest]:
        """Forget rounds before `before`. Returns their payloads."""
        old = {entry: body for entry, (_, body) in self._found.items() if body.round < before}
        for entry in old:
            del self._found[entry]
        self._own_rounds = {number: entry for number, entry in self._own_rounds.items() if number >= before}
        return {body.payload for body in old.values()}


def named(body: Contribution) -> Named:
    """What a contribution says that its payload is."""
    rows = body.rows if isinstance(body, SlicedContribution) else b""
    return Named(body.payload, body.round, experts_of(body), rows)


def contribution_of(pending: Pending) -> Contribution:
    """What we say of a payload that our worker made. Runs that share experts reduce no rounds."""
    p = pending
    words = (p.round, p.base, p.payload, p.steps, p.tokens, p.weight, p.loss)
    if p.experts:
        return PartContribution(*words, p.experts)
    return SlicedContribution(*words, Digest(p.rows)) if p.rows else Contribution(*words)


def is_lawful(spec: RunSpec, entry: Entry) -> bool:
    """Whether it is a word of this run. Others are as if they had not been said.

    In runs whose rounds may be reduced nobody can use a payload without the root of its rows; in others nobody
    could ever fold a set with a Reduction in it. Who names experts names some of the run's.
    """
    match entry.body:
        case PartContribution(experts=experts):
            return _is_bitmap(experts, splits(spec))
        case Contribution():
            return isinstance(entry.body, SlicedContribution) == (spec.reduce is not None)
        case Reduction() | ReductionFault():
            return spec.reduce is not None
    return True


def _is_bitmap(experts: bytes, count: int) -> bool:
    try:
        check_bitmap(experts, count)
    except DecodeError:
        return False
    return True
