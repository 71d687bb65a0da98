"""Reducers that do not answer: who complained about which Reduction, and which of them this node believes.

A missing answer proves nothing, because nobody sees another's connection. So a complaint is only a reason to ask
for the same opening oneself. A Reduction is *silent* here once it gave no answer to this node and, by their
complaints, to another member: one member with a bad connection never costs a reducer its slice, and a liar's
complaint costs each member one opening.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Unanswered
from atoll.protocols.ledger.reduction import Claim

ENOUGH = 3
"""Complaints about one Reduction; with as many in the ledger one more says nothing new."""
MOST_CHECKED = 16
"""Complaints of one round that this node checks."""
MOST_UNFOUNDED = 3
"""A member whose complaints this node found answered so often is not listened to any more."""


@dataclass(slots=True)
class Complaints:
    """Complaints of all members about Reductions, and what this node found itself."""

    me: PeerId
    publish: Callable[[Unanswered], object]
    on_silent: Callable[[Digest], None]
    """Called once for a Reduction that turns out to be silent."""
    silent: set[Digest] = field(default_factory=set)
    _by: dict[Digest, set[PeerId]] = field(default_factory=dict)
    """Members that complained about a Reduction."""
    _rounds: dict[Digest, Round] = field(default_factory=dict)
    _unanswered: set[Digest] = field(default_factory=set)
    """Reductions that gave this node no answer."""
    _checked: dict[int, int] = field(default_factory=dict)
    """Number of complaints that this node checked, by round."""
    _unfounded: dict[PeerId, int] = field(default_factory=dict)

    def add(self, author: PeerId, body: Unanswered, claim: Claim | None) -> bool:
        """Record a complaint. Returns whether this node asks for that opening itself.

        Not counted: a second one of the author about a Reduction, one of its reducer, one about no chunk of it.
        """
        # A reducer could complain about itself in another member's place: it would be believed by whom it starves.
        if claim is None or claim.author == author or not claim.body.span.holds(body.chunk):
            return False
        known = self._by.setdefault(claim.entry, set())
        is_heard = self._unfounded.get(author, 0) < MOST_UNFOUNDED
        if claim.body.round != body.round or author in known or not is_heard:
            return False
        known.add(author)
        self._rounds[claim.entry] = claim.body.round
        self._judge(claim.entry)
        # Our own Reduction is for others to open; and who did not answer us once is not asked again.
        if self.me in (author, claim.author) or claim.entry in self._unanswered:
            return False
        count = self._checked[body.round] = self._checked.get(body.round, 0) + 1
        return count <= MOST_CHECKED

    def note_unanswered(self, claim: Claim, chunk: int) -> None:
        """This node got no legal answer within the reducer's patience: complain, unless enough others did."""
        if claim.entry in self._unanswered:
            return
        self._unanswered.add(claim.entry)
        self._rounds[claim.entry] = claim.body.round
        # A mute reducer would else cost the ledger an entry of every member in every round.
        if len(self._by.get(claim.entry, ())) < ENOUGH:
            self.publish(Unanswered(claim.body.round, claim.entry, chunk))
        self._judge(claim.entry)

    def has_answered(self, entry: Digest) -> bool:
        """Return whether all that this node asked for of a Reduction was opened."""
        return entry not in self._unanswered

    def note_opened(self, entry: Digest) -> None:
        """What was not opened before came: the Reduction is silent only once it is asked in vain again."""
        self._unanswered.discard(entry)

    def note_answered(self, complainer: PeerId) -> None:
        """A complaint of this member was checked, and the opening came."""
        self._unfounded[complainer] = self._unfounded.get(complainer, 0) + 1

    def forget(self, before: int) -> None:
        """Forget the rounds before this one."""
        gone = {entry for entry, number in self._rounds.items() if number < before}
        for entry in gone:
            self._by.pop(entry, None)
            del self._rounds[entry]
        self._unanswered -= gone
        self.silent -= gone
        self._checked = {number: count for number, count in self._checked.items() if number >= before}

    def _judge(self, entry: Digest) -> None:
        # Two witnesses, this node one of them: neither a bad connection nor a lie is enough alone.
        others = self._by.get(entry, set()) - {self.me}
        if entry in self._unanswered and others and entry not in self.silent:
            self.silent.add(entry)
            self.on_silent(entry)
