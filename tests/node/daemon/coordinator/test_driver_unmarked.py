"""A state of another chain, without a mark: when a start leaves that chain, and when it is a fault."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.consensus.chains.epochs import ROOT
from atoll.node.daemon.coordinator.driver import Driver
from atoll.protocols.ids import Digest, Round

OURS, FAULTY = Digest(bytes([1]) * 32), Digest(bytes([2]) * 32)


@pytest.mark.parametrize(
    ("firsts", "state", "is_taken", "left"),
    [
        ((5, 9), OURS, True, [5]),
        ((5, 9), OURS, False, [5]),
        ((5, 9), FAULTY, True, []),  # nobody proposed it: the fold went wrong
        ((), OURS, True, []),  # this chain has no epoch, so the node chose none
        ((8,), OURS, True, []),  # its epoch begins after that round
    ],
)
def test_only_a_proposed_state_of_a_chain_with_an_epoch_is_left(firsts, state, is_taken, left):
    chain = [SimpleNamespace(epoch=ROOT, first=0), *(SimpleNamespace(epoch=b"e", first=first) for first in firsts)]
    asked = []

    def leave(first: Round) -> bool:
        asked.append(first)
        return is_taken

    driver = SimpleNamespace(
        finality=SimpleNamespace(chain=chain),
        history=SimpleNamespace(is_proposed=lambda number, state: (number, state) == (7, OURS)),
        chain_exit=SimpleNamespace(leave=leave),
    )
    assert Driver._leave_unmarked(driver, Round(7), state) == (is_taken and bool(left))
    assert asked == left
