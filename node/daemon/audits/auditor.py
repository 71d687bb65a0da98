"""This node's part in audits: it audits what it drew, publishes what it found, and keeps the weights."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex, Found
from atoll.node.daemon.coordinator.interfaces import BlobSource, RunContext
from atoll.node.daemon.coordinator.runtime import EventQueue, Machines, WorkerClient
from atoll.node.daemon.rounds.types import Reweighed
from atoll.protocols.audits.standing import (
    NOBODY,
    Judgement,
    Named,
    audited_by,
    judge,
    named,
    weights,
    without_weight,
)
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import MAX_VERDICTS, Contribution, Verdict
from atoll.protocols.local.contribution_forms import member_of
from atoll.protocols.local.worker_messages import AuditReply, AuditRequest, Member
from atoll.protocols.run.sections.audits import AuditSpec

OTHERS = 8
"""Most other contributions of the round whose mean an audit leaves out."""


@dataclass(kw_only=True)
class Auditor:
    """For one run with audits."""

    audits: AuditSpec
    context: RunContext
    contributions: ContributionIndex
    blobs: BlobSource
    queue: EventQueue
    machines: Machines
    worker: WorkerClient
    prepare: Callable[[Turn], Awaitable[None]]
    """Fetches what a member's turn read of a packed text. Raises TimeoutError, DiskFault."""
    rng: random.Random
    """Chooses the others; a set that could be foreseen could be hidden in."""
    judgement: Judgement = NOBODY
    """What verdicts say for the round after the newest final one."""
    sharers: Mapping[PeerId, int] = field(default_factory=dict)
    """Contributions to the newest final round with the payload of each of its authors."""
    _final: int = -1
    _gone: dict[int, frozenset[PeerId]] = field(default_factory=dict)
    """Authors without weight in each final round that has some."""
    _sets: dict[int, Sequence[Named]] = field(default_factory=dict)
    """Final sets, and of open rounds those of this node's view."""
    _given: dict[tuple[int, tuple[Digest, ...]], Mapping[Digest, int]] = field(default_factory=dict)
    """Weights that the worker was given, for each set of an open round."""
    _unaudited: float = 0.0
    """Own work since the newest audits of this node, in rounds of nominal work; at most one."""
    _known_before: dict[Digest, Round] = field(default_factory=dict)
    """The first round that became final here after a contribution to a later one was known."""
    _waiting: dict[Digest, Verdict] = field(default_factory=dict)
    """Verdicts that are in no final set yet."""

    def weigh(self, number: Round, found: Found) -> Mapping[Digest, int]:
        """Return the weight of each of these contributions to a round, for its fold."""
        members = [named(*each) for each in found]
        weighed = weights(members, self._gone_in(number))
        if number > self._final:
            self._given[number, tuple(each.entry for each in members)] = weighed
        return weighed

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts for the next contribution: those that are in no final set yet."""
        return tuple(self._waiting.values())

    def on_set(self, number: Round, names: tuple[Digest, ...], is_final: bool) -> None:
        """The view has this set of a round, or it is final: weights may follow from it."""
        if is_final:
            self._on_final(number, names)
        elif number > self._final:
            self._set(number, names)

    def _on_final(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Later rounds have their weights from this set, and this node audits its part of it."""
        gone = self._gone_in(number)
        if gone:
            self._gone[number] = gone
        self._final = max(self._final, number)
        self._set(number, names)
        said = (each.verdicts for each in self._sets[number] if each.author == self.context.me)
        for verdict in next(said, ()):
            self._waiting.pop(verdict.contribution, None)
        for entry in self.contributions.later(number):
            self._known_before.setdefault(entry, number)
        before = number - self.audits.memory - self.audits.lag
        self._sets = {at: members for at, members in self._sets.items() if at > before}
        self._given = {key: given for key, given in self._given.items() if key[0] > number}
        self._report(number)
        requests = self._drawn(number, names)
        if requests:
            self.queue.start_task(self._audit_all(requests), f"audit {number}")

    def _set(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Remember a set, and have those open rounds folded again whose weights change by it."""
        self._sets[number] = [named(*each) for each in self.contributions.find(names)]
        for (later, entries), given in list(self._given.items()):
            if later < number + self.audits.lag:
                continue
            members = [named(*each) for each in self.contributions.find(entries)]
            weighed = weights(members, self._gone_in(Round(later)))
            if weighed != given:
                self._given[later, entries] = weighed
                self.queue.post(partial(self.machines.feed_round, Reweighed(Round(later), self.context.now())))

    def _gone_in(self, number: Round) -> frozenset[PeerId]:
        """Authors without weight in a round. Of a final one it is remembered: its worker may be far behind."""
        if number <= self._final:
            return self._gone.get(number, frozenset())
        return without_weight(self.audits, self._sets, number)

    def _report(self, number: Round) -> None:
        before, members = self.judgement.gone, self._sets[number]
        self.judgement = judge(self.audits, self._sets, self._final + 1)
        payloads = [each.payload for each in members]
        self.sharers = {each.author: payloads.count(each.payload) for each in members}
        if self.judgement.gone != before:
            self.context.log.event("unweighed", peers=sorted(self.judgement.gone))

    def _drawn(self, number: Round, names: tuple[Digest, ...]) -> list[AuditRequest]:
        """The audits that fall to this node; none if it did not contribute, or lacks the payloads."""
        found = {entry: (author, record) for entry, author, record in self.contributions.find(names)}
        ours = next((entry for entry, (author, _) in found.items() if author == self.context.me), None)
        held = [entry for entry in found if self.contributions.is_held(entry)]
        if ours is None or len(held) < 2 or not self.worker.is_ready:
            return []
        # An audit takes a slow machine as many times longer as its steps: so it has as many times fewer of them.
        self._unaudited = min(1.0, self._unaudited + self._work(number, found[ours][1]))
        if self._unaudited < 1:
            return []
        self._unaudited = 0.0

        def member(entry: Digest) -> Member:
            author, record = found[entry]
            return member_of(entry, author, record.weight, record, self.blobs.blob_path(record.payload))

        requests = []
        for drawn in audited_by(found, self.audits.per_round).get(ours, ()):
            others = [entry for entry in held if entry != drawn]
            chosen = self.rng.sample(others, min(OTHERS, len(others)))
            if drawn in held:
                requests.append(
                    AuditRequest(
                        round=number,
                        tokens=found[drawn][1].tokens,
                        audited=member(drawn),
                        others=tuple(map(member, chosen)),
                        sent=tuple(map(member, held)),
                        # Who sends another's newest payload in a round that is still open was not first.
                        before=self._known_before.get(drawn, number),
                    )
                )
        self._known_before = {at: first for at, first in self._known_before.items() if at not in found}
        return requests

    def _work(self, number: Round, record: Contribution) -> float:
        """A contribution's share of its round's nominal tokens."""
        return record.tokens / self.context.spec.nominal_tokens(number)

    async def _audit_all(self, requests: Sequence[AuditRequest]) -> None:
        for request in requests:  # one after the other: between two of them the worker takes steps
            await self._audit(request)

    async def _audit(self, request: AuditRequest) -> None:
        """Ask the worker. A payload that the disk lost is not audited, nor work on a text that nobody sends."""
        try:
            await self.prepare(Turn(request.round, PeerId(request.audited.author)))
            done = await self.worker.ask(request, AuditReply)
        except (CorruptFault, DecodeError, DiskFault, TimeoutError) as error:
            why = error.line() if isinstance(error, AtollError) else "nobody sends the text that it is about"
            self.context.log.event("not_audited", round=request.round, error=why)
            return
        entry, author = request.audited.entry, request.audited.author
        newest = [*self._waiting.items(), (entry, Verdict(entry, done.excess))]
        self._waiting = dict(newest[-MAX_VERDICTS:])
        took = {"round": request.round, "peer": author, "excess": done.excess, "took_s": round(done.took_s, 3)}
        self.context.log.event("audited", **took)
