"""Whole reduced rounds over the simulated network: bytes, agreement, a reducer that dies, one that lies."""

import pytest
import torch

from atoll.node.learning.outer.fixed import state_digest
from atoll.node.learning.reduction.reducer import Reducer
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.reduction import Offer
from atoll.protocols.ledger.rows import RowTree, checked_rows
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout, payload_bytes
from atoll_bench.topology.reduction_trial import ALPHA_256, WEIGHT, losses
from atoll_bench.topology.topology import K, mean, rules_of, traffic_rows
from atoll_bench.topology.topology_peer import twisted
from atoll_bench.topology.topology_swarm import Trial, first_payloads, run_trial
from tests.plain.mean import PLAIN, outer_update
from tests.plain.sparse2 import decode

torch.set_num_threads(1)
RULES = rules_of(48)
RECORD = 300
"""Bytes of a contribution's record, less than it has."""


def test_everybody_gets_everything_and_it_is_the_plain_mean():
    (got,) = run_trial(Trial(5, False, RULES))
    members = [(WEIGHT, *decode(each, 48, K)) for each in first_payloads(5, RULES, 1)]
    update = outer_update(members, 48, ALPHA_256, RULES.floor_256)
    assert got.digests == {state_digest(update)}
    size = payload_bytes("sparse2", 48, K)
    assert sum(got.up) == sum(got.down)
    assert 0 < mean(got.up) - 4 * size - got.records < 4 * 60, "the rest are four questions"
    assert 4 * RECORD < got.records < 2.5 * 4 * RECORD, "each record as often as it was sent, with its ids"


@pytest.mark.parametrize("members", [4, 12])
def test_a_reduced_round_costs_what_two_transfers_cost(members):
    (got,) = run_trial(Trial(members, True, RULES))
    assert len(got.digests) == 1
    assert got.raw_slices == 0
    both = payload_bytes("sparse2", 48, K) + payload_bytes("sparse2", 48, RULES.reduced_k)
    share = (members - 1) / members
    assert sum(got.up) == sum(got.down)
    assert both * share < mean(got.up) < both * share + got.records + members * 900


def test_the_same_trial_twice_is_the_same():
    trial = Trial(6, True, RULES, rounds=2)
    assert run_trial(trial) == run_trial(trial)


def test_error_feedback_runs_over_rounds_and_all_agree():
    results = run_trial(Trial(6, True, RULES, rounds=3, always_sample=True))
    assert [len(got.digests) for got in results] == [1, 1, 1]
    assert len({next(iter(got.digests)) for got in results}) == 3
    assert results[-1].openings >= 15
    assert results[-1].caught == 0


def test_a_reducer_that_dies_costs_its_slice_and_nobody_disagrees():
    first, second = run_trial(Trial(6, True, RULES, rounds=2, behaviour={2: "missing"}))
    for got in (first, second):
        assert len(got.digests) == 1
        assert got.raw_slices == 1
        assert len(got.up) == 5


def test_a_reducer_that_lies_is_caught_and_then_all_agree_again():
    results = run_trial(
        Trial(6, True, RULES, rounds=6, behaviour={2: "lying"}, until_caught=True, always_sample=True)
    )
    *before, last = results
    assert all(got.caught == 0 and got.raw_slices == 0 for got in before)
    assert last.caught == 6
    assert last.raw_slices == 1
    assert len(last.first_digests) == len(last.digests) == 1
    assert last.first_digests != last.digests


def test_a_lie_is_a_legal_payload_of_other_values():
    """Otherwise everybody would refuse it at once, and nothing would be tried."""
    payload = first_payloads(1, RULES, 3)[0]
    tree = RowTree(payload, Layout("sparse2", 48, K))
    part = checked_rows(tree.root, 48, K, Span(0, 4), *tree.part(Span(0, 4)))
    made, _ = Reducer(RULES, PLAIN).reduce(Span(0, 4), {Offer(Digest(bytes(32)), "peer", 64, 0): part})
    lie = twisted(made, RULES.reduced_k)
    index, q = decode(made.payload, 4, RULES.reduced_k)
    other_index, other_q = decode(lie.payload, 4, RULES.reduced_k)
    assert torch.equal(index, other_index)
    assert torch.equal(q, -other_q)


def test_more_values_cost_less_error_and_the_error_of_the_sum_falls():
    coarse, fine = (losses(6, factor * K, 4, rules_of(8), 0.95, 1) for factor in (1, 4))
    assert fine[-1].step < coarse[-1].step
    assert fine[-1].total < coarse[-1].total
    assert coarse[-1].total < coarse[0].total


def test_a_topology_that_grows_with_the_swarm_misses_its_bar():
    (small,), (large,) = (run_trial(Trial(count, False, RULES)) for count in (3, 9))
    rows = {row.metric: row for row in traffic_rows({3: small, 9: large}, {3: small, 9: large}, 1)}
    flat = rows["reduce-scatter: furthest from its mean over R"]
    assert flat.passed is False
    assert flat.value == pytest.approx(0.6, abs=0.02)
    spread = rows["reduce-scatter: largest / smallest over R"]
    assert (spread.value, spread.note) == (pytest.approx(4.0, abs=0.3), "R = 9 over R = 3")
