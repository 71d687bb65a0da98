"""The daemon's part in audits: weights for the worker, verdicts for the feed, rounds that are folded again."""

import random
from types import SimpleNamespace

import msgspec
import pytest

from atoll.node.daemon.audits.auditor import Auditor
from atoll.node.daemon.audits.drawing import AuditDraw
from atoll.node.daemon.rounds.types import Reweighed
from atoll.protocols.audits.standing import audited_by
from atoll.protocols.errors import CorruptFault
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.audit_claims import AuditCall, AuditFindings
from atoll.protocols.ledger.records import MAX_EXCESS, AuditedContribution, Verdict
from atoll.protocols.local.worker_messages import AuditReply
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.worker.session_home import SPEC
from tests.protocols.audits.test_standing import IDLE, history

SPEC = msgspec.structs.replace(SPEC, audit=AuditSpec())
ROUNDS = 24
NOMINAL = SPEC.steps(Round(0)) * SPEC.inner.batch * SPEC.model.context


def record(number, each, tokens=None):
    return AuditedContribution(
        Round(number),
        digest(b"base"),
        each.payload,
        4,
        tokens or NOMINAL,
        each.weight,
        1.0,
        verdicts=each.verdicts,
    )


class Rig:
    """An auditor over a made-up history, in which a0 is idle."""

    def __init__(self, me="a1", spec=SPEC, members=8, answer=None, silent=False, tokens=None):
        self.sets = history(rounds=ROUNDS, members=members, each=spec.audit.per_round)
        if silent:
            mute = {number: [each._replace(verdicts=()) for each in found] for number, found in self.sets.items()}
            self.sets = mute
        by_entry = {each.entry: (each, number) for number, each_of in self.sets.items() for each in each_of}
        self.answer = answer or AuditReply(40, 0.5)
        self.asked, self.fed, self.events, self.tasks = [], [], [], []

        async def ask(request, kind):
            self.asked.append(request)
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer(request) if callable(self.answer) else self.answer

        def find(names):
            members = ((name, *by_entry[name]) for name in names)
            return [(name, each.author, record(number, each, tokens)) for name, each, number in members]

        self.prepared, self.text_fault = [], None

        async def prepare(turn):
            self.prepared.append(turn)
            if self.text_fault:
                raise self.text_fault

        self.prepare = prepare
        self.held, self.known = set(by_entry), set()
        self.number_of = {entry: number for entry, (_, number) in by_entry.items()}
        contributions = SimpleNamespace(find=find, is_held=self.held.__contains__, later=self.later)
        self.claims, self.put = {}, []
        self.auditor = Auditor(
            audits=spec.audit,
            context=SimpleNamespace(
                spec=spec, me=me, now=lambda: 1.0,
                log=SimpleNamespace(event=lambda name, **facts: self.events.append((name, facts))),
            ),
            contributions=contributions,
            draws=AuditDraw(
                each=spec.audit.per_round,
                contributions=contributions,
                blobs=SimpleNamespace(blob_path=lambda blob: f"/blobs/{blob.hex()}"),
            ),
            net=SimpleNamespace(
                put_claim=lambda claim, ttl_s: self.put.append(claim), claims=lambda kind: self.claims
            ),
            queue=SimpleNamespace(
                post=lambda event: event(), start_task=lambda work, name: self.tasks.append(work)
            ),
            machines=SimpleNamespace(feed_round=self.fed.append),
            worker=SimpleNamespace(is_ready=True, ask=ask),
            prepare=self.prepare,
            rng=random.Random(1),
        )  # fmt: skip

    def later(self, number):
        return [entry for entry in self.known if self.number_of[entry] > number]

    def names(self, number):
        return tuple(sorted(each.entry for each in self.sets[number]))

    def finish(self, *numbers):
        for number in numbers:
            self.auditor.on_set(Round(number), self.names(number), True)
            self.auditor.on_applied(Round(number))
            self.run()

    def run(self):
        while self.tasks:
            try:
                self.tasks.pop(0).send(None)
            except StopIteration:
                continue

    def weight_of(self, author, number):
        (entry,) = (each.entry for each in self.sets[number] if each.author == author)
        return self.auditor.weigh(Round(number), self.auditor.contributions.find(self.names(number)))[entry]


def test_weights_follow_from_final_sets():
    rig = Rig()
    rig.finish(*range(ROUNDS))
    found = [rig.weight_of(IDLE, number) for number in range(ROUNDS)]
    assert found[:4] == [64] * 4
    assert 0 in found[:11]
    assert all(rig.weight_of("a3", number) == 64 for number in range(ROUNDS))
    assert ("unweighed", {"peers": [IDLE]}) in rig.events


def test_a_worker_that_is_far_behind_gets_the_weights_of_its_round():
    """After a start all final sets are known before the first of them is applied."""
    spec = msgspec.structs.replace(SPEC, audit=AuditSpec(memory=8))
    rig, early = Rig(spec=spec), []
    for number in range(ROUNDS):
        early.append(rig.weight_of(IDLE, number))
        rig.finish(number)
    assert [rig.weight_of(IDLE, number) for number in range(ROUNDS)] == early
    assert 0 in early
    assert len(rig.auditor._sets) == 8 + spec.audit.lag, "older ones are forgotten"


def test_open_rounds_have_the_weights_of_the_view_and_are_folded_again_when_they_change():
    rig = Rig()
    for number in range(ROUNDS):
        rig.auditor.on_set(Round(number), rig.names(number), False)
    found = [rig.weight_of(IDLE, number) for number in range(ROUNDS)]
    whole = Rig()
    whole.finish(*range(ROUNDS))
    assert found == [whole.weight_of(IDLE, number) for number in range(ROUNDS)], "final or not"
    first = found.index(0)
    # The final sets of the oldest rounds have nobody in them: their verdicts are gone.
    for number in range(first):
        rig.auditor.on_set(Round(number), (), True)
    again = {event.round for event in rig.fed if isinstance(event, Reweighed)}
    assert first in again
    assert rig.weight_of(IDLE, first) == 64
    assert min(again) > SPEC.audit.lag


def test_this_node_audits_what_it_drew_and_says_it_until_a_final_set_has_it():
    rig = Rig()
    rig.finish(0)
    (ours,) = (each.entry for each in rig.sets[0] if each.author == "a1")
    (asked,) = rig.asked
    assert asked.audited.entry == audited_by(rig.names(0))[ours][0]
    assert asked.tokens == NOMINAL
    assert asked.audited.entry not in {other.entry for other in asked.others}
    assert len(asked.others) == 7
    said = (Verdict(asked.audited.entry, 40),)
    assert rig.auditor.verdicts() == rig.auditor.verdicts() == said
    own = next(each for each in rig.sets[1] if each.author == "a1")
    assert [each.contribution for each in own.verdicts] == [asked.audited.entry], "the history says the same"
    rig.finish(1)
    assert [each.contribution for each in rig.auditor.verdicts()] == [rig.asked[1].audited.entry]


def test_a_node_audits_as_many_as_the_run_says_one_after_the_other():
    rig = Rig(spec=msgspec.structs.replace(SPEC, audit=AuditSpec(each=3)))
    rig.finish(0)
    (ours,) = (each.entry for each in rig.sets[0] if each.author == "a1")
    assert tuple(asked.audited.entry for asked in rig.asked) == audited_by(rig.names(0), 3)[ours]
    assert all(asked.audited.entry not in {other.entry for other in asked.others} for asked in rig.asked)
    assert len(rig.auditor.verdicts()) == 3
    lost = rig.asked[1].audited.entry
    again = Rig(spec=msgspec.structs.replace(SPEC, audit=AuditSpec(each=3)))
    again.held.discard(lost)
    again.finish(0)
    assert len(again.asked) == 2, "what is not here is not audited"
    assert lost not in {other.entry for asked in again.asked for other in asked.others}


@pytest.mark.parametrize(("part", "every"), [(1.0, 1), (2.0, 1), (0.25, 4), (1 / 8, 8)])
def test_who_takes_a_part_of_the_work_audits_in_that_part_of_the_rounds(part, every):
    rig = Rig(tokens=int(NOMINAL * part))
    rig.finish(*range(16))
    assert [asked.round for asked in rig.asked] == list(range(every - 1, 16, every))


def test_of_verdicts_that_no_set_takes_the_newest_are_kept():
    rig = Rig(silent=True)
    rig.finish(*range(9))
    assert [each.contribution for each in rig.auditor.verdicts()] == [a.audited.entry for a in rig.asked[-4:]]


@pytest.mark.parametrize("me", ["a1", "stranger"])
def test_nothing_is_audited_without_a_part_a_payload_or_a_worker(me):
    rig = Rig(me=me)
    if me == "a1":
        rig.held.clear()
        rig.finish(0)
        rig.held.update(rig.names(1))
        rig.auditor.worker.is_ready = False
    rig.finish(1)
    assert rig.asked == []
    assert rig.auditor.verdicts() == ()


def test_a_payload_that_the_disk_lost_gives_no_verdict():
    rig = Rig(answer=CorruptFault("gone"))
    rig.finish(0)
    assert rig.auditor.verdicts() == ()
    assert rig.events[-1][0] == "not_audited"


def test_what_verdicts_say_now_is_what_weighs_the_next_round():
    rig = Rig()
    for number in range(ROUNDS):
        rig.finish(number)
        weighed = [rig.weight_of(IDLE, number + 1), rig.weight_of("a3", number + 1)] if number + 1 < ROUNDS else []
        gone = [0 if author in rig.auditor.judgement.gone else 64 for author in (IDLE, "a3")]
        assert weighed in ([], gone)
    assert set(rig.auditor.sharers.values()) == {1}
    copies = [each._replace(payload=digest(b"one")) for each in rig.sets[ROUNDS - 1]]
    rig.sets[ROUNDS - 1][:] = copies
    by_entry = {each.entry: each for each in copies}
    rig.auditor.contributions.find = lambda names: [
        (name, by_entry[name].author, record(ROUNDS - 1, by_entry[name])) for name in names
    ]
    rig.finish(ROUNDS - 1)
    assert rig.auditor.sharers["a3"] == len(copies)


def test_what_the_author_read_is_fetched_first_and_no_text_is_no_verdict():
    rig = Rig()
    rig.finish(*range(ROUNDS))
    assert [(turn.round, turn.author) for turn in rig.prepared] == [
        (request.round, request.audited.author) for request in rig.asked
    ]
    assert rig.asked
    mute = Rig()
    mute.text_fault = TimeoutError()
    mute.finish(*range(ROUNDS))
    assert mute.prepared
    assert not mute.asked
    assert not mute.auditor.verdicts()
    [why] = {facts["error"] for name, facts in mute.events if name == "not_audited"}
    assert why == "nobody sends the text that it is about"


def test_a_contribution_is_compared_with_rounds_that_were_final_before_it_was_known():
    """Else who copies it into a round that is still open would make its author the one that repeats."""
    rig = Rig()
    early = rig.names(6)
    rig.finish(0, 1, 2)
    rig.known.update(early)
    rig.finish(3, 4, 5, 6, 7)
    before = {ask.round: ask.before for ask in rig.asked}
    assert before == {number: 3 if number == 6 else number for number in range(8)}


def test_all_payloads_of_a_set_that_are_here_are_remembered():
    rig = Rig(members=12)
    gone = rig.names(0)[-1]
    rig.held.discard(gone)
    rig.finish(0)
    (ask,) = rig.asked
    assert {each.entry for each in ask.sent} == {*rig.names(0)} - {gone}
    assert {each.entry for each in ask.others} == {each.entry for each in ask.sent} - {ask.audited.entry}
    assert list(ask.others) != sorted(ask.others, key=lambda each: each.entry), "in an order that was drawn"


class Beside(Rig):
    """An auditor beside an evaluator that is believed and found nothing about round TRUSTED yet."""

    def __init__(self, **more):
        super().__init__(answer=lambda request: AuditReply(40, 0.5, request.round), **more)
        self.auditor.may_adopt = True
        self.find()
        for number in range(TRUSTED):
            self.finish(number)
            self.find(40)
        assert self.auditor.adoption.believed == [EVALUATOR]
        self.asked.clear()

    def find(self, *excess):
        """The evaluator finds this in all audits that it was called for."""
        found = ((key, one) for key in self.auditor.adoption._called for one in excess)
        self.claims = {EVALUATOR: AuditFindings(tuple(found))}
        self.auditor.step()
        self.run()

    def measured(self):
        """Rounds and authors of the audits with forward passes of this node."""
        return [(ask.round, ask.audited.author) for ask in self.asked if ask.measures]


EVALUATOR, TRUSTED = "evaluator", 12


def test_one_in_four_audits_is_measured_beside_an_evaluator_that_is_believed():
    rig, each = Beside(spec=msgspec.structs.replace(SPEC, audit=AuditSpec(each=3))), 3
    before = rig.auditor.made, rig.auditor.adopted
    for number in range(TRUSTED, ROUNDS):
        rig.finish(number)
        rig.find(40)
    made, adopted = rig.auditor.made - before[0], rig.auditor.adopted - before[1]
    assert made + adopted == each * (ROUNDS - TRUSTED)
    checked = [author for _, author in rig.measured() if author != IDLE]
    assert 0.1 < len(checked) / (len(checked) + adopted) < 0.4
    assert [author for _, author in rig.measured() if author == IDLE], "nobody is believed about it"
    assert made == len(rig.measured())
    calls = [claim for claim in rig.put if isinstance(claim, AuditCall)]
    assert [call.round for call in calls] == list(range(ROUNDS))
    assert len({call.seed for call in calls}) == ROUNDS


def test_without_an_evaluator_no_seed_is_published():
    rig = Rig()
    rig.auditor.may_adopt = True
    rig.finish(*range(4))
    rig.auditor.step()
    assert rig.put == []
    assert rig.auditor.made == 4


def test_what_an_evaluator_does_not_find_the_trainer_measures_a_round_later():
    rig = Beside()
    for number in range(TRUSTED, ROUNDS):
        rig.finish(number)
        rig.auditor.step()
    assert [number for number, _ in rig.measured()] == list(range(TRUSTED, ROUNDS))
    late = [ask.round for ask in rig.asked if not ask.measures]
    assert len(late) == 1, "it is not waited for again"


def test_a_low_finding_is_measured_and_not_adopted():
    rig = Beside()
    adopted = rig.auditor.adopted
    number = TRUSTED
    while not rig.auditor._awaited:
        rig.finish(number)
        number += 1
    rig.asked.clear()
    rig.find(-MAX_EXCESS)
    assert rig.measured()
    assert rig.auditor.adopted == adopted
    assert {verdict.excess for verdict in rig.auditor.verdicts()} == {40}
    assert list(rig.auditor.adoption.liars) == [EVALUATOR], "what was measured shows that it lied"


def test_what_was_adopted_from_a_liar_is_measured_again():
    rig = Beside()
    number = TRUSTED
    while not rig.auditor._awaited:
        rig.finish(number)
        number += 1
    rig.find(60)
    assert 60 in {verdict.excess for verdict in rig.auditor.verdicts()}
    rig.auditor.adoption.liars[EVALUATOR] = None
    rig.auditor.step()
    rig.run()
    assert {verdict.excess for verdict in rig.auditor.verdicts()} == {40}


def test_measurements_at_another_state_are_not_compared():
    rig = Rig(answer=AuditReply(40, 0.5, 999))
    rig.auditor.may_adopt = True
    for number in range(4):
        rig.claims = {EVALUATOR: AuditFindings(tuple((key, -90) for key in rig.auditor.adoption._called))}
        rig.auditor.step()
        rig.finish(number)
    assert rig.auditor.made == 4
    assert not rig.auditor.adoption.liars


def test_a_payload_that_was_sent_before_is_found_without_an_evaluator():
    rig = Beside()
    rig.answer = lambda request: AuditReply(-MAX_EXCESS, 0.1, request.round, True)
    number, made = TRUSTED, rig.auditor.made
    while not any(not ask.measures for ask in rig.asked):
        rig.finish(number)
        number += 1
    rig.find(40)
    assert rig.auditor.made == made, "no forward passes"
    assert -MAX_EXCESS in {verdict.excess for verdict in rig.auditor.verdicts()}
    assert not rig.auditor._awaited
    assert not rig.auditor.adoption.liars


VOTERS = msgspec.structs.replace(SPEC, audit=AuditSpec(each=3, voters=True))
HALF_DECIDE = frozenset(PeerId(f"a{number}") for number in range(1, 5))


def finish(rig, number, deciders):
    rig.auditor.note_deciders(Round(number), deciders)
    rig.finish(number)


def test_verdicts_of_those_that_decide_alone_count_where_voters_must_have_shown_work():
    rig = Rig(spec=VOTERS)
    for number in range(ROUNDS):
        finish(rig, number, HALF_DECIDE)
    heard = rig.auditor.judgement.heard.values()
    assert {auditor for each in heard for auditor in each.by_auditor} == HALF_DECIDE
    assert 0 in [rig.weight_of(IDLE, number) for number in range(ROUNDS)]
    nobody = Rig(spec=VOTERS)
    for number in range(ROUNDS):
        finish(nobody, number, frozenset())
    assert {nobody.weight_of(IDLE, number) for number in range(ROUNDS)} == {64}


def test_nobody_falls_without_the_owners_word_while_few_decide():
    for owner in ("a1", IDLE):
        rig = Rig(spec=msgspec.structs.replace(VOTERS, owner=PeerId(owner)))
        for number in range(ROUNDS):
            finish(rig, number, HALF_DECIDE | {PeerId(owner)})
        assert {each.trusted for each in rig.auditor.judgement.heard.values()} == {owner}
        fell = 0 in [rig.weight_of(IDLE, number) for number in range(ROUNDS)]
        assert fell == (owner != IDLE), "the owner does not fall"


def test_whose_verdicts_count_follows_from_the_set_that_they_are_about():
    """Two nodes: one weighs each round as it comes, the other knew open ones first, which then became final."""
    spec = msgspec.structs.replace(VOTERS, audit=AuditSpec(each=3, voters=True, memory=8))
    deciders = [HALF_DECIDE if number % 6 < 2 else frozenset({PeerId("a1")}) for number in range(ROUNDS)]
    first, early = Rig(spec=spec), []
    for number in range(ROUNDS):
        early.append(rig_weights(first, number))
        finish(first, number, deciders[number])
    other = Rig(spec=spec)
    for number in range(ROUNDS):
        other.auditor.on_set(Round(number), other.names(number), False)
        rig_weights(other, number)
    for number in range(ROUNDS):
        finish(other, number, deciders[number])
    assert [rig_weights(other, number) for number in range(ROUNDS)] == early
    assert other.auditor.judgement == first.auditor.judgement
    asked = {at: first.auditor._counted[at] for at in first.auditor._sets}
    assert asked == {at: deciders[at] for at in asked}
    assert other.fed, "open rounds were folded again"


def rig_weights(rig, number):
    return [rig.weight_of(each, number) for each in (IDLE, "a3")]
