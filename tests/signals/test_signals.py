"""A slice of `make signals`: a signal at one moment of each phase of a start; the next start is not disturbed."""

import pytest

from tests.signals.moments import ANSWERS, spread
from tests.signals.starting import Moment, Starter

pytestmark = [pytest.mark.xdist_group("signals")]


@pytest.fixture(scope="module")
def starter(tmp_path_factory) -> Starter:
    one = Starter(tmp_path_factory.mktemp("signals"))
    one.make_run()
    return one


def test_ctrl_c_while_modules_load_ends_without_a_word(tmp_path):
    end = Starter(tmp_path).end_at(Moment("daemon load click.core", "SIGINT"))
    assert not end.wrong, f"{end}\n{end.said}"


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("daemon load atoll.node.daemon.app", "SIGTERM"),
        ("daemon call p2p/transports/p2pd/process.py:P2pdProcess.start", "SIGTERM"),
        (f"daemon {ANSWERS}", "twice"),
        ("worker load torch", "stop"),
        ("worker call node/worker/round_trainer.py:RoundTrainer.train", "SIGINT"),
    ],
)
def test_it_ends_in_good_order_at_any_moment(starter: Starter, place: str, how: str):
    end = starter.end_at(Moment(place, how))
    assert not end.wrong, f"{end}\n{end.said}"


@pytest.mark.swarm
def test_the_next_start_trains(starter: Starter):
    places = starter.places()
    for role, found in places.items():
        assert len(found) > 500, f"{role}: what `make signals` chooses its moments among"
    assert ANSWERS in places["daemon"]


def test_moments_are_spread():
    assert spread(range(100), 4) == [12, 37, 62, 87]
    with pytest.raises(AssertionError, match="too few"):
        spread("ab", 3)
