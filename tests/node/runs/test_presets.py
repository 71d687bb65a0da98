"""Presets: legal, near the size they are named for, and a payload at least 100 times smaller than fp32 weights."""

import msgspec
import pytest

from atoll.node.runs import presets
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.slices import ReduceSpec

OWNER = peer_id_of(bytes(range(32)))
SIZES = {"tiny": 1e6, "10m": 10e6, "50m": 50e6, "125m": 125e6, "350m": 350e6, "1b": 1e9}
SIZES |= {"moe-smoke": 1.87e6, "moe-12m": 12e6}


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_preset_is_a_legal_run(name):
    spec = presets.preset(name, OWNER, 3)
    assert isinstance(spec, RunSpec)
    size = payload_bytes(spec.compress.codec, arena_of(spec.model).chunks, spec.compress.k)
    assert 4 * spec.model.parameters / size > 100


@pytest.mark.parametrize("name", presets.NAMES)
def test_matrices_need_no_padding(name):
    """But for the routers, which have a row for each expert."""
    places = [p for p in arena_of(presets.model_of(name)).placements if len(p.shape) == 2]
    assert all(not (size % 64) for p in places if "mlp.gate." not in p.name for size in p.shape)


def test_mixtures_have_the_experts_of_their_names():
    smoke, large = (presets.model_of(name) for name in ("moe-smoke", "moe-12m"))
    assert (smoke.experts.count, smoke.experts.per_token, large.experts.count) == (8, 2, 16)
    assert smoke.parameters == 1_873_280
    one = 3 * large.dim * large.experts.ffn
    assert large.layers * large.experts.count * one / large.parameters > 0.9


@pytest.mark.parametrize("name", presets.NAMES)
def test_rounds_of_dense_runs_are_reduced_above_sixteen_members(name):
    reduce, k = presets.preset(name, OWNER, 3).reduce, presets.preset(name, OWNER, 3).compress.k
    assert reduce == (None if name.startswith("moe") else ReduceSpec(above=16, k=2 * k))


@pytest.mark.parametrize("name", presets.NAMES)
def test_muon_trains_the_presets_for_which_it_was_measured(name):
    inner = presets.preset(name, OWNER, 3).inner
    assert (inner.optimizer, inner.muon_lr) == (("muon", 2.0) if name in ("tiny", "10m") else ("adamw", 1.0))
    assert inner.decay_256 == (54 if name == "tiny" else msgspec.UNSET)
    plain = {"optimizer": "adamw", "muon_lr": 1.0, "decay_256": msgspec.UNSET}
    assert presets.with_adamw(inner) == msgspec.structs.replace(inner, **plain)


def test_what_the_caller_chooses():
    spec = presets.preset("tiny", OWNER, 5, "synthetic:markov", bytes(32))
    assert (spec.data.source, spec.data.digest, spec.data.tokenizer) == ("synthetic:markov", bytes(32), "bytes")
    assert presets.preset("50m", OWNER, 5).data.tokenizer == "bpe8k"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        presets.preset("huge", OWNER, 1)
    assert "tiny" in caught.value.line()


@pytest.mark.parametrize("name", presets.NAMES)
def test_no_fold_comes_more_than_five_steps_late(name):
    least, most = presets.preset(name, OWNER, 3).outer.overlap_bounds
    assert 1 <= least <= most <= 5
