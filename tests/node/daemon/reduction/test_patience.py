"""How long a reduced round waits for what nobody gives."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.reduction import machine as reduction_machine
from atoll.node.daemon.reduction.coordinator import MIN_PATIENCE_S, OpenRound, ReductionCoordinator
from atoll.node.daemon.reduction.machine import Collected, Gone, OfferSeen, PatienceOver, State
from atoll.node.daemon.rounds.participants import MemberView
from atoll.protocols.ids import Round

LEASE_S = 60.0


@pytest.mark.parametrize("is_absent", [False, True])
def test_rows_of_a_member_that_is_absent_are_waited_for_as_those_of_a_lost_one(small, is_absent):
    me, other, *_ = small.world.peers
    offers = [offer for offer in small.offers if offer.author in (me, other)]
    state = State(me, Round(0), small.world.plan)
    for event in (*map(OfferSeen, offers), Collected(), PatienceOver()):
        state, _ = reduction_machine.step(state, event)
    reducer = ReductionCoordinator.__new__(ReductionCoordinator)
    clock = SimpleNamespace(now=0.0)
    reducer.context = SimpleNamespace(
        now=lambda: clock.now, spec=SimpleNamespace(pace=SimpleNamespace(lease_s=LEASE_S))
    )
    members = {other: MemberView("training", Round(0), 0.0)}
    reducer.machines = SimpleNamespace(
        round=SimpleNamespace(members=members, train_s=1.0, absent={other} if is_absent else set())
    )
    reducer.ledger = SimpleNamespace(me=me, offers=lambda number: offers)
    reducer._rounds = {0: OpenRound(state, closed_at=0.0, impatient_at=0.0)}
    told = []
    reducer._feed = lambda number, event: told.append(event)
    clock.now = MIN_PATIENCE_S
    reducer._lose_patience(0)
    given_up = [Gone(offer.entry) for offer in offers if offer.author == other]
    assert told == (given_up if is_absent else [])
    clock.now = LEASE_S
    reducer._lose_patience(0)
    assert told[-1:] == given_up
