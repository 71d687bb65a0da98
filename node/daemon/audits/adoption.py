"""Which evaluators' findings a trainer may adopt instead of measuring itself. Pure. Rules: docs/roles.md.

An identity costs nothing, so a finding is a claim. A trainer believes an evaluator after its own measurements of
the same audits were equal, goes on measuring some of them, and lets the evaluator go at the first difference.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.protocols.audits.standing import Judgement
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.audit_claims import AuditFindings
from atoll.protocols.ledger.records import MAX_EXCESS

AGREED = 3
"""Equal findings after which an evaluator is believed; twice as many after each that was believed and lied."""
CHECKED = 4
"""A trainer measures one in so many audits itself, whomever it believes. Nobody else knows which."""
TOLERANCE = 8
"""Largest difference of two measurements of one audit, in 16ths of a deviation: machines round differently."""
LEAST_USUAL = 16
"""Where usual verdicts are below a deviation, in 16ths, nothing is adopted: no finding would speak for work."""
LEAST_VERDICTS = 4
"""Verdicts that count about an author before findings about it are adopted."""
REMEMBERED = 64
"""So many of the newest audits, and of the evaluators that lied, are remembered."""


def shows_work(judgement: Judgement, author: PeerId) -> bool:
    """Whether findings about this author may be adopted: whether verdicts so far show at least half of the usual.

    So an evaluator can vouch for nobody who never worked: members find that out themselves.
    """
    found, usual = judgement.heard.get(author), judgement.usual
    return (
        found is not None
        and found.count >= LEAST_VERDICTS
        and usual >= LEAST_USUAL * 256
        and 2 * found.score >= usual
    )


def vouches(judgement: Judgement, excess: int) -> bool:
    """Whether a finding is high enough to be adopted: at least half of the usual verdict.

    A lower one the trainer measures itself. So an evaluator cannot take a member's weight: that takes verdicts
    below three eighths of the usual one on average (`Findings.speaks_against_work`).
    """
    return 2 * 256 * excess >= judgement.usual


@dataclass(slots=True)
class Adoption:
    """What this node measured, what evaluators found, and whom it believes."""

    liars: dict[PeerId, None] = field(default_factory=dict)
    """Evaluators whose finding was not what this node measured, oldest first. They are not believed again."""
    _called: dict[bytes, None] = field(default_factory=dict)
    """Audits that evaluators were called for, oldest first."""
    _own: dict[bytes, int] = field(default_factory=dict)
    """Own measurements that nobody else can know yet."""
    _said: dict[PeerId, dict[bytes, int]] = field(default_factory=dict)
    """The first finding of each live evaluator about each audit."""
    _agreed: dict[PeerId, int] = field(default_factory=dict)
    """Equal findings of each live evaluator."""
    _needed: int = AGREED
    _silent: set[PeerId] = field(default_factory=set)

    @property
    def is_called_for(self) -> bool:
        """Whether an evaluator is there."""
        return bool(self._said)

    @property
    def believed(self) -> list[PeerId]:
        """The live evaluators whose findings may be adopted, sorted."""
        return sorted(peer for peer, count in self._agreed.items() if count >= self._needed)

    @property
    def relieves(self) -> bool:
        """Whether one of them found what it was last waited for."""
        return not self._silent.issuperset(self.believed)

    def is_called(self, key: bytes) -> bool:
        """Return whether evaluators were called for an audit."""
        return key in self._called

    def call(self, keys: Iterable[bytes]) -> None:
        """Evaluators are called for these audits."""
        self._called |= dict.fromkeys(keys)
        for old in list(self._called)[:-REMEMBERED]:
            self._forget(old)

    def hear(self, findings: Mapping[PeerId, AuditFindings]) -> None:
        """These are the live findings of others. One that is changed later is not read again."""
        for gone in self._said.keys() - findings.keys():
            self._drop(gone)
        for peer in sorted(findings.keys() - self.liars.keys()):
            known = self._said.setdefault(peer, {})
            for key, excess in findings[peer].found:
                if key in self._called and key not in known:
                    known[key] = excess
                    self._silent.discard(peer)
                    if not self._compare(peer, key):
                        break

    def measured(self, key: bytes, excess: int) -> None:
        """This node made an audit at the state that evaluators make it at."""
        if key in self._called:
            self._own[key] = excess
            for peer in [peer for peer, known in self._said.items() if key in known]:
                self._compare(peer, key)

    def publish(self) -> None:
        """Own verdicts go into a contribution: a finding about the same audits may be a copy from now on."""
        for key in list(self._own):
            self._forget(key)

    def find(self, key: bytes) -> tuple[PeerId, int] | None:
        """What those that are believed found, and one of them; the lowest excess where they are of two minds."""
        found = {peer: self._said[peer][key] for peer in self.believed if key in self._said[peer]}
        if not found:
            return None
        peer, excess = next(iter(found.items()))
        is_one = max(found.values()) - min(found.values()) <= TOLERANCE
        return peer, excess if is_one else -MAX_EXCESS

    def miss(self, keys: Iterable[bytes]) -> None:
        """These were waited for in vain: who found none of them is not waited for until it finds something."""
        missed = set(keys)
        if missed:
            self._silent |= {peer for peer in self.believed if not self._said[peer].keys() & missed}

    def _compare(self, peer: PeerId, key: bytes) -> bool:
        """Return whether a finding may be true; an evaluator whose finding is not is dropped."""
        if key not in self._own:
            return True
        if abs(self._own[key] - self._said[peer][key]) <= TOLERANCE:
            self._agreed[peer] = self._agreed.get(peer, 0) + 1
            return True
        if peer in self.believed:
            # Names are free: others that the liar prepared would each be believed for a while.
            self._needed = min(2 * self._needed, 1 << 20)
            self._agreed.clear()
        self._drop(peer)
        self.liars[peer] = None
        for old in list(self.liars)[:-REMEMBERED]:
            del self.liars[old]
        return False

    def _drop(self, peer: PeerId) -> None:
        self._said.pop(peer, None)
        self._agreed.pop(peer, None)
        self._silent.discard(peer)

    def _forget(self, key: bytes) -> None:
        self._called.pop(key, None)
        self._own.pop(key, None)
        for known in self._said.values():
            known.pop(key, None)
