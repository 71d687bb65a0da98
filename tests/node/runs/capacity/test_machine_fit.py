"""What fits into a machine: laws of the table of presets, and what is said of what is lacking; no figures."""

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity import machine_fit
from atoll.node.runs.capacity.free_resources import SPARE, GpuMemory
from atoll.node.runs.capacity.join_preview import MEMBERS
from atoll.node.runs.capacity.machine_fit import (
    Machine,
    in_slices,
    largest,
    measure_machine,
    needs_here,
    presets_here,
    shortage,
    shortage_now,
    slices_here,
)
from atoll.node.runs.capacity.memory_model import Needs, needs_of
from atoll.node.runs.presets import NAMES, preset
from atoll.protocols.ids import peer_id_of

OWNER = peer_id_of(bytes(range(32)))
CPU = NodeConfig(device="cpu", threads=2)
GPU = NodeConfig(device="cuda", threads=2, exchange_on="host")
SIZES = st.integers(1 << 28, 1 << 42)
TERA = 1 << 50


def needs(name, config=CPU):
    return needs_of(preset(name, OWNER, 1), config)


@given(SIZES, SIZES, SIZES)
def test_the_table_says_of_each_preset_what_its_needs_say(memory, free, device):
    free = min(memory, free)
    for config, machine in (
        (CPU, Machine(memory, free, "cpu")),
        (GPU, Machine(memory, free, "cuda", device, device // 2)),
    ):
        rows = presets_here(config, machine)
        assert {row.preset for row in rows} == set(NAMES)
        for row in rows:
            assert row.fits == (row.memory_bytes <= memory and row.device_bytes <= (machine.device_bytes or 0))
            assert row.fits_now <= row.fits
            needs_share = Needs(row.share_memory_bytes, row.share_device_bytes)
            assert row.share_fits <= (row.slices > 0 and not shortage(needs_share, machine))
        best = largest(rows)
        fitting = [row for row in rows if row.fits]
        assert best == (max(fitting, key=lambda row: row.parameters).preset if fitting else "")


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_fits_from_its_needs_on(name):
    """From those with moments in eight bits on, where these save something: slabs cost a small model more."""
    need = needs(name).host
    small = min(need, needs(name, msgspec.structs.replace(CPU, optimizer_states="int8")).host)
    for memory, said, fits in ((need, need, True), (need - 1, small, small < need), (small - 1, need, False)):
        row = next(row for row in presets_here(CPU, Machine(memory, memory, "cpu")) if row.preset == name)
        assert (row.fits, row.memory_bytes) == (fits, said)


def test_a_quarter_of_the_slices_is_counted_of_each_dense_preset():
    for config, machine in ((CPU, Machine(TERA, TERA, "cpu")), (GPU, Machine(TERA, TERA, "cuda", TERA, TERA))):
        rows = {row.preset: row for row in presets_here(config, machine)}
        shares = {name: (row.share, row.slices) for name, row in rows.items() if row.slices}
        assert shares == {
            "tiny": (1, 5),
            "10m": (2, 8),
            "50m": (2, 9),
            "125m": (4, 17),
            "350m": (2, 10),
            "1b": (2, 8),
        }
        for name, (share, _) in shares.items():
            spec = in_slices(preset(name, OWNER, 1))
            assert spec is not None
            found = Needs(rows[name].share_memory_bytes, rows[name].share_device_bytes)
            assert found == needs_of(spec, config, share)
            whole = needs(name, config)
            assert found.host + found.device < whole.host + whole.device


def test_slices_here_are_what_a_node_would_offer():
    spec = preset("1b", OWNER, 1)
    sliced = in_slices(spec)
    assert sliced is not None
    for ours in (1, 2, 7, 8):
        device = int(needs_of(sliced, GPU, ours).device / (1 - SPARE)) + 1
        assert slices_here(spec, GPU, Machine(TERA, TERA, "cuda", device, device)) == (ours, 8)
    assert slices_here(spec, GPU, Machine(TERA, TERA, "cuda", 1, 1)) == (0, 0)
    assert slices_here(preset("moe-12m", OWNER, 1), GPU, Machine(TERA, TERA, "cuda", TERA, TERA)) == (0, 0)


def test_what_is_lacking_is_said_with_what_is_there():
    small = Machine(2 * 10**9, 10**9, "cuda:1", 8 * 10**9, 4 * 10**9)
    assert shortage(Needs(2 * 10**9, 8 * 10**9), small) == ""
    assert shortage_now(Needs(10**9, 4 * 10**9), small) == ""
    assert shortage(Needs(3 * 10**9, 1), small) == "it needs 3.0 GB of memory, and 2.0 GB are here"
    assert shortage(Needs(1, 9 * 10**9), small) == "it needs 9.0 GB of cuda:1, and 8.0 GB are here"
    assert shortage_now(Needs(2 * 10**9, 1), small) == "it needs 2.0 GB of memory, and 1.0 GB are free now"
    assert shortage(Needs(1, TERA), Machine(2, 2, "cuda")) == "", "no tool says what the device has"


def test_of_a_mixture_that_is_shared_only_the_share_must_fit():
    spec = preset("moe-12m", OWNER, 1)
    spec = msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, holders=1), reduce=None)
    share = needs_of(spec, CPU, -(-spec.model.experts.count // MEMBERS))
    assert needs_here(spec, CPU, Machine(TERA, TERA, "cpu")) == share
    between = (share.host + needs_of(spec, CPU).host) // 2
    machine = Machine(between, between, "cpu")
    assert shortage(needs_here(spec, CPU, machine), machine) == ""


def test_the_limit_of_a_container_counts_and_the_device_that_a_tool_reports(monkeypatch):
    found = psutil.virtual_memory()._replace(total=1000, available=700)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    for limit, left, said in ((None, None, (1000, 700)), (600, 400, (600, 400)), (5000, 4000, (1000, 700))):
        monkeypatch.setattr(machine_fit, "memory_limit", lambda limit=limit: limit)
        monkeypatch.setattr(machine_fit, "memory_left", lambda left=left: left)
        machine = measure_machine("cpu")
        assert (machine.memory_bytes, machine.memory_free_bytes, machine.device_bytes) == (*said, None)
    monkeypatch.setattr(machine_fit, "gpu_memory", lambda devices, percent: GpuMemory(3, 5))
    machine = measure_machine("cuda")
    assert (machine.device_free_bytes, machine.device_bytes) == (3, 5)
