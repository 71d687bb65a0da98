"""The preview's arithmetic, against itself. That of memory: test_footprint.py."""

import time

import msgspec
import pytest

from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.free_resources import offer_of, room_of
from atoll.node.runs.capacity.join_preview import (
    MEMBERS,
    ROUND_FLOOR_S,
    THREAD_FLOPS,
    preview_of,
    round_time_s,
    steps_time_s,
    with_average,
)
from atoll.node.runs.capacity.memory_model import Free, needs_of
from atoll.node.runs.capacity.reduced_traffic import reduced_traffic
from atoll.node.runs.capacity.round_traffic import COPY_SHARE, payload_traffic, record_traffic, round_bytes
from atoll.node.runs.presets import preset
from atoll.protocols.ids import peer_id_of
from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.experts import bitmap_of
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import StartSpec

OWNER = peer_id_of(bytes(range(32)))
CPU = NodeConfig(device="cpu", threads=2)
GPU = NodeConfig(device="cuda:0", threads=2, exchange_on="host")


def shared(holders=1, **more):
    spec = preset("moe-12m", OWNER, 1)
    spec = msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, holders=holders))
    return msgspec.structs.replace(spec, **more)


def costs_of(spec, config=CPU, memory=1 << 40, gpu=None, members=None):
    return preview_of(spec, config, room_of(spec, config, Free(memory, 1 << 40, gpu)), members)


def test_a_lora_run_costs_its_base_once_and_rounds_of_adapters():
    whole = msgspec.structs.replace(preset("50m", OWNER, 1), reduce=None)
    spec = msgspec.structs.replace(whole, model=msgspec.structs.replace(whole.model, lora_rank=8), base=bytes(32))
    spec.check()
    costs, full = costs_of(spec), costs_of(whole)
    base = 4 * whole.model.parameters
    assert costs.join_bytes == base + 4 * spec.model.parameters
    assert base < costs.disk_bytes < full.disk_bytes / 4
    assert costs.payload_bytes < full.payload_bytes / 20
    assert costs.round_s == full.round_s, "the base is passed through all the same"


def test_an_average_takes_four_files_of_the_disk():
    spec = preset("50m", OWNER, 1)
    averaging = msgspec.structs.replace(CPU, average_rounds=4)
    more = costs_of(spec, averaging).disk_bytes - costs_of(spec, CPU).disk_bytes
    assert more == 16 * spec.model.parameters
    assert costs_of(spec, averaging).needs == costs_of(spec, CPU).needs, "its files are mapped"


@pytest.mark.parametrize(
    ("name", "given", "disk", "kept"),
    [
        ("tiny", None, 1 << 40, 4),
        ("tiny", None, 0, 0),
        ("tiny", 0, 1 << 40, 0),
        ("tiny", 9, 0, 9),
        ("50m", None, 1 << 40, 0),
    ],
)
def test_an_average_is_kept_unasked_where_it_pays_and_costs_little(name, given, disk, kept):
    spec = preset(name, OWNER, 1)
    config = msgspec.structs.replace(CPU, average_rounds=given)
    assert with_average(spec, config, Free(1, disk)).average_rounds == kept
    decaying = msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, decay_256=54))
    enough = 160 * spec.model.parameters
    unasked = [with_average(decaying, CPU, Free(1, room)).average_rounds for room in (enough, enough - 1)]
    assert unasked == [4, 0]


def test_payloads_of_open_rounds_take_what_the_user_gives_or_those_of_64_rounds():
    spec = preset("50m", OWNER, 1)

    def kept(given, members):
        costs = costs_of(spec, msgspec.structs.replace(CPU, open_rounds_bytes=given), members=members)
        return costs.disk_bytes // costs.payload_bytes

    payload, none = costs_of(spec).payload_bytes, kept(0, 4)
    assert kept(0, 8) - none == 64 * 4
    assert kept(600 * payload, 4) - none == 600 - 64 * 4
    assert kept(1 << 50, 4) - none == (1024 - 64) * 4


def test_devices_share_the_time():
    spec = preset("50m", OWNER, 1)
    many = msgspec.structs.replace(GPU, device="cuda:0,cuda:1")
    assert costs_of(spec, many).round_s <= costs_of(spec, GPU).round_s < costs_of(spec, CPU).round_s


def test_traffic_is_payloads_to_and_from_every_other_member():
    spec = preset("50m", OWNER, 1)
    costs = costs_of(spec, GPU)
    payload = largest_payload(spec)
    assert (costs.payload_bytes, costs.members) == (payload, MEMBERS)
    assert costs.rounds_day == pytest.approx(min(spec.outer.rounds, 86400 / costs.round_s))
    assert costs.day_up_bytes == costs.day_down_bytes == int(costs.round_bytes * costs.rounds_day)
    assert costs.round_bytes == int(COPY_SHARE * 7 * payload + record_traffic(spec, MEMBERS, costs.round_s))
    assert costs.join_bytes == 4 * spec.model.parameters
    assert (costs.experts, costs.needs) == (None, costs.whole)
    assert costs.whole_payload_bytes == payload


def test_of_a_mixture_a_member_has_its_share_and_sends_it():
    spec = shared()
    costs = costs_of(spec)
    assert costs.experts == 2, "of eight members that are assumed"
    assert costs.needs == needs_of(spec, CPU, 2)
    assert costs.whole == needs_of(spec, CPU)
    assert costs.needs.host < costs.whole.host
    assert costs.payload_bytes == largest_payload(spec, bitmap_of((3, 11), 16))
    assert costs.whole_payload_bytes == largest_payload(spec) > 3 * costs.payload_bytes
    sent = COPY_SHARE * 7 * costs.payload_bytes
    assert costs.round_bytes == int(sent + record_traffic(spec, MEMBERS, costs.round_s))
    assert costs.disk_bytes < costs_of(shared(holders=0)).disk_bytes


def test_a_share_is_said_in_fragments_too():
    spec = shared()
    parts = msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, fragments=3))
    costs, whole = costs_of(parts), costs_of(spec)
    assert costs.payload_bytes < whole.payload_bytes
    sent = COPY_SHARE * 7 * (costs.exchange_bytes // 3)
    assert costs.round_bytes == int(sent + record_traffic(spec, MEMBERS, costs.round_s))
    assert 0 < costs.exchange_bytes - whole.exchange_bytes < 200, "headers"
    assert costs.whole_exchange_bytes > 3 * costs.exchange_bytes


def test_the_members_that_are_known_count():
    spec = shared()
    assert [costs_of(spec, members=count).experts for count in (1, 2, 4, 16)] == [16, 8, 4, 1]
    assert costs_of(shared(holders=2), members=4).experts == 8
    crowd = msgspec.structs.replace(spec, pace=msgspec.structs.replace(spec.pace, min_members=16))
    assert costs_of(crowd).experts == costs_of(crowd, members=2).experts == 1, "the first round waits for them"


def test_who_has_less_room_than_the_share_trains_less_and_it_fits():
    spec = shared()
    few = needs_of(spec, GPU, 1).device
    costs = costs_of(spec, GPU, gpu=few * 10 // 9 + 1)
    assert costs.experts == 1
    assert costs.needs.device == few < costs.whole.device
    mine = msgspec.structs.replace(GPU, experts=6)
    assert costs_of(spec, mine, gpu=few).needs.device == needs_of(spec, mine, 6).device > few


def test_moments_of_a_checkpoint_are_those_of_the_share():
    start = StartSpec(weights=bytes(32), state=bytes(32), moments=bytes(17 * 32))
    spec = shared(start=start)
    fetched = costs_of(spec).join_bytes - costs_of(shared()).join_bytes
    assert 12 * spec.model.parameters / 8 < fetched < 12 * spec.model.parameters / 4


def test_a_token_meets_some_of_the_experts():
    spec = shared()
    dense = preset("10m", OWNER, 1)
    assert round_time_s(spec, CPU) < round_time_s(dense, CPU) / 2


def test_a_short_run_moves_no_more_than_its_rounds():
    costs = costs_of(preset("tiny", OWNER, 1))
    assert costs.round_s == ROUND_FLOOR_S
    assert costs.rounds_day == 54


def test_a_round_longer_than_a_day():
    costs = costs_of(preset("1b", OWNER, 1))
    assert costs.round_s > 86400
    assert 0 < costs.rounds_day < 1
    assert 0 < costs.day_up_bytes < costs.round_bytes


def test_a_reduced_round_costs_nearly_the_same_however_many_they_are():
    spec = preset("50m", OWNER, 1)
    payload, round_s = largest_payload(spec), 60.0
    assert payload_traffic(spec, 16) - payload_traffic(spec, 15) == payload
    moved = {m: round_bytes(spec, m, round_s) - record_traffic(spec, m, round_s) for m in (16, 17, 64, 256)}
    assert moved[16] == pytest.approx(COPY_SHARE * 15 * payload, rel=1e-6)
    assert moved[17] == pytest.approx(reduced_traffic(spec, 17), rel=1e-6)
    # Openings are as many for any number of members, so many pay less each.
    assert 2 * payload < moved[256] < moved[64] < moved[17] < moved[16] / 3
    unopened = msgspec.structs.replace(spec, reduce=msgspec.structs.replace(spec.reduce, sample_256=0))
    rows_and_reduced = payload + payload_bytes("sparse2", arena_of(spec.model).chunks, spec.reduce.k)
    assert reduced_traffic(unopened, 64) == pytest.approx(rows_and_reduced, rel=0.03)
    whole = msgspec.structs.replace(spec, reduce=None)
    assert round_bytes(whole, 64, round_s) > 63 * payload


def test_the_largest_model_is_counted_at_once():
    """The preview is part of `join`: Merkle paths of millions of chunks are not all looked at."""
    spec = preset("50m", OWNER, 1)
    large = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, ffn=1 << 20))
    assert arena_of(large.model).chunks > 1 << 20
    began_s = time.process_time()
    assert reduced_traffic(large, 512) > 0.0
    assert time.process_time() - began_s < 1.0


def test_records_and_leases_count_and_alone_there_are_none():
    spec = preset("tiny", OWNER, 1)
    assert record_traffic(spec, 1, 1e4) == 0.0
    fast, slow = (record_traffic(spec, 3, round_s) for round_s in (1.0, 600.0))
    assert 0.05 < fast / payload_traffic(spec, 3) < 0.2
    assert slow > payload_traffic(spec, 3), "a round of ten minutes has thirty leases of each"


def test_more_members_where_the_run_waits_for_more():
    spec = preset("tiny", OWNER, 1)
    crowd = msgspec.structs.replace(spec, pace=msgspec.structs.replace(spec.pace, min_members=50))
    assert costs_of(crowd).members == 50


def test_a_file_of_ones_own():
    assert costs_of(preset("tiny", OWNER, 1, "file:book.txt")).text == "book.txt"
    assert costs_of(preset("tiny", OWNER, 1)).text == ""


def test_moments_of_a_checkpoint_are_fetched_and_kept_for_a_while():
    spec = preset("tiny", OWNER, 1)
    given = msgspec.structs.replace(spec, start=StartSpec(weights=bytes(32), state=bytes(32)))
    with_moments = msgspec.structs.replace(
        spec, start=StartSpec(weights=bytes(32), state=bytes(32), moments=bytes(32))
    )
    before, after = costs_of(given), costs_of(with_moments)
    more = after.join_bytes - before.join_bytes, after.disk_bytes - before.disk_bytes
    assert more == (12 * spec.model.parameters, 12 * spec.model.parameters)


def test_the_time_of_a_run_is_that_of_all_of_its_steps():
    """54 rounds of `tiny`: 8 of 2 steps and 46 of 8, each of 8 windows of 128 tokens, on one thread."""
    spec, config = preset("tiny", OWNER, 1), NodeConfig(device="cpu", threads=1)
    tokens = (8 * 2 + 46 * 8) * spec.inner.batch * spec.model.context
    expected_s = 6 * spec.model.parameters * tokens / THREAD_FLOPS
    assert steps_time_s(spec, config, spec.steps_before(spec.outer.rounds)) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("role", "text", "keeps"), [("evaluate", "notes.txt", True), ("seed", "", True), ("relay", "", False)]
)
def test_who_does_not_train_needs_no_more_than_its_role(role, text, keeps):
    spec = shared(data=msgspec.structs.replace(shared().data, source="file:notes.txt"))
    config, free = msgspec.structs.replace(CPU, roles=(role,)), Free(1 << 40, 1 << 40)
    room, config = offer_of(spec, config, free)
    assert room is None, "it offers to train no experts"
    costs = preview_of(spec, config, room)
    assert costs.text == text
    assert bool(costs.disk_bytes) == bool(costs.join_bytes) == keeps
    records = int(record_traffic(spec, MEMBERS, costs.round_s))
    assert (costs.round_bytes > records) == keeps, "records and leases alone"
    assert costs.round_bytes >= records
    assert costs.needs == needs_of(spec, config)
