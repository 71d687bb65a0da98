"""The preview's arithmetic, against measurements and against itself."""

import msgspec
import pytest

from atoll.node.presets import preset
from atoll.node.preview import MEMBERS, ROUND_FLOOR_S, Machine, preview_of, round_bytes, this_machine
from atoll.protocols.coverage import largest_payload
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run import StartSpec

OWNER = peer_id_of(bytes(range(32)))
CPU = Machine("cpu", 2, 1 << 33, 1 << 40, None)
GPU = msgspec.structs.replace(CPU, device="cuda:0", gpu_free_bytes=1 << 36)
MEASURED_MIB = {("tiny", 8): 418, ("10m", 2): 763, ("10m", 8): 1003, ("50m", 1): 2390, ("50m", 4): 3032}
"""Peak memory of a worker (1 thread, torch 2.13 CPU) that trained and folded one round; name, sequences a step."""


@pytest.mark.parametrize(("size", "mib"), MEASURED_MIB.items())
def test_memory_is_near_and_above_what_was_measured(size, mib):
    spec = preset(size[0], OWNER, 1)
    spec = msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, batch=size[1]))
    assert 1.0 <= preview_of(spec, CPU).memory_bytes / (mib << 20) <= 1.15


def test_devices_share_the_time_and_as_parts_what_is_trained_too():
    spec = preset("50m", OWNER, 1)
    many = msgspec.structs.replace(GPU, device="cuda:0,cuda:1")
    one, two = preview_of(spec, GPU), preview_of(spec, many)
    parts = preview_of(spec, msgspec.structs.replace(many, shard=True))
    assert two.round_s <= one.round_s
    assert two.memory_bytes > one.memory_bytes, "of two processes"
    assert two.gpu_bytes - parts.gpu_bytes == 8 * spec.model.parameters
    ranks = preview_of(spec, msgspec.structs.replace(CPU, device="cpu,cpu")).memory_bytes
    assert ranks - preview_of(spec, CPU).memory_bytes >= 16 * spec.model.parameters


def test_traffic_is_payloads_to_and_from_every_other_member():
    spec = preset("50m", OWNER, 1)
    costs = preview_of(spec, GPU)
    payload = largest_payload(spec)
    assert (costs.payload_bytes, costs.members) == (payload, MEMBERS)
    assert costs.rounds_day == pytest.approx(min(spec.outer.rounds, 86400 / costs.round_s))
    assert costs.day_up_bytes == costs.day_down_bytes == int(payload * 7 * costs.rounds_day)
    assert costs.join_bytes == 4 * spec.model.parameters


def test_a_short_run_moves_no_more_than_its_rounds():
    costs = preview_of(preset("tiny", OWNER, 1), CPU)
    assert costs.round_s == ROUND_FLOOR_S
    assert costs.rounds_day == 54


def test_a_round_longer_than_a_day():
    costs = preview_of(preset("1b", OWNER, 1), CPU)
    assert costs.round_s > 86400
    assert 0 < costs.rounds_day < 1
    assert 0 < costs.day_up_bytes < costs.payload_bytes * 7


def test_a_gpu_takes_the_tensors_off_the_host():
    spec = preset("350m", OWNER, 1)
    on_cpu, on_gpu = preview_of(spec, CPU), preview_of(spec, GPU)
    assert on_cpu.gpu_bytes == 0
    assert on_gpu.gpu_bytes > 16 * spec.model.parameters
    assert on_gpu.memory_bytes < on_cpu.memory_bytes
    assert on_gpu.round_s < on_cpu.round_s


def test_a_reduced_round_costs_the_same_however_many_they_are():
    spec = preset("50m", OWNER, 1)
    each = {members: round_bytes(spec, members) for members in (15, 16, 17, 64)}
    assert each[16] - each[15] == largest_payload(spec)
    assert largest_payload(spec) < each[17] == each[64] < each[15] / 4
    whole = msgspec.structs.replace(spec, reduce=None)
    assert round_bytes(whole, 64) == 63 * largest_payload(spec)


def test_more_members_where_the_run_waits_for_more():
    spec = preset("tiny", OWNER, 1)
    crowd = msgspec.structs.replace(spec, pace=msgspec.structs.replace(spec.pace, min_members=50))
    assert preview_of(crowd, CPU).members == 50


def test_a_file_of_ones_own():
    assert preview_of(preset("tiny", OWNER, 1, "file:book.txt"), CPU).text == "book.txt"
    assert preview_of(preset("tiny", OWNER, 1), CPU).text == ""


def test_this_machine(tmp_path):
    machine = this_machine(tmp_path / "not" / "there", "cpu", 3)
    assert (machine.device, machine.threads, machine.gpu_free_bytes) == ("cpu", 3, None)
    assert machine.memory_free_bytes > 1 << 20
    assert machine.disk_free_bytes > 1 << 20


def test_a_gpu_of_which_nothing_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine(tmp_path, "cuda:7", 1).gpu_free_bytes is None


@pytest.mark.parametrize(("says", "free"), [("100\n2048\n", 2048 << 20), ("100\n", None), ("N/A\nN/A\n", None)])
def test_a_gpu_that_tells(tmp_path, monkeypatch, says, free):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert this_machine(tmp_path, "cuda:1", 1).gpu_free_bytes == free


def test_moments_of_a_checkpoint_are_fetched_and_kept_for_a_while():
    spec = preset("tiny", OWNER, 1)
    given = msgspec.structs.replace(spec, start=StartSpec(weights=bytes(32), state=bytes(32)))
    with_moments = msgspec.structs.replace(
        spec, start=StartSpec(weights=bytes(32), state=bytes(32), moments=bytes(32))
    )
    before, after = preview_of(given, CPU), preview_of(with_moments, CPU)
    assert (
        after.join_bytes - before.join_bytes == after.disk_bytes - before.disk_bytes == 12 * spec.model.parameters
    )
