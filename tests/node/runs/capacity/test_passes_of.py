"""How many sequences of a step pass at once: as many as fit, and no more than are faster."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.free_resources import PASS_TOKENS, SPARE, offer_of, passes_of, states_of
from atoll.node.runs.capacity.memory_model import Free, memory_shortage, needs_of
from atoll.node.runs.presets import preset
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of

OWNER = peer_id_of(bytes(range(32)))
CPU = NodeConfig(device="cpu", threads=1)
GPU = NodeConfig(device="cuda:0", threads=1, exchange_on="host")
MUCH = 1 << 50


def fits(spec, config, free, count, recompute):
    chosen = msgspec.structs.replace(config, micro_batch=count, recompute="on" if recompute else "off")
    needs = needs_of(spec, chosen)
    limit = MUCH if free.gpu_bytes is None else free.gpu_bytes
    return needs.host <= (1 - SPARE) * free.memory_bytes and needs.device <= (1 - SPARE) * limit


@given(
    name=st.sampled_from(["10m", "50m", "1b", "moe-12m"]), free=st.integers(1 << 28, 1 << 38), gpu=st.booleans()
)
def test_as_many_as_fit_pass_at_once_and_layers_are_stored_where_one_fits(name, free, gpu):
    spec, config = preset(name, OWNER, 1), GPU if gpu else CPU
    place = Free(MUCH if gpu else free, 0, free if gpu else None)
    count, recompute = passes_of(spec, config, place)
    most, _ = passes_of(spec, config, Free(MUCH, MUCH, MUCH if gpu else None))
    assert 1 <= count <= most
    assert recompute == (not fits(spec, config, place, 1, False))
    if fits(spec, config, place, 1, recompute):
        assert fits(spec, config, place, count, recompute)
        assert count == most or not fits(spec, config, place, most, recompute)
    else:
        assert (count, recompute) == (1, True)


def test_with_plenty_of_memory_passes_are_as_large_as_they_are_faster():
    for config, tokens in zip((GPU, CPU), PASS_TOKENS, strict=True):
        free = Free(MUCH, MUCH, MUCH if config is GPU else None)
        for name in ("tiny", "10m", "50m", "1b"):
            spec = preset(name, OWNER, 1)
            count, recompute = passes_of(spec, config, free)
            assert count == min(spec.inner.batch, max(1, tokens // spec.model.context))
            assert not recompute
        mixture = preset("moe-12m", OWNER, 1)
        assert passes_of(mixture, config, free) == (mixture.inner.batch, False), "or it routes twice"


@given(
    name=st.sampled_from(["10m", "50m", "1b", "moe-12m"]), free=st.integers(1 << 28, 1 << 38), gpu=st.booleans()
)
def test_moments_are_in_eight_bits_where_the_run_fits_with_them_alone(name, free, gpu):
    spec, config = preset(name, OWNER, 1), GPU if gpu else CPU
    place = Free(MUCH if gpu else free, 0, free if gpu else None)
    chosen = states_of(spec, config, place)
    quantized = msgspec.structs.replace(config, optimizer_states="int8")
    is_needed = not fits(spec, config, place, 1, True) and fits(spec, quantized, place, 1, True)
    assert chosen == (quantized if is_needed else config)
    assert states_of(spec, msgspec.structs.replace(config, optimizer_states="float32"), place) != quantized


def test_eight_bits_save_what_they_should_and_one_node_takes_them_by_itself():
    spec = preset("50m", OWNER, 1)
    quantized = msgspec.structs.replace(GPU, optimizer_states="int8")
    whole, small = needs_of(spec, GPU), needs_of(spec, quantized)
    assert whole.device - small.device == pytest.approx(6 * spec.model.parameters, rel=0.01)
    between = Free(MUCH, MUCH, int((whole.device + small.device) / 2 / (1 - SPARE)))
    room, config = offer_of(spec, GPU, between)
    assert (room, config.optimizer_states) == (None, "int8")
    assert offer_of(spec, GPU, Free(MUCH, MUCH, MUCH))[1] == GPU
    several = msgspec.structs.replace(GPU, device="cuda:0,cuda:1")
    assert states_of(spec, several, between).optimizer_states == "auto"


@pytest.mark.parametrize("device", ["cpu,cpu", "cuda:0,cuda:1"])
def test_eight_bits_on_several_devices_are_refused_in_one_line(device):
    with pytest.raises(ConfigError, match="optimizer_states int8 is for one device") as caught:
        NodeConfig(device=device, optimizer_states="int8").check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recompute", ["auto", "on", "off"])
def test_what_the_user_says_is_done(recompute):
    spec = preset("50m", OWNER, 1)
    config = msgspec.structs.replace(CPU, micro_batch=3, recompute=recompute)
    assert passes_of(spec, config, Free(MUCH, MUCH)) == (3, recompute == "on")
    assert passes_of(spec, config, Free(1, 1)) == (3, recompute != "off")


@pytest.mark.parametrize(("batch", "devices", "at_once"), [(16, 2, 1), (16, 3, 2), (5, 4, 2)])
def test_several_devices_hold_gradients_twice_and_the_sequence_that_one_has_more(batch, devices, at_once):
    spec = preset("50m", OWNER, 1)
    spec = msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, batch=batch))
    places = ",".join(f"cuda:{number}" for number in range(devices))
    several = msgspec.structs.replace(GPU, device=places, micro_batch=1, recompute="off")
    alone = msgspec.structs.replace(several, device="cuda:0", micro_batch=at_once)
    again = 4 * spec.model.parameters if batch // devices > 1 else 0
    assert needs_of(spec, several).device - needs_of(spec, alone).device == again
    assert needs_of(spec, msgspec.structs.replace(several, micro_batch=99)).device >= needs_of(spec, alone).device


def test_what_encodes_on_the_device_by_itself_is_counted_before_sequences_are():
    spec = preset("50m", OWNER, 1)
    for gpu in range(2 << 30, 40 << 30, 1 << 30):
        free, auto = Free(MUCH, MUCH, gpu), msgspec.structs.replace(GPU, exchange_on="auto")
        where = "host" if memory_shortage(spec, gpu, spare=True) else "device"
        assert passes_of(spec, auto, free) == passes_of(
            spec, msgspec.structs.replace(GPU, exchange_on=where), free
        )
    free, device = Free(MUCH, MUCH, 3000 << 20), msgspec.structs.replace(GPU, exchange_on="device")
    assert passes_of(spec, device, free) != passes_of(spec, GPU, free), "it makes a difference somewhere"
