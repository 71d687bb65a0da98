"""How many experts a node offers: as many as fit into what is free, or as the user says."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.free_resources import (
    SPARE,
    encoding_of,
    measure_free,
    measure_room,
    offer_of,
    room_of,
    share_of,
    trained_of,
)
from atoll.node.runs.capacity.machine_fit import measure_machine
from atoll.node.runs.capacity.memory_model import Free, needs_of
from tests.node.runs.capacity.test_memory_model import CPU, GPU, run_of

MUCH = 1 << 40
SPEC = run_of("moe-12m", 16)


def offered(config: NodeConfig, memory: int = MUCH, gpu: int | None = None) -> int:
    room = room_of(SPEC, config, Free(memory, MUCH, gpu))
    assert room is not None
    assert room.of == 16
    return room.experts


def test_nothing_is_offered_where_all_train_all():
    free = Free(MUCH, MUCH, MUCH)
    assert room_of(run_of("moe-12m", 16, 0), CPU, free) is None
    assert room_of(run_of("tiny", 8, 0), GPU, free) is None


def test_what_the_user_says_counts():
    mine = msgspec.structs.replace(GPU, experts=3)
    room = room_of(SPEC, mine, Free(1, 1, 1))
    assert room is not None
    assert (room.experts, room.free_bytes, room.place) == (3, None, "")
    assert offered(msgspec.structs.replace(mine, experts=99)) == 16


def test_all_where_there_is_enough_and_none_where_there_is_nothing():
    assert offered(CPU) == offered(GPU, gpu=MUCH) == 16
    assert offered(CPU, memory=0) == offered(GPU, memory=0, gpu=MUCH) == offered(GPU, gpu=0) == 0


def test_the_place_with_the_least_room_decides_and_is_named():
    need = needs_of(SPEC, GPU, 5)
    gpu_bytes, memory_bytes = int(need.device / (1 - SPARE)) + 1, int(need.host / (1 - SPARE)) + 1
    tight, loose = Free(MUCH, MUCH, gpu_bytes), Free(memory_bytes, MUCH, MUCH)
    for free, place, size in ((tight, "cuda:0", gpu_bytes), (loose, "memory", memory_bytes)):
        room = room_of(SPEC, GPU, free)
        assert room is not None
        assert (room.experts, room.place, room.free_bytes) == (5, place, size)


def test_a_gpu_of_which_nothing_tells_leaves_it_to_the_memory():
    room = room_of(SPEC, GPU, Free(MUCH, MUCH, None))
    assert room is not None
    assert (room.experts, room.place) == (16, "memory")


def test_narrow_storage_and_the_host_make_room():
    tight = int(needs_of(SPEC, GPU, 4).device / (1 - SPARE)) + 1
    kinds = [
        offered(msgspec.structs.replace(GPU, frozen=kind), gpu=tight) for kind in ("float32", "bfloat16", "int8")
    ]
    assert kinds == sorted(kinds)
    assert kinds[0] == 4 < kinds[2]
    assert offered(msgspec.structs.replace(GPU, frozen_on_host=True), gpu=tight) > 4


def test_a_device_encodes_by_itself_only_where_what_is_offered_fits_beside_it():
    auto = msgspec.structs.replace(GPU, exchange_on="auto")
    most = needs_of(SPEC, GPU).device, needs_of(SPEC, msgspec.structs.replace(GPU, exchange_on="device")).device
    tight, plenty = (Free(MUCH, MUCH, int(need / (1 - SPARE)) + 1) for need in most)
    for free, where in ((tight, "host"), (plenty, "auto"), (Free(MUCH, MUCH), "auto")):
        room = room_of(SPEC, auto, free)
        assert room is not None
        assert room.experts == 16, "experts come first"
        assert encoding_of(SPEC, auto, free, room) == where
        for said in ("host", "device"):
            mine = msgspec.structs.replace(GPU, exchange_on=said)
            assert encoding_of(SPEC, mine, free, room) == said
    there = msgspec.structs.replace(GPU, exchange_on="device")
    assert offered(there, gpu=tight.gpu_bytes) < 16, "who says so pays with experts"


def test_what_a_node_starts_with(tmp_path):
    dense, mine = run_of("tiny", 8, 0), msgspec.structs.replace(CPU, experts=2)
    free = measure_free(tmp_path, mine.device)
    assert offer_of(dense, mine, free) == (None, mine)
    room, config = offer_of(SPEC, mine, free)
    assert (room, config) == (measure_room(SPEC, mine, tmp_path), mine)


@given(free=st.integers(0, 4 << 30), device=st.sampled_from(["cpu", "cuda:0"]))
def test_what_is_offered_fits_and_one_more_would_not(free, device):
    config = msgspec.structs.replace(CPU, device=device)
    count = offered(config, *((free, None) if device == "cpu" else (MUCH, free)))

    def need(experts: int) -> int:
        found = needs_of(SPEC, config, experts)
        return found.host if device == "cpu" else found.device

    assert count == 0 or need(count) <= (1 - SPARE) * free
    assert count == 16 or need(count + 1) > (1 - SPARE) * free


@pytest.mark.parametrize(("members", "each"), [(1, 16), (2, 8), (3, 6), (8, 2), (16, 1), (40, 1)])
def test_a_share_is_the_holders_part_rounded_up(members, each):
    assert share_of(SPEC, members) == each
    assert share_of(run_of("moe-12m", 16, 2), members) == min(16, -(-16 * min(2, members) // members))


def test_what_is_counted_with_is_the_share_as_far_as_there_is_room():
    room = room_of(SPEC, CPU, Free(MUCH, MUCH))
    assert trained_of(SPEC, room, 4) == 4
    assert trained_of(SPEC, None, 4) is None
    none = room_of(SPEC, CPU, Free(0, MUCH))
    assert trained_of(SPEC, none, 4) == 0
    mine = room_of(SPEC, msgspec.structs.replace(CPU, experts=9), Free(MUCH, MUCH))
    assert trained_of(SPEC, mine, 4) == 9, "what the user allows"


def test_this_machine(tmp_path):
    free = measure_free(tmp_path / "not" / "there", "cpu")
    assert free.gpu_bytes is None
    assert free.memory_bytes > 1 << 20
    assert free.disk_bytes > 1 << 20
    assert measure_room(run_of("tiny", 8, 0), CPU, tmp_path) is None
    assert measure_room(SPEC, msgspec.structs.replace(CPU, experts=2), tmp_path) is not None


def test_a_gpu_of_which_nothing_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_free(tmp_path, "cuda:7").gpu_bytes is None


SMI = """#!/bin/sh
case "$3" in
    --id=0) echo "100, 8192" ;;
    --id=1|--id=GPU-f00) echo "2048, 4096" ;;
    --id=0,1) echo "100, 8192"; echo "2048, 4096" ;;
    --id=5) echo "N/A, 4096" ;;
    *) echo "No devices were found"; exit 6 ;;
esac
"""


@pytest.mark.parametrize(
    ("device", "visible", "free"),
    [
        ("cuda", "", 100 << 20),
        ("cuda:1", "", 2048 << 20),
        ("cuda:0,cuda:1", "", 100 << 20),
        ("cuda:5", "", None),
        ("cuda:9", "", None),
        ("cuda:0", "1,0", 2048 << 20),
        ("cuda", "GPU-f00", 2048 << 20),
        ("cuda:1", "0", None),
    ],
)
def test_a_gpu_that_tells(tmp_path, monkeypatch, device, visible, free):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert measure_free(tmp_path, device).gpu_bytes == free
    machine = measure_machine(device)
    assert machine.device_free_bytes == free
    # The device with the least free memory need not be the smallest one.
    whole = 8192 if (device, visible) == ("cuda", "") else 4096
    assert machine.device_bytes == (None if free is None else whole << 20)
    if free is not None:
        part = measure_machine(device, 25)
        assert (part.device_bytes, part.gpu_memory_percent) == (whole << 18, 25)
        # The one of which 2048 MiB are free has 4096.
        assert measure_free(tmp_path, device, 25).gpu_bytes == part.device_free_bytes == min(free, 1 << 30)
        assert measure_free(tmp_path, device, 100).gpu_bytes == free
