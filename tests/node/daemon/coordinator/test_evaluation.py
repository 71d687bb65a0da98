"""Validation every few rounds, or as often as it costs little; the last round always; who is told of it."""

from types import SimpleNamespace

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.node.config.roles import Work
from atoll.node.daemon.coordinator.evaluation import Evaluator
from atoll.node.daemon.telemetry.validators import SHARE, EvaluationPace
from atoll.protocols.ids import Round, digest
from atoll.protocols.run.sections.privacy import PrivacySpec
from tests.node.worker.session_home import SPEC


def test_every_few_rounds_whatever_it_costs():
    pace = EvaluationPace(3, 8)
    assert [number for number in range(8) if pace.is_due(number, 0.0)] == [0, 3, 6, 7]


def test_by_itself_it_takes_its_share_of_the_time_and_no_more():
    pace, now, spent_s = EvaluationPace(0, 10**6), 0.0, 0.0
    for number in range(10_000):
        now += 1.0
        if pace.is_due(number, now):
            pace.budget.asked()
            assert not pace.is_due(number, now + 1e9), "one at a time"
            now, spent_s = now + 0.2, spent_s + 0.2
            pace.budget.took(now, 0.2)
    assert 0.9 * SHARE <= spent_s / now <= SHARE + 1e-4


def test_the_last_round_is_validated_even_if_another_was_just_now():
    pace = EvaluationPace(0, 5)
    pace.budget.took(10.0, 60.0)
    assert not pace.is_due(3, 11.0)
    assert pace.is_due(4, 11.0)


def test_one_that_failed_costs_nothing():
    pace = EvaluationPace(0, 5)
    pace.budget.asked()
    pace.budget.took(10.0, 0.0)
    assert pace.is_due(1, 10.0)


def test_a_node_that_was_started_again_trains_before_it_validates():
    pace = EvaluationPace(0, 100)
    assert not pace.is_due(7, 0.0, has_trained=False)
    assert not pace.is_due(8, 1.0, is_in_doubt=True, has_trained=False)
    assert pace.is_due(9, 2.0)
    assert pace.is_due(99, 3.0, has_trained=False), "the last round"
    assert EvaluationPace(2, 100).is_due(8, 0.0, has_trained=False), "the user's own number"


def test_who_is_relieved_validates_the_last_round_alone():
    pace = EvaluationPace(0, 8)
    assert [number for number in range(8) if pace.is_due(number, 0.0, is_relieved=True)] == [7]


def test_rounds_between_validations_that_the_user_chose_are_kept():
    pace = EvaluationPace(4, 8)
    assert [number for number in range(8) if pace.is_due(number, 0.0, is_relieved=True)] == [0, 4, 7]


def test_who_could_believe_somebody_validates_out_of_turn_ever_more_rarely():
    pace = EvaluationPace(0, 10**6)
    pace.budget.took(0.0, 1e9)
    assert not pace.is_due(0, 1.0)
    tried = [number for number in range(70) if pace.is_due(number, 1.0, is_in_doubt=True)]
    assert tried == [0, 2, 6, 14, 30, 62]


@pytest.mark.parametrize(
    ("privacy", "told"),
    [(UNSET, 1), (PrivacySpec(clip=1.0, noise=1.0), 1), (PrivacySpec(clip=1.0, noise=1.0, own_data=True), 0)],
)
def test_what_is_found_on_own_data_is_told_nobody(privacy, told):
    """It is a loss of the node's own held-out data, without noise; on data that all have it is none."""
    said = []
    evaluator = Evaluator(
        context=SimpleNamespace(spec=replace(SPEC, privacy=privacy), now=lambda: 1.0),
        net=SimpleNamespace(put_claim=lambda found, lives_s: said.append(found)),
        on_step=lambda: None,
        worker=SimpleNamespace(is_ready=True),
        start_task=lambda work, name: None,
        is_newest=lambda number: True,
        is_paused=lambda: False,
        work=Work(evaluates=True),
    )
    state = digest(b"state")
    evaluator.validators.find(state, 2.5)
    evaluator.on_final(Round(0), state)
    assert len(said) == told


def test_a_trainer_asks_for_no_validation_before_its_first_round():
    begun, log = [], SimpleNamespace(tokens=0)
    evaluator = Evaluator(
        context=SimpleNamespace(spec=SPEC, now=lambda: 1.0, log=log),
        net=SimpleNamespace(),
        on_step=lambda: None,
        worker=SimpleNamespace(is_ready=True),
        start_task=lambda work, name: begun.append(name) or work.close(),
        is_newest=lambda number: True,
        is_paused=lambda: False,
        work=Work(trains=True),
    )
    evaluator.on_closed(Round(3), digest(b"closed while it was away"))
    assert begun == []
    log.tokens = 512
    evaluator.on_closed(Round(4), digest(b"its own"))
    assert begun == ["evaluate 4"]
