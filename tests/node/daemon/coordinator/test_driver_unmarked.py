"""A state of another chain, without a mark: when a start leaves that chain, and when it is a fault."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.consensus.chains.chain_exit import ChainExit, NoMark
from atoll.node.daemon.consensus.chains.epochs import ROOT, EpochBook, Segment
from atoll.node.daemon.coordinator.driver import Driver
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import Digest, Round

OURS, FAULTY = Digest(bytes([1]) * 32), Digest(bytes([2]) * 32)


def driver_of(*firsts: int, elsewhere: int | None = None, accepts: bool = True) -> tuple[SimpleNamespace, list]:
    """A driver whose chain has epochs from these rounds on; and where it leaves. `elsewhere`: of another chain."""
    asked = []

    class Mark(NoMark):
        def put(self, first: int) -> int | None:
            asked.append(first)

    def does(work) -> bool:
        work()
        return accepts

    way_out = ChainExit(
        guard=SimpleNamespace(does=does, on_disk_success=lambda: None),
        now=lambda: 0.0,
        event=lambda **facts: None,
        mark=Mark(),
    )
    places = {} if elsewhere is None else {(ROOT, elsewhere): (b"other",)}
    driver = SimpleNamespace(
        finality=SimpleNamespace(
            chain=[Segment(ROOT, 0, None, None), *(Segment(b"e", first, None, None) for first in firsts)],
            epochs=EpochBook(places=places),
        ),
        history=SimpleNamespace(is_proposed=lambda number, state: (number, state) == (7, OURS)),
        chain_exit=way_out,
    )
    return driver, asked


@pytest.mark.parametrize(
    ("firsts", "elsewhere", "state", "left"),
    [
        ((5, 9), None, OURS, [5]),
        ((5, 9), 3, OURS, [3]),  # its chain may have left this one before
        ((5, 9), None, FAULTY, []),  # nobody proposed it: the fold went wrong
        ((), None, OURS, []),  # no chain has an epoch, so the node chose none
        ((), 6, OURS, [6]),  # it came back to the run's first chain
        ((8,), None, OURS, []),  # its epoch begins after that round
        ((8,), 6, OURS, [6]),
    ],
)
def test_only_a_proposed_state_of_a_chain_with_an_epoch_is_left(firsts, elsewhere, state, left):
    driver, asked = driver_of(*firsts, elsewhere=elsewhere)
    assert Driver._leave_unmarked(driver, Round(7), state) == bool(left)
    assert asked == left


def test_a_disk_that_refuses_the_mark_is_no_divergence():
    """Whoever reads of one removes the state, as it says, and with it all that the node has yet to send."""
    driver, asked = driver_of(5, accepts=False)
    with pytest.raises(LocalFault, match="the disk refuses the mark") as found:
        Driver._leave_unmarked(driver, Round(7), OURS)
    assert "the state stays as it is" in found.value.hint
    assert asked == [5]


def test_a_worker_that_starts_again_before_the_chain_has_changed_is_no_divergence():
    driver, asked = driver_of(5)
    for _ in range(2):
        assert Driver._leave_unmarked(driver, Round(7), OURS)
    assert asked == [5]
