"""Workers of a LoRA run: what is trained, sent, folded and saved is the adapter; the base is checked and stays."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from atoll.node.config.node_config import NodeConfig
from atoll.node.import_export.evaluate_saved import evaluate_saved
from atoll.node.learning.model.lora import base_values
from atoll.node.worker.multi_device.modes import check_shards
from atoll.p2p.blobs.store import BLOBS
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    SnapshotRequest,
)
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.slices import ReduceSpec
from tests.node.worker.lora_home import LoraHome, lora_spec
from tests.node.worker.session_home import ME, OTHER, OVERLAPPING, SPEC, Home, member

torch.set_num_threads(1)


def with_outer(spec: RunSpec, **keys) -> RunSpec:
    return replace(spec, outer=replace(spec.outer, **keys))


DENSE = replace(SPEC.compress, codec="int8", k=4096)
RUNS = {
    "plain": SPEC,
    "overlap": OVERLAPPING,
    "momentum": replace(with_outer(SPEC, rule="nesterov", alpha_256=179), compress=DENSE),
    "average": replace(with_outer(SPEC, rule="average"), compress=DENSE),
    "judged": with_outer(SPEC, aggregate="clip", floor_256=64),
    "co2": replace(with_outer(SPEC, rule="co2"), compress=DENSE),
    "edit": with_outer(SPEC, aggregate="edit", floor_256=64),
    "blend": with_outer(OVERLAPPING, late="blend"),
    "econtrol": replace(SPEC, compress=replace(SPEC.compress, feedback=1.0, feedback_rule="econtrol")),
    "dgc": replace(SPEC, compress=replace(SPEC.compress, feedback=1.0, feedback_rule="dgc")),
    "lookup2": replace(with_outer(SPEC, floor_256=1), compress=replace(SPEC.compress, codec="lookup2")),
    "scalars": replace(
        SPEC,
        inner=replace(SPEC.inner, optimizer="spsa", lr=1e-3, clip=4.0),
        compress=replace(SPEC.compress, codec="scalar", k=2, feedback=0.0),
    ),
    "may reduce": replace(SPEC, reduce=ReduceSpec(k=128)),
}


def round_of(nodes: list[LoraHome], number: int) -> set[bytes]:
    """Train, fold and finalize a round on all; their digests."""
    sent = [node.train(number).pending for node in nodes]
    members = tuple(member(one, peer) for one, peer in zip(sent, (ME, OTHER), strict=False))
    for node in nodes:
        node.ask(FoldRequest(Round(number), members))
    return {node.ask(FinalizeRequest(Round(number), members)).state for node in nodes}


@pytest.mark.parametrize("name", RUNS)
def test_rounds_have_one_digest_through_a_restart_and_a_late_join(tmp_path, name):
    one, two = LoraHome(tmp_path / "one", ME, RUNS[name]), LoraHome(tmp_path / "two", OTHER, RUNS[name])
    frozen = base_values(one.session._learner.module, one.spec.model)
    before = {atom: value.clone() for atom, value in frozen.items()}
    states = []
    for number in range(3):
        found = round_of([one, two], number)
        assert len(found) == 1
        states += found
        assert two.restart().state == states[-1], "a kill loses nothing"
    assert len(set(states)) == 3, "each round moves the adapter"
    assert all(torch.equal(before[atom], value) for atom, value in frozen.items()), "nothing moves the base"
    late = LoraHome(tmp_path / "late", OTHER, RUNS[name])
    snapshot = one.ask(SnapshotRequest(str(tmp_path / "snapshot")))
    late.ask(AdoptRequest(snapshot.round, snapshot.path, snapshot.state, ()))
    assert late.session.started().state == states[-1]
    losses = {node.ask(EvaluateRequest()).val_loss for node in (one, two, late)}
    assert len(losses) == 1


def test_a_run_begins_with_the_loss_of_its_base_and_comes_below_it(tmp_path):
    node = LoraHome(tmp_path / "one")
    whole = replace(node.spec, model=node.spec.model.base, base=SPEC.base, seed=7)
    base = Home(tmp_path / "base", ME, whole).ask(EvaluateRequest()).val_loss
    assert node.ask(EvaluateRequest()).val_loss == base
    for number in range(8):
        round_of([node], number)
    assert node.ask(EvaluateRequest()).val_loss < base


def test_what_is_saved_and_sent_is_of_the_adapters_size(tmp_path):
    node, whole = LoraHome(tmp_path / "one"), Home(tmp_path / "whole", ME, SPEC)
    pending = [home.train(0).pending for home in (node, whole)]
    sizes = [Path(one.path).stat().st_size for one in pending]
    chunks = [arena_of(home.spec.model).chunks for home in (node, whole)]
    assert sizes[0] / sizes[1] == pytest.approx(chunks[0] / chunks[1], rel=0.2)
    kept = node.saved().tensors
    assert kept["residual"].shape == kept["final"].shape == (chunks[0], CHUNK)
    moments = sum(value.numel() for name, value in kept.items() if name.startswith("exp_avg"))
    assert moments == 2 * node.spec.model.parameters
    assert not any("embed" in name or "norm" in name for name in kept)


def test_micro_batches_and_recomputed_layers_take_the_same_steps(tmp_path):
    plain = LoraHome(tmp_path / "plain")
    thrifty = LoraHome(tmp_path / "thrifty", micro_batch=1, recompute=True)
    for number in range(2):
        for node in (plain, thrifty):
            round_of([node], number)
    losses = [node.ask(EvaluateRequest()).val_loss for node in (plain, thrifty)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_moments_in_eight_bits_and_a_narrow_base_train_too(tmp_path):
    node = LoraHome(tmp_path / "one", quantized=True, frozen="bfloat16")
    before = node.ask(EvaluateRequest()).val_loss
    for number in range(6):
        round_of([node], number)
    node.restart()
    assert node.ask(EvaluateRequest()).val_loss < before
    stored = base_values(node.session._learner.module, node.spec.model)["model.embed_tokens.weight"]
    assert stored.dtype == torch.bfloat16


def test_a_base_that_is_another_or_missing_is_refused_in_one_line(tmp_path):
    node = LoraHome(tmp_path / "one")
    data = bytearray(node.base.read_bytes())
    data[-1] ^= 1
    node.base.write_bytes(data)
    with pytest.raises(CorruptFault, match="is not the base of this run"):
        node.restart()
    node.base.unlink()
    with pytest.raises(ConfigError, match="the base of this run is not in this home"):
        node.restart()


@pytest.mark.parametrize(
    ("more", "why"), [({"frozen": "int8"}, "float32 or bfloat16"), ({"frozen_on_host": True}, "where steps")]
)
def test_settings_of_a_node_that_no_base_has_are_refused(tmp_path, more, why):
    with pytest.raises(ConfigError, match=why):
        LoraHome(tmp_path / "one", **more)


def test_an_adapter_is_not_cut_into_shards(tmp_path):
    with pytest.raises(ConfigError, match="too small to be cut"):
        check_shards(lora_spec(bytes(32)), 2)


def test_eval_of_a_node_that_is_stopped_reads_the_base_too(tmp_path):
    node = LoraHome(tmp_path / "one")
    round_of([node], 0)
    want = node.ask(EvaluateRequest()).val_loss
    node.session.close()
    (node.path / BLOBS).mkdir()
    node.base.rename(node.path / BLOBS / f"{node.spec.base.hex()}.blob")
    assert evaluate_saved(node.spec, node.path, NodeConfig(threads=1, device="cpu")).val_loss == want


def test_two_processes_on_one_machine_share_the_steps_of_an_adapter(tmp_path):
    alone, both = LoraHome(tmp_path / "alone"), LoraHome(tmp_path / "both", device="cpu,cpu")
    try:
        for node in (alone, both):
            round_of([node], 0)
        losses = [node.ask(EvaluateRequest()).val_loss for node in (alone, both)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    finally:
        both.session.close()
