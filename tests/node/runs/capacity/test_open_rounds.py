"""The bound of open rounds, from the size of payloads and what the user gives to them."""

import msgspec
import pytest

from atoll.node.runs.capacity.open_rounds import (
    LEAST_ROUNDS,
    MOST_PAYLOADS,
    MOST_ROUNDS,
    OpenRounds,
    open_payloads_of,
    open_rounds_of,
    past_payloads_of,
)
from atoll.node.runs.presets import NAMES, preset
from atoll.protocols.identity import Identity
from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.merging import MergeSpec

OWNER = Identity(bytes(32)).peer_id
GIB = 1 << 30


def with_outer(spec, **more):
    return msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, **more))


def test_the_bound_follows_from_the_size_of_payloads():
    tiny, large = preset("tiny", OWNER, 1), preset("350m", OWNER, 1)
    assert open_rounds_of(tiny, 1 << 40) == OpenRounds(LEAST_ROUNDS, MOST_ROUNDS, MOST_PAYLOADS)
    assert open_rounds_of(large, GIB).payloads == GIB // largest_payload(large) < 500
    assert open_rounds_of(tiny, 0).payloads == 0


def test_at_the_default_three_members_of_a_tiny_run_outlast_a_lease_in_rounds_of_a_fifth_of_a_second():
    assert open_payloads_of(open_rounds_of(preset("tiny", OWNER, 1), GIB), 3) >= 3 * 60 / 0.2


def test_the_least_rounds_have_room_whatever_the_user_gives():
    bound = open_rounds_of(preset("1b", OWNER, 1), GIB)
    assert open_payloads_of(bound, 8) == LEAST_ROUNDS * 8 > bound.payloads


@pytest.mark.parametrize(
    "chained",
    [
        lambda spec: with_outer(spec, rule="nesterov"),
        lambda spec: with_outer(spec, merge=MergeSpec(every=1, until=9, alpha_4096=32)),
        lambda spec: msgspec.structs.replace(spec, audit=AuditSpec()),
        lambda spec: msgspec.structs.replace(spec, pace=msgspec.structs.replace(spec.pace, probation_256=64)),
    ],
)
def test_runs_whose_rounds_depend_on_those_before_stay_at_the_least(chained):
    spec = preset("tiny", OWNER, 1)
    assert open_rounds_of(spec, GIB).most == MOST_ROUNDS
    assert open_rounds_of(chained(spec), GIB).most == LEAST_ROUNDS


@pytest.mark.parametrize("name", NAMES)
def test_the_work_of_a_cut_of_100_rounds_returns_in_runs_of_the_presets(name):
    spec = preset(name, OWNER, 1)
    assert past_payloads_of(spec) > 100


def test_payloads_of_final_rounds_take_no_more_of_the_disk_than_the_error_feedback():
    for name, codec, k in (("tiny", "int8", 4096), ("tiny", "sparse2", 128), ("10m", "sparse2", 64)):
        spec = preset(name, OWNER, 1)
        spec = msgspec.structs.replace(spec, compress=msgspec.structs.replace(spec.compress, codec=codec, k=k))
        kept = past_payloads_of(spec)
        assert kept == 1 or kept * largest_payload(spec) <= 4 * arena_of(spec.model).chunks * CHUNK
