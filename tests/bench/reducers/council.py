"""Members that audit one another's Reductions, round by round: everything that decides is the product's own code.

Real: who reduces what (`plan_of`, `places`), the draws, requests, complaints and reports of each member
(`ReducerAuditor`, `Complaints`, `FaultReports`, `Doubts`), and the signed entries. Stood in for: the network,
which delivers at once; the worker, which says of an opening whether its chunk was lied about; and the vote, which
leaves a Reduction out when a third of the members doubt it.
"""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from atoll.node.daemon.reduction.audit import ReducerAuditor
from atoll.node.daemon.reduction.complaints import Complaints
from atoll.node.daemon.reduction.doubts import Doubts
from atoll.node.daemon.reduction.fault_reports import FaultReports
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import (
    Body,
    Entry,
    PlannedContribution,
    Reduction,
    ReductionFault,
    SlicedContribution,
    Unanswered,
    sign_entry,
)
from atoll.protocols.ledger.reduction import Opening, OpeningAsk, ReductionRules, cover, opened_span
from atoll.protocols.local.worker_messages import JudgeReply, JudgeRequest
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import ReduceSpec, plan_of

RUN = RunId(digest(b"bench reducers"))
NOTHING = Digest(bytes(32))
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Lie:
    """What the liar does in every round."""

    chunks: int | None
    """Chunks of its slice that are wrong, the first ones; None: all."""
    is_mute: bool
    """Whether it opens only what is right."""
    asleep: range = range(0)
    """Rounds during which it opens nothing."""


class Member:
    """One member with everything that it decides by."""

    def __init__(self, council: "Council", place: int) -> None:
        self.council, self.identity = council, council.identities[place]
        self.peer = self.identity.peer_id
        self.feed: list[Entry] = []
        self.ledger = ReductionLedger(self.peer, council.rules, council.spec)
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.doubted: set[Digest] = set()
        auditor = ReducerAuditor(
            net=self,  # type: ignore[arg-type]
            ledger=self.ledger,
            spool=council.folder,
            ask=self.judge,
            publish=self.publish,
            on_fault=council.blame,
            on_unanswered=lambda *one: self.doubts.on_unanswered(*one),
            patience_s=lambda: PATIENCE_S,
            rng=random.Random(f"{council.seed} {place}"),
        )
        self.doubts = Doubts(
            ledger=self.ledger,
            auditor=auditor,
            reports=FaultReports(net=self, rules=council.rules, ask=self.judge, on_fault=council.blame),  # type: ignore[arg-type]
            complaints=Complaints(self.peer, self.publish, lambda entry: self.doubts.on_silent(entry)),
            start_task=lambda task, _: self.tasks.append(task),
            last_final=lambda: council.number - 1,
            on_doubt=lambda _, refuted, __: self.doubted.update(refuted),
            on_cleared=lambda _, cleared: self.doubted.difference_update(cleared),
            on_event=lambda *_: None,
        )

    # What the auditor needs of the network and of the worker.

    async def ask_peer(self, peer: PeerId, question: bytes, max_bytes: int) -> bytes:
        ask = codec.decode(question, OpeningAsk)
        if peer == self.council.liar.peer and self.council.number in self.council.lie.asleep:
            return b""
        if peer == self.council.liar.peer and self.council.lie.is_mute and self.council.is_wrong(ask):
            return b""
        span = Span(ask.chunk, ask.chunk + 1)
        return codec.encode(Opening(span, b"", b"", (), b"", (), b"", ()))

    async def judge(self, ask: JudgeRequest, kind: type[JudgeReply]) -> JudgeReply:
        name, chunk, _ = Path(ask.path).stem.split("-")
        return JudgeReply(self.council.is_wrong(OpeningAsk(Digest(bytes.fromhex(name)), int(chunk))))

    def neighbours(self) -> list[PeerId]:
        return [member.peer for member in self.council.members]

    def add_blob(self, path: Path) -> Digest:
        blob = digest(path.stem.encode())
        self.council.blobs[blob] = path
        return blob

    def has_blob(self, blob: Digest) -> bool:
        return blob in self.council.blobs

    def blob_path(self, blob: Digest) -> Path:
        return self.council.blobs[blob]

    def publish(self, body: Body) -> Entry:
        before = self.feed[-1].id if self.feed else b""
        entry = sign_entry(RUN, self.identity, len(self.feed), before, body)
        self.feed.append(entry)
        self.council.entries.append(entry)
        return entry

    def take(self, entry: Entry) -> None:
        """An entry is in the ledger."""
        self.ledger.add(entry)
        match entry.body:
            case Reduction() if entry.id in self.ledger.claims:
                self.doubts.add_claim(self.ledger.claims[entry.id])
            case ReductionFault():
                self.doubts.add_fault(entry.author, entry.body)
            case Unanswered():
                self.doubts.add_complaint(entry.author, entry.body)

    async def work(self) -> None:
        """Do what was started: audits, checks of faults and of complaints."""
        self.doubts.step(has_worker=True)
        while self.tasks:
            await self.tasks.pop(0)


@dataclass
class Council:
    """The members of one run; the reducer of its first slice lies."""

    folder: Path
    members_count: int
    chunks: int
    lie: Lie
    seed: int
    spec: ReduceSpec
    number: int = 0
    blobs: dict[Digest, Path] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    """Written, and not yet delivered."""
    blamed: set[PeerId] = field(default_factory=set)
    counted: list[int] = field(default_factory=list)
    """Rounds whose final set has a Reduction of the liar."""
    planned: list[int] = field(default_factory=list)
    """Rounds that the liar was to reduce a slice of."""
    opened: int = 0
    """Chunks that were opened, with repeats."""
    _spans: dict[Digest, Span] = field(default_factory=dict)
    _wrong: dict[Digest, range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        k = 64
        self.rules = ReductionRules(RUN, self.chunks, k, 2 * k, 64)
        self.identities = [
            Identity(digest(f"{self.seed} {place}".encode())) for place in range(self.members_count)
        ]
        self.members = [Member(self, place) for place in range(self.members_count)]
        peers = {member.peer: member for member in self.members}
        # Where there are fewer chunks than members, not every member reduces.
        plan = plan_of(RUN, frozenset(peers), frozenset(), self.chunks, self.spec)
        self.liar = peers[plan.reducers[0]]
        self.honest = [member for member in self.members if member is not self.liar]

    def blame(self, peer: PeerId, error: Exception) -> None:
        self.blamed.add(peer)

    def is_wrong(self, ask: OpeningAsk) -> bool:
        """Whether a group of chunks that is opened together has a wrong one."""
        group = opened_span(self._spans[ask.reduction], ask.chunk)
        self.opened += group.chunks
        wrong = self._wrong.get(ask.reduction, range(0))
        return max(group.start, wrong.start) < min(group.stop, wrong.stop)

    async def play_round(self) -> None:
        """One round: contributions, Reductions, audits and complaints, the final set."""
        offers = []
        for member in self.members:
            kind = PlannedContribution if member.ledger.plan(self.number).reducers else SlicedContribution
            body = kind(Round(self.number), NOTHING, NOTHING, 1, 1, 64, 1.0, rows=NOTHING)
            offers.append(member.publish(body).id)
        self._deliver()
        claims = [claim for member in self.members if (claim := self._reduce(member)) is not None]
        self._deliver()
        for member in self.honest:
            parts = member.ledger.parts(self.number, tuple(sorted((*offers, *claims))))
            if parts is not None:
                member.doubts.sample(Round(self.number), parts)
        # Proofs and complaints, then what others find when they check them.
        for _ in range(3):
            for member in self.honest:
                await member.work()
            self._deliver()
        self._decide(offers, claims)
        self.number += 1

    def _reduce(self, member: Member) -> Digest | None:
        plan = member.ledger.plan(self.number)
        span = plan.span_of(member.peer)
        if span is None:
            return None
        covered, more, named = cover(member.ledger.offers(self.number), plan)
        body = Reduction(
            round=Round(self.number), span=span, covered=covered, more=more, members=named, payload=NOTHING,
            rows=NOTHING, kept=NOTHING, previous=b"",
        )  # fmt: skip
        entry = member.publish(body)
        self._spans[entry.id] = span
        if member is self.liar:
            self.planned.append(self.number)
            many = span.chunks if self.lie.chunks is None else min(self.lie.chunks, span.chunks)
            self._wrong[entry.id] = range(span.start, span.start + many)
        return entry.id

    def _deliver(self) -> None:
        entries, self.entries = self.entries, []
        for entry in entries:
            for member in self.members:
                member.take(entry)

    def _decide(self, offers: list[Digest], claims: list[Digest]) -> None:
        votes = {claim: sum(claim in member.doubted for member in self.honest) for claim in claims}
        sound = [claim for claim in claims if 3 * votes[claim] < len(self.honest)]
        if any(self.liar.ledger.claims[claim].author == self.liar.peer for claim in sound):
            self.counted.append(self.number)
        names = tuple(sorted((*offers, *sound)))
        for member in self.members:
            member.ledger.decide(self.number, names)
            member.doubts.acquit(names)


def rounds_counted(council: Council, rounds: int) -> list[int]:
    """Play `rounds` rounds. Returns in which ones, from its first lie on, a Reduction of the liar counts."""

    async def play() -> None:
        for _ in range(rounds):
            await council.play_round()

    asyncio.run(play())
    first = council.planned[0]
    return [number - first for number in council.counted]


def shipped(members: int, sample_256: int = ReduceSpec().sample_256) -> ReduceSpec:
    """The presets' settings; runs of few members are reduced as if they were large."""
    above = min(ReduceSpec().above, members - 1)
    return msgspec.structs.replace(ReduceSpec(), above=above, sample_256=sample_256)
