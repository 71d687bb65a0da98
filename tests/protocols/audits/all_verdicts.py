"""Who decides where voters must have shown work, by all verdicts of the rounds that are looked at: plain.

The tally of the product remembers less. After each set it must have the same deciders.
"""

from atoll.protocols.audits.shown_work import FEW_DECIDERS, OWNER_ROUNDS, Awaited, FinalVerdict, leaves_no_doubt
from atoll.protocols.audits.standing import audited_by, named


class AllVerdicts:
    """Reads each final set of a chain, and forgets none before its time."""

    def __init__(self, probation, owner, each, memory):
        self.probation, self.owner, self.each, self.memory = probation, owner, each, memory
        self.rounds, self.counts, self.shown = 0, {}, frozenset()
        self.asked, self.found = [], []

    def proven(self, authors, voters):
        everybody = frozenset(authors)
        if self.rounds == 0:
            return everybody & {self.owner} or everybody
        return everybody & self.shown or frozenset(voters)

    def after(self, authors, members, deciding):
        """Count one more final set."""
        first, number = self.rounds - self.memory + 1, self.rounds
        read = [named(*each) for each in members]
        given = {}
        for one in read:
            for verdict in one.verdicts:
                given.setdefault((one.author, verdict.contribution), verdict.excess)
        self.asked = [one for one in self.asked if one.round >= first]
        self.found = [one for one in self.found if one.round >= first]
        for one in list(self.asked):
            if (one.auditor, one.entry) in given:
                self.asked.remove(one)
                excess = given[one.auditor, one.entry]
                self.found.append(FinalVerdict(one.round, one.author, one.auditor, excess))
        author_of = {one.entry: one.author for one in read}
        self.asked += [
            Awaited(number, author_of[about], author_of[entry], about)
            for entry, drawn in audited_by(author_of, self.each).items()
            if author_of[entry] in deciding
            for about in drawn
        ]
        for author in authors:
            self.counts[author] = self.counts.get(author, 0) + 1
        if number == 0:
            self.shown = frozenset(deciding)
        self.rounds += 1
        deciders = {one.auditor for one in (*self.asked, *self.found)}
        self.shown |= {
            author
            for author, count in self.counts.items()
            if count >= self.probation
            and self.leaves_no_doubt([one for one in self.found if one.author == author], deciders)
        }

    def leaves_no_doubt(self, found, deciders):
        """While few decide and the owner audits, by its verdicts."""
        newest = max((one.round for one in (*self.asked, *self.found) if one.auditor == self.owner), default=-9)
        if len(deciders) < FEW_DECIDERS and newest >= self.rounds - OWNER_ROUNDS:
            return leaves_no_doubt([one for one in found if one.auditor == self.owner], 1)
        return leaves_no_doubt(found, len(deciders))
