"""The contributions that the ledger knows, by entry, as the driver needs them; without any I/O."""

from collections.abc import Iterable

from atoll.node.membership import Known, known_of
from atoll.node.payloads import Payloads
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.records import Contribution, experts_of


class Contributions:
    """All of newer rounds, and the payloads of all of ours."""

    def __init__(self, me: PeerId, payloads: Payloads) -> None:
        self._me, self._payloads = me, payloads
        self._found: dict[Digest, tuple[PeerId, Contribution]] = {}
        self._own_rounds: dict[int, Digest] = {}
        self._own_payloads: dict[Digest, Digest] = {}

    def note(self, entry: Digest, author: PeerId, body: Contribution) -> None:
        """One more. Our own worker made ours: their payloads need no look."""
        self._found[entry] = (author, body)
        if author == self._me:
            self._own_rounds[body.round] = entry
            self._own_payloads[entry] = body.payload
            self._payloads.trust(body.payload, body.round, experts_of(body))

    def is_ours(self, number: int) -> bool:
        """Whether we contributed to a round (that was not forgotten)."""
        return number in self._own_rounds

    def own_payloads(self, entries: Iterable[Digest]) -> list[Digest]:
        """Payloads of those of these that are ours. For good: which were used may be asked long after."""
        return [self._own_payloads[entry] for entry in entries if entry in self._own_payloads]

    def authors(self, entries: Iterable[Digest]) -> list[PeerId]:
        """Of those that are known."""
        return [self._found[entry][0] for entry in entries if entry in self._found]

    def known(self, entries: Iterable[Digest]) -> tuple[Known, ...]:
        """As the fold needs them; entries that the ledger lacks are left out."""
        found = [(entry, *self._found[entry]) for entry in entries if entry in self._found]
        return tuple(known_of(entry, author, c, self._is_held(c)) for entry, author, c in found)

    def held_in(self, payload: Digest) -> list[tuple[Round, bytes]]:
        """The rounds, rising, and covered experts as which a payload is named and can be folded."""
        named = [body for _, body in self._found.values() if body.payload == payload]
        return sorted({(body.round, experts_of(body)) for body in named if self._is_held(body)})

    def _is_held(self, body: Contribution) -> bool:
        return self._payloads.held(body.payload, body.round, experts_of(body))

    def forget(self, before: Round) -> set[Digest]:
        """Forget rounds before `before`. Returns their payloads, without those that a newer contribution names:
        nobody could fetch them again.
        """
        old = {entry: body for entry, (_, body) in self._found.items() if body.round < before}
        for entry in old:
            del self._found[entry]
        self._own_rounds = {number: entry for number, entry in self._own_rounds.items() if number >= before}
        return {body.payload for body in old.values()} - {body.payload for _, body in self._found.values()}
