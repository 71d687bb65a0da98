"""This node's part in audits: it audits what it drew, publishes what it found, and keeps the weights."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from atoll.node.daemon.audits.adoption import CHECKED, Adoption, shows_work, vouches
from atoll.node.daemon.audits.drawing import AuditDraw
from atoll.node.daemon.audits.newcomer_weights import Weigh, claimed_weights
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex, Found
from atoll.node.daemon.core.interfaces import LeaseRegisters, RunContext
from atoll.node.daemon.core.runtime import EventQueue, Machines, WorkerClient
from atoll.node.daemon.rounds.types import Reweighed
from atoll.protocols.audits.copies import weights
from atoll.protocols.audits.standing import (
    NOBODY,
    Judgement,
    Named,
    judge,
    named,
    without_weight,
)
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, DiskFault
from atoll.protocols.ids import DIGEST_BYTES, Digest, PeerId, Round
from atoll.protocols.ledger.audit_claims import AuditCall, AuditFindings
from atoll.protocols.ledger.records import MAX_VERDICTS, Contribution, Verdict
from atoll.protocols.local.worker_messages import AuditReply, AuditRequest
from atoll.protocols.run.sections.audits import AuditSpec


@dataclass(kw_only=True)
class Auditor:
    """For one run with audits."""

    audits: AuditSpec
    context: RunContext
    contributions: ContributionIndex
    draws: AuditDraw
    net: LeaseRegisters
    queue: EventQueue
    machines: Machines
    worker: WorkerClient
    prepare: Callable[[Turn], Awaitable[None]]
    """Fetches what a member's turn read of a packed text. Raises TimeoutError, DiskFault."""
    rng: random.Random
    """Draws windows, and audits that are checked; who could foresee them could hide from them."""
    may_adopt: bool = False
    """Whether evaluators can make this node's audits."""
    claimed: Weigh = claimed_weights
    """Returns the weights that audits take and copies share."""
    made: int = 0
    """Audits whose forward passes this node made, since its start."""
    adopted: int = 0
    """Audits of which an evaluator's finding was adopted."""
    adoption: Adoption = field(default_factory=Adoption)
    judgement: Judgement = NOBODY
    """What verdicts say for the round after the newest final one."""
    sharers: Mapping[PeerId, int] = field(default_factory=dict)
    """Contributions to the newest final round with the payload of each of its authors."""
    parts_16: Mapping[PeerId, int] = field(default_factory=dict)
    """16ths of the weight that each of these authors claims that copies leave it."""
    _final: int = -1
    _gone: dict[int, frozenset[PeerId]] = field(default_factory=dict)
    """Authors without weight in each final round that has some."""
    _sets: dict[int, Sequence[Named]] = field(default_factory=dict)
    """Final sets, and of open rounds those of this node's view."""
    _deciders: dict[int, frozenset[PeerId]] = field(default_factory=dict)
    """Who decides the round after each final set that is remembered."""
    _counted: Mapping[int, frozenset[PeerId]] | None = None
    """Whose verdicts count in each set; None: everybody's. In an open round those that decide now."""
    _given: dict[tuple[int, tuple[Digest, ...]], frozenset[PeerId]] = field(default_factory=dict)
    """Authors without weight in each set of an open round whose weights the worker was given."""
    _unaudited: float = 0.0
    """Own work since the newest audits of this node, in rounds of nominal work; at most one."""
    _known_before: dict[Digest, Round] = field(default_factory=dict)
    """The first round that became final here after a contribution to a later one was known."""
    _waiting: dict[Digest, Verdict] = field(default_factory=dict)
    """Verdicts that are in no final set yet."""
    _due: dict[int, dict[bytes, AuditRequest]] = field(default_factory=dict)
    """Audits of rounds that are not in Θ_final yet, by key."""
    _awaited: dict[bytes, AuditRequest] = field(default_factory=dict)
    """Audits that evaluators are waited for with, until the next round is final."""
    _lent: dict[bytes, tuple[PeerId, AuditRequest]] = field(default_factory=dict)
    """Adopted findings whose verdicts are in no final set yet."""

    def weigh(self, number: Round, found: Found) -> Mapping[Digest, int]:
        """Return the weight of each of these contributions to a round, for its fold."""
        claims, gone = self.claimed(number, found), self.gone_in(number)
        if number > self._final:
            self._given[number, tuple(entry for entry, _, _ in found)] = self._fallen(found, gone)
        members = [named(*each)._replace(weight=claims[each[0]]) for each in found]
        return weights(members, gone, by_payload=bool(self.audits.by_payload))

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts for the next contribution: those that are in no final set yet."""
        self.adoption.publish()
        return tuple(self._waiting.values())

    def note_deciders(self, number: Round, deciders: frozenset[PeerId]) -> None:
        """The set of this round becomes final, and these decide the next one. To call before `on_set`."""
        self._deciders = {at: each for at, each in self._deciders.items() if at in self._sets}
        self._deciders[number] = deciders
        self._count()

    def on_set(self, number: Round, names: tuple[Digest, ...], is_final: bool) -> None:
        """The view has this set of a round, or it is final: weights may follow from it."""
        if is_final:
            self._on_final(number, names)
        elif number > self._final:
            self._set(number, names)

    def _on_final(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Later rounds have their weights from this set, and this node audits its part of it."""
        gone = self.gone_in(number)
        if gone:
            self._gone[number] = gone
        self._final = max(self._final, number)
        self._set(number, names)
        said = (each.verdicts for each in self._sets[number] if each.author == self.context.me)
        for verdict in next(said, ()):
            self._waiting.pop(verdict.contribution, None)
        self._lent = {key: lent for key, lent in self._lent.items() if lent[1].audited.entry in self._waiting}
        for entry in self.contributions.later(number):
            self._known_before.setdefault(entry, number)
        before = number - self.audits.memory - self.audits.lag
        self._sets = {at: members for at, members in self._sets.items() if at > before}
        self._given = {key: given for key, given in self._given.items() if key[0] > number}
        self._report(number)
        self._measure_late()
        drawn = self._drawn(number, names)
        if drawn:
            self._due[number] = drawn

    def on_applied(self, number: Round) -> None:
        """Θ_final is that after this round: its audits may begin."""
        for at in sorted(at for at in self._due if at <= number):
            self.queue.start_task(self._audit_all(self._due.pop(at)), f"audit {at}")

    def step(self) -> None:
        """Adopt what evaluators found. Harmless at any time."""
        if not self.may_adopt:
            return
        self.adoption.hear(self.net.claims(AuditFindings))
        for key, (peer, request) in list(self._lent.items()):
            if peer in self.adoption.liars:  # no member has counted it yet
                del self._lent[key]
                self._waiting.pop(Digest(request.audited.entry), None)
                self.queue.start_task(self._audit(key, request), f"audit {request.round} again")
        for key, request in list(self._awaited.items()):
            found = self.adoption.find(key)
            if found is not None:
                del self._awaited[key]
                self._adopt(key, request, *found)

    def _adopt(self, key: bytes, request: AuditRequest, peer: PeerId, excess: int) -> None:
        """Sign what an evaluator found as this node's own, or measure what speaks against work."""
        if not vouches(self.judgement, excess):
            self.queue.start_task(self._audit(key, request), f"audit {request.round}")
            return
        self.adopted += 1
        self._lent[key] = peer, request
        self._give(request, excess, adopted_from=peer)

    def _measure_late(self) -> None:
        """Nobody waits longer than a round for an evaluator."""
        late, self._awaited = self._awaited, {}
        self.adoption.miss(late)
        for key, request in late.items():
            self.queue.start_task(self._audit(key, request), f"audit {request.round}")

    def _set(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Remember a set, and have those open rounds folded again whose weights change by it."""
        self._sets[number] = [named(*each) for each in self.contributions.find(names)]
        self._count()
        for (later, entries), given in list(self._given.items()):
            if later < number + self.audits.lag:
                continue
            fallen = self._fallen(self.contributions.find(entries), self.gone_in(Round(later)))
            if fallen != given:
                self._given[later, entries] = fallen
                self.queue.post(partial(self.machines.feed_round, Reweighed(Round(later), self.context.now())))

    def _fallen(self, found: Found, gone: frozenset[PeerId]) -> frozenset[PeerId]:
        return gone.intersection(author for _, author, _ in found)

    def gone_in(self, number: Round) -> frozenset[PeerId]:
        """Authors without weight in a round. Of a final one it is remembered: its worker may be far behind."""
        if number <= self._final:
            return self._gone.get(number, frozenset())
        return without_weight(self.audits, self._sets, number, self._counted, owner=self.context.spec.owner)

    def _count(self) -> None:
        """Who decides after each set is known anew."""
        if self.audits.voters:
            newest = self._deciders[max(self._deciders)] if self._deciders else frozenset[PeerId]()
            self._counted = {at: self._deciders.get(at, newest) for at in self._sets}

    def _report(self, number: Round) -> None:
        before, members = self.judgement.gone, self._sets[number]
        self.judgement = judge(
            self.audits, self._sets, self._final + 1, self._counted, owner=self.context.spec.owner
        )
        payloads = [each.payload for each in members]
        self.sharers = {each.author: payloads.count(each.payload) for each in members}
        left = weights(members, self.gone_in(number), by_payload=bool(self.audits.by_payload))
        self.parts_16 = {each.author: 16 * left[each.entry] // (each.weight or 1) for each in members}
        if self.judgement.gone != before:
            self.context.log.event("unweighed", peers=sorted(self.judgement.gone))

    def _drawn(self, number: Round, names: tuple[Digest, ...]) -> dict[bytes, AuditRequest]:
        """The audits that fall to this node, by key; none if it did not contribute, or lacks the payloads."""
        found = self.contributions.find(names)
        own = next((record for _, author, record in found if author == self.context.me), None)
        seed = Digest(self.rng.randbytes(DIGEST_BYTES))

        def before(drawn: Digest) -> Round:
            # Who sends another's newest payload in a round that is still open was not first.
            return self._known_before.get(drawn, number)

        drawn = self.draws.draw(number, names, self.context.me, seed, before)
        if own is None or not drawn or not self.worker.is_ready:
            return {}
        # An audit takes a slow machine as many times longer as its steps: so it has as many times fewer of them.
        self._unaudited = min(1.0, self._unaudited + self._work(number, own))
        if self._unaudited < 1:
            return {}
        self._unaudited = 0.0
        known = {entry for entry, _, _ in found}
        self._known_before = {at: first for at, first in self._known_before.items() if at not in known}
        if self.may_adopt and self.adoption.is_called_for and self.draws.is_whole(names):
            self.adoption.call(drawn)
            self.net.put_claim(AuditCall(number, seed), self.context.spec.pace.lease_s)
        return drawn

    def _work(self, number: Round, record: Contribution) -> float:
        """A contribution's share of its round's nominal tokens."""
        return record.tokens / self.context.spec.nominal_tokens(number)

    async def _audit_all(self, drawn: Mapping[bytes, AuditRequest]) -> None:
        for key, request in drawn.items():  # one after the other: between two of them the worker takes steps
            author = PeerId(request.audited.author)
            may_wait = self.adoption.relieves and self.adoption.is_called(key)
            if may_wait and shows_work(self.judgement, author) and self.rng.randrange(CHECKED):
                await self._await_finding(key, request)
            else:
                await self._audit(key, request)

    async def _await_finding(self, key: bytes, request: AuditRequest) -> None:
        """Leave the forward passes to an evaluator. Whether the payload was sent before each trainer finds itself:
        it knows the rounds that it saw."""
        done = await self._ask(replace(request, measures=False))
        if done is not None and done.was_sent_before:
            self._give(request, done.excess)
        elif done is not None:
            self._awaited[key] = request

    async def _audit(self, key: bytes, request: AuditRequest) -> None:
        done = await self._ask(request)
        if done is None:
            return
        self.made += not done.was_sent_before
        if done.at == request.round and not done.was_sent_before:
            self.adoption.measured(key, done.excess)
        self._give(request, done.excess, took_s=round(done.took_s, 3))

    async def _ask(self, request: AuditRequest) -> AuditReply | None:
        """Ask the worker. A payload that the disk lost is not audited, nor work on a text that nobody sends."""
        try:
            await self.prepare(Turn(request.round, PeerId(request.audited.author)))
            return await self.worker.ask(request, AuditReply)
        except (CorruptFault, DecodeError, DiskFault, TimeoutError) as error:
            why = error.line() if isinstance(error, AtollError) else "nobody sends the text that it is about"
            self.context.log.event("not_audited", round=request.round, error=why)
            return None

    def _give(self, request: AuditRequest, excess: int, **facts: object) -> None:
        """Put a verdict into the next contribution."""
        entry = request.audited.entry
        newest = [*self._waiting.items(), (entry, Verdict(entry, excess))]
        self._waiting = dict(newest[-MAX_VERDICTS:])
        self.context.log.event("audited", round=request.round, peer=request.audited.author, excess=excess, **facts)
