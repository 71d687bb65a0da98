"""Which weight a contribution has: a pure function, in integers, of sets and of the verdicts that they hold.

The author of each contribution of a set audits one other of the same set. Nobody chooses whom: the draw depends on
the whole set. A verdict counts as soon as a set holds the contribution that carries it, and for `memory` rounds.
An author has no weight while the verdicts on it look like those on work that was copied or invented, and would
look otherwise if it worked like the others. Rule and figures: docs/audits.md.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt
from typing import NamedTuple, TypeAlias

from atoll.protocols.ids import Digest, PeerId, digest
from atoll.protocols.ledger.records import AuditedContribution, Contribution, Verdict, set_digest
from atoll.protocols.run.sections.audits import AuditSpec

LEAST_AUDITORS, MANY_AUDITORS = 2, 8
"""Fewer auditors take nobody's weight: two, in larger runs half of the others, eight at most."""
DOUBT, ENOUGH, DOUBT_BETWEEN = 10, 3, 5
"""Nats that the verdicts on an author must speak against its work, in Wald's sequential test of work against none;
deviations above nothing that keep its weight whatever is usual; nats that those auditors' verdicts must speak
against it that are left without the ones at both ends, which may lie."""
FEW_DECIDERS, OWNER_ROUNDS = 7, 4
"""While fewer decide, the owner's verdicts alone say who else does, and nobody falls without them: until so many
sets lack the owner."""
SHOWN = 5
"""Deviations of work that verdicts show together, before their author decides rounds."""
FULL = 64
"""Weight of the round's nominal tokens. Who claims less work is expected to show less."""
_UNIT = 16 * 256
"""Units of a score in a deviation: a verdict counts 16ths of it, means of verdicts 256ths of that."""
_FINE = 10
"""Bits behind the point of a root."""
_DOMAIN = b"atoll/audit/1\0"


class Named(NamedTuple):
    """A contribution of a set."""

    entry: Digest
    author: PeerId
    weight: int
    payload: Digest
    verdicts: tuple[Verdict, ...]


Sets: TypeAlias = Mapping[int, Sequence[Named]]
"""The set of each round: the final one, or that of this node's view."""
Deciders: TypeAlias = Mapping[int, frozenset[PeerId]]
"""Who decides the round after the set of each round, in runs with `audit.voters`. Nobody else's verdicts count."""


@dataclass(slots=True)
class Findings:
    """What was found of one author."""

    by_auditor: dict[PeerId, list[tuple[int, int]]] = field(default_factory=dict)
    """Excess of each auditor's verdicts, and the weight that was audited, FULL at most."""
    by_count: bool = False
    """Whether the auditor in the middle of all verdicts is asked, too, and the higher one counts."""
    trusted: PeerId | None = None
    """The owner, while few decide: the score is not below what it found on average."""

    @property
    def count(self) -> int:
        """Number of verdicts."""
        return sum(map(len, self.by_auditor.values()))

    @property
    def claimed2(self) -> int:
        """Sum of the squares of the audited weights."""
        return sum(weight * weight for each in self.by_auditor.values() for _, weight in each)

    @property
    def score(self) -> int:
        """What the auditor in the middle found on average, in units of 1 / _UNIT; of two the higher one."""
        means = sorted(_mean(each) for each in self.by_auditor.values())
        middle = means[len(means) // 2]
        if not self.by_count:
            return middle
        # One poor verdict each of two new deciders would outweigh the six that the owner gave while it was alone.
        means = sorted(_mean(each) for each in self.by_auditor.values() for _ in each)
        found = self.by_auditor.get(self.trusted, []) if self.trusted else []
        return max(middle, means[len(means) // 2], *([_mean(found)] if found else []))

    @property
    def shown(self) -> int:
        """How far all verdicts together lie above those on no work, in units of 1 / _UNIT deviation."""
        return self.score * isqrt(self.count << 2 * _FINE) >> _FINE if self.by_auditor else 0

    @property
    def measured(self) -> int | None:
        """What the author says of usual scores: its own, or what the owner found, while few decide."""
        # Of three deciders two may lie: what they say of each other would be what is usual.
        if self.trusted is None:
            return self.score if self.by_auditor else None
        return _mean(self.by_auditor[self.trusted]) if self.trusted in self.by_auditor else None

    def expected(self, usual: int) -> int:
        """How far work would lie above them, in the same units: at least three quarters of the usual score.

        Honest members differ: with all of it, one with a third less would fall by chance once in 40 runs.
        """
        return max(0, 3 * usual * isqrt(self.claimed2 << 2 * _FINE) // (4 * FULL) >> _FINE)

    def speaks_against_work(self, usual: int, doubt: int = DOUBT) -> bool:
        """Whether work would hardly have such verdicts. False while usual ones would not leave any doubt either.

        For normal verdicts the logarithm of the likelihood ratio is shown · expected − expected² / 2.
        """
        shown, expected = self.shown, self.expected(usual)
        return shown < ENOUGH * _UNIT and 2 * expected * shown < expected**2 - 2 * doubt * _UNIT**2

    def between(self, usual: int, liars: int) -> "Findings":
        """What is left without so many auditors at each end, of those that speak most for and against work."""
        ranked = sorted(
            self.by_auditor, key=lambda auditor: (_speaks_for(self.by_auditor[auditor], usual), auditor)
        )
        most, least = min(liars, (len(ranked) - 1) // 2), min(liars, len(ranked) // 2)
        return self.without(frozenset([*ranked[:least], *ranked[len(ranked) - most :]]))

    def may_fall(self, least: int) -> bool:
        """Whether enough auditors looked at the author. Who is trusted is among them."""
        # Of the first deciders two may lie, and be most of them.
        return len(self.by_auditor) >= least and (self.trusted is None or self.trusted in self.by_auditor)

    def without(self, auditors: frozenset[PeerId]) -> "Findings":
        """What all others found."""
        kept = {auditor: each for auditor, each in self.by_auditor.items() if auditor not in auditors}
        return Findings(kept, self.by_count, self.trusted)


def named(entry: Digest, author: PeerId, record: Contribution) -> Named:
    """A contribution as this module reads it."""
    verdicts = record.verdicts if isinstance(record, AuditedContribution) else ()
    return Named(entry, author, record.weight, record.payload, verdicts)


def audited_by(names: Iterable[Digest], each: int = 1) -> Mapping[Digest, tuple[Digest, ...]]:
    """Which contributions the author of each contribution of a set audits, by entry ids: `each`, or all others."""
    return _circle(tuple(sorted(set(names))), each)


@lru_cache(maxsize=512)
def _circle(entries: tuple[Digest, ...], each: int) -> Mapping[Digest, tuple[Digest, ...]]:
    seed = set_digest([*entries])
    drawn = sorted(entries, key=lambda entry: digest(_DOMAIN, seed, entry))
    count = min(each, len(drawn) - 1)
    return {one: tuple((drawn + drawn)[at + 1 : at + 1 + count]) for at, one in enumerate(drawn) if count > 0}


class Judgement(NamedTuple):
    """What the verdicts of a time say about all authors."""

    gone: frozenset[PeerId]
    """Authors without weight."""
    heard: Mapping[PeerId, Findings]
    """What was found of each author, by those whose verdicts count."""
    usual: int
    """The score two thirds of the way up, in units of 1 / _UNIT."""

    def shown(self, author: PeerId) -> tuple[float, float, float]:
        """Deviations of work that all verdicts on an author show together, that usual ones would show, and that
        keep its weight."""
        found = self.heard.get(author, Findings())
        expected = found.expected(self.usual) / _UNIT
        enough = min(float(ENOUGH), expected / 2 - DOUBT / expected) if expected else 0.0
        return found.shown / _UNIT, self.usual * found.claimed2**0.5 / (_UNIT * FULL), enough


NOBODY = Judgement(frozenset(), {}, 0)


def without_weight(
    spec: AuditSpec, sets: Sets, number: int, deciders: Deciders | None = None, *, owner: PeerId | None = None
) -> frozenset[PeerId]:
    """Authors whose contributions to round `number` weigh nothing, as the sets up to `lag` rounds before say."""
    return judge(spec, sets, number, deciders, owner=owner).gone


def judge(
    spec: AuditSpec, sets: Sets, number: int, deciders: Deciders | None = None, *, owner: PeerId | None = None
) -> Judgement:
    """What the sets up to `lag` rounds before say about the authors of contributions to round `number`."""
    last = number - spec.lag
    first = last - spec.memory + 1
    found = verdicts_in(sets, first, last, spec.per_round, deciders)
    # Nobody can have counted a verdict on the last set.
    deciding = _decided(deciders, max(0, first), last)
    is_here = owner in (_decided(deciders, last - OWNER_ROUNDS, last) or ())
    if deciding is not None and len(deciding) < FEW_DECIDERS and is_here:
        for each in found.values():
            each.trusted = owner
    judged = _judged(found, found, deciding)
    # Who does no work has no say either: its verdicts may be as invented as the rest.
    heard = {author: each.without(judged.gone) for author, each in found.items()}
    return _judged(found, heard, deciding) if judged.gone else judged


def _judged(
    found: Mapping[PeerId, Findings], heard: Mapping[PeerId, Findings], deciding: frozenset[PeerId] | None
) -> Judgement:
    """Authors whose work shows as little as none would. `heard`: those of the verdicts that count."""
    measured = (each.measured for each in _measure(heard, deciding))
    scores = sorted(score for score in measured if score is not None)
    if not scores:
        return NOBODY._replace(heard=heard)
    # Two thirds of the way up: a third of the authors may do nothing, and a third cannot raise it by lies.
    usual = scores[2 * (len(scores) - 1) // 3]

    judged = [author for author, each in found.items() if each.may_fall(_least(author, found, deciding))]
    gone = (author for author in judged if _falls(heard[author], usual, deciding))
    return Judgement(frozenset(gone), heard, usual)


def _falls(found: Findings, usual: int, deciding: frozenset[PeerId] | None) -> bool:
    """Whether the verdicts that count take an author's weight."""
    if not found.speaks_against_work(usual):
        return False
    if deciding is None or found.trusted is not None:
        return True
    # The auditor in the middle of few may be the one honest auditor beside liars, and may have looked once. How
    # many verdicts there are says nothing of how sure that one is.
    between = found.between(usual, max(1, (len(deciding) - 1) // 3))
    return between.speaks_against_work(usual, DOUBT_BETWEEN)


def _decided(deciders: Deciders | None, first: int, end: int) -> frozenset[PeerId] | None:
    """Who decided after the sets of these rounds; None where everybody's verdicts count."""
    if deciders is None:
        return None
    return frozenset[PeerId]().union(*(deciders.get(at, ()) for at in range(first, end)))


def _measure(heard: Mapping[PeerId, Findings], deciding: frozenset[PeerId] | None) -> Iterable[Findings]:
    """What was found of the authors that say what is usual."""
    if deciding is None:
        return heard.values()
    # Noise may be most of a set. While one member decides alone, nobody that decides audits it: then those say it
    # that have shown as much as they need to decide.
    return [each for author, each in heard.items() if author in deciding] or [
        each for each in heard.values() if each.shown >= SHOWN * _UNIT
    ]


def _least(author: PeerId, found: Mapping[PeerId, Findings], deciding: frozenset[PeerId] | None) -> int:
    """How many must have audited an author before it can fall."""
    auditors = found if deciding is None else deciding
    others = len(auditors) - (author in auditors)
    if deciding is None:
        return max(LEAST_AUDITORS, min(MANY_AUDITORS, others // 2))
    # Twice as many as a third of those that say who works, which may lie. Who decides alone needs no second one:
    # what is final follows from its word in any case.
    most = 2 * (len(deciding) // 3)
    return 1 if len(deciding) == 1 and others else max(LEAST_AUDITORS, min(MANY_AUDITORS, others, most))


def _speaks_for(found: Collection[tuple[int, int]], usual: int) -> int:
    """How far verdicts speak for work and not for none: in proportion to the logarithm of the likelihood ratio."""
    return sum(weight * (8 * FULL * 256 * excess - 3 * usual * weight) for excess, weight in found)


def _mean(found: Collection[tuple[int, int]]) -> int:
    return sum(excess for excess, _ in found) * 256 // len(found)


def verdicts_in(
    sets: Sets, first: int, last: int, each_audits: int = 1, deciders: Deciders | None = None
) -> dict[PeerId, Findings]:
    """The verdicts on contributions to rounds `first … last` that sets up to `last` hold and that were asked for.

    Of several verdicts of one author on one contribution the first counts.
    """
    asked: dict[tuple[PeerId, Digest], Named] = {}
    for number in range(max(0, first), last + 1):
        members = {each.entry: each for each in sets.get(number, ())}
        for auditor, drawn in audited_by(members, each_audits).items():
            if deciders is None or members[auditor].author in deciders.get(number, ()):
                asked.update(((members[auditor].author, audited), members[audited]) for audited in drawn)
    found: dict[PeerId, Findings] = {}
    for number in range(max(0, first) + 1, last + 1):
        for each in sets.get(number, ()):
            for verdict in each.verdicts:
                about = asked.pop((each.author, verdict.contribution), None)
                if about is not None:
                    known = found.setdefault(about.author, Findings(by_count=deciders is not None))
                    known.by_auditor.setdefault(each.author, []).append((verdict.excess, min(FULL, about.weight)))
    return found
