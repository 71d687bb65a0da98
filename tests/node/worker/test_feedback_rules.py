"""Rules of the error feedback, and `lookup2`, in whole sessions: a kill, a late join, other sets, one digest."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.learning.outer.fixed import clear, padding_of
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    CheckRequest,
    FinalizeRequest,
    FoldRequest,
    SnapshotReply,
    SnapshotRequest,
    VerifyRequest,
)
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.sections.compression import CompressSpec, WarmUp
from atoll.protocols.run.sections.variants.sizes import SizesSpec
from tests.node.worker.session_home import OTHER, SPEC, Home, given, member

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]
SLOWMO = {"rule": "slowmo", "momentum_256": 255, "floor_256": 256}
WARM = (WarmUp(1, 256), WarmUp(3, 128))


def spec_of(compress, outer):
    made = CompressSpec(**({"codec": "sparse2", "k": 64, "feedback": 1.0} | compress))
    found = msgspec.structs.replace(SPEC, compress=made, outer=msgspec.structs.replace(SPEC.outer, **outer))
    found.check()
    return found


CASES = [
    ({"feedback_rule": "econtrol"}, {"floor_256": 64}),
    ({"feedback_rule": "econtrol", "codec": "int8", "k": 4096}, SLOWMO | {"overlap_steps": 1}),
    ({"feedback_rule": "econtrol", "control": 0.3, "warmup": WARM}, SLOWMO | {"fragments": 2}),
    ({"feedback_rule": "dgc", "warmup": WARM}, {"alpha_256": 64, "floor_256": 64}),
    ({"feedback_rule": "dgc", "clip": 1e-3}, {"alpha_256": 64, "fragments": 2, "overlap_steps": 1}),
    ({"feedback": 0.95, "warmup": WARM}, {"rule": "nesterov"}),
    ({"feedback": 0.95, "sizes": SizesSpec(goal="bytes", every=2)}, {"floor_256": 64, "overlap_steps": 1}),
    ({"feedback_rule": "dgc", "sizes": SizesSpec(goal="error", every=1)}, {"alpha_256": 64}),
    ({"feedback": 0.95, "codec": "lookup2"}, {"floor_256": 1, "aggregate": "clip"}),
    ({"feedback": 0.95, "codec": "lookup2", "warmup": WARM}, {"fragments": 2, "overlap_steps": 1}),
]


def memory(home):
    kept = home.session._feedback.memory
    return {name: value.clone() for name, value in kept.tensors().items()} if kept else {}


@pytest.mark.parametrize(("compress", "outer"), CASES)
def test_a_kill_and_a_late_join_give_one_digest(tmp_path, compress, outer):
    spec = spec_of(compress, outer)
    homes = [Home(tmp_path / str(at), peer, spec) for at, peer in enumerate(PEERS[:2])]
    twin, states = Home(tmp_path / "twin", PEERS[1], spec), set()
    for number in range(3):
        trained = [home.train(number).pending for home in homes]
        members = tuple(member(each, home.start.peer) for each, home in zip(trained, homes, strict=True))
        # An end after each round: e and the memory are as they were, and what follows has the same bits. It is a
        # stop and no kill, which would find moments of some rounds before.
        assert twin.train(number).pending.payload == trained[1].payload
        before = memory(homes[1])
        homes[1].session.close()
        homes[1].restart()
        assert all(torch.equal(value, memory(homes[1])[name]) for name, value in before.items())
        assert bool(before) == bool(spec.compress.memories(spec.outer.momenta))
        states = {home.ask(FinalizeRequest(Round(number), members)).state for home in (*homes, twin)}
        assert len(states) == 1
    assert torch.equal(twin.residual(), homes[1].residual())

    reply = homes[0].ask(SnapshotRequest(str(tmp_path / "snapshot")))
    assert isinstance(reply, SnapshotReply)
    joiner = Home(tmp_path / "late", PEERS[2], spec)
    joiner.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    homes.append(joiner)
    members = tuple(member(home.train(3).pending, home.start.peer) for home in homes)
    homes[0].ask(FoldRequest(Round(3), members[:1]))  # provisional, with another set
    seen = {joiner.ask(CheckRequest(Round(3), members)).state, homes[0].ask(FoldRequest(Round(3), members)).state}
    seen |= {home.ask(FinalizeRequest(Round(3), members)).state for home in homes}
    assert len(seen) == 1


def test_what_an_interrupted_member_sends_next_is_what_it_would_have_sent(tmp_path):
    """Without its memory a restarted member would send another payload: the memory is part of what is saved."""
    spec = spec_of({"feedback_rule": "dgc"}, {"alpha_256": 64})
    steady, shaken = Home(tmp_path / "a", PEERS[0], spec), Home(tmp_path / "b", PEERS[0], spec)
    for number in range(2):
        pending = {steady.train(number).pending.payload, shaken.train(number).pending.payload}
        assert len(pending) == 1
        shaken.restart()
    assert memory(steady)["memory/values"].any()


def test_the_decoder_holds_a_payload_to_the_k_of_its_round(tmp_path):
    spec = spec_of({"warmup": WARM}, {})
    home = Home(tmp_path / "a", PEERS[0], spec)
    first = home.train(0).pending
    for number, legal in ((0, True), (1, False), (3, False)):
        ask = VerifyRequest(first.path, Round(number), b"", ())
        if legal:
            home.ask(ask)
            continue
        assert payload_size(spec, number) != payload_size(spec, 0)
        with pytest.raises(DecodeError, match="payload k 256; the run's is"):
            home.ask(ask)


@pytest.mark.parametrize("codec", [{}, {"codec": "int8", "k": 4096}])
def test_work_outside_the_final_set_returns_to_error_and_memory(tmp_path, codec):
    spec = spec_of({"feedback_rule": "econtrol"} | codec, SLOWMO)
    node, other = Home(tmp_path / "a", PEERS[0], spec), Home(tmp_path / "b", OTHER, spec)
    node.train(0)
    assert memory(node)["memory/values"].any()
    error, kept = node.residual(), memory(node)["memory/values"]
    node.ask(FinalizeRequest(Round(0), (member(other.train(0).pending, OTHER),)))
    assert not memory(node)["memory/values"].any(), "the fold has nothing of ours"
    assert torch.equal(node.session._feedback.residual_C4096, error + kept)


def test_what_lookup2_sends_and_what_it_leaves_add_up_and_padding_stays_empty(tmp_path):
    spec = spec_of({"codec": "lookup2"}, {})
    home = Home(tmp_path / "a", PEERS[0], spec)
    feedback, padding = home.session._feedback, padding_of(arena_of(spec.model))
    # Chunks of other scales: a table for each would be another one in each.
    for chunk, row in enumerate(feedback.residual_C4096):
        row += torch.randn(4096, generator=torch.Generator().manual_seed(chunk)) * 2.0 ** (chunk % 5 - 12)
    clear(feedback.residual_C4096, padding)
    before = feedback.residual_C4096.clone()
    delta = given_of(home) + before
    values = torch.zeros_like(feedback.residual_C4096)
    feedback._codec_of(0).give_back(values, Path(feedback.pending[0].path).read_bytes())
    assert torch.allclose(feedback.residual_C4096, delta - clear(values.clone(), padding), atol=1e-8)
    assert torch.equal(clear(feedback.residual_C4096.clone(), padding), feedback.residual_C4096)
    matrices = [place for place in arena_of(spec.model).placements if len(place.shape) == 2]
    for place in matrices:
        rows = values[place.first_chunk : place.first_chunk + place.blocks[0] * place.blocks[1]]
        assert len(rows[rows != 0].unique()) <= 4, "one table for a tensor"


def given_of(home):
    """The pseudo-gradient of round 0, measured from outside, which `home` trains and sends."""
    weights, kept = home.session._learner.weights, {}
    encode = home.session._feedback.encode

    def listen(number, own):
        kept["delta"] = given(0, weights, home.session._feedback.residual_C4096, home.spec)
        return encode(number, own)

    home.session._feedback.encode = listen
    home.train(0)
    return kept["delta"]


def test_a_long_pseudo_gradient_is_shortened_to_its_bound(tmp_path):
    spec = spec_of({"feedback_rule": "dgc", "clip": 1e-3, "momentum": 0.0}, {})
    free = spec_of({"feedback_rule": "dgc", "clip": 100.0, "momentum": 0.0}, {})
    sums = {}
    for name, each in (("short", spec), ("free", free)):
        home = Home(tmp_path / name, PEERS[0], each)
        home.train(0)
        feedback = home.session._feedback
        values = torch.zeros_like(feedback.residual_C4096)
        feedback._codec_of(0).give_back(values, Path(feedback.pending[0].path).read_bytes())
        sums[name] = feedback.residual_C4096 + values
    most = 1e-3 * spec.inner.lr * 2 * math.sqrt(sums["short"].numel())
    assert 0.99 * most - sums["free"].norm() / 256 < sums["short"].norm() <= most
    share = sums["short"].norm() / sums["free"].norm()
    assert torch.allclose(sums["short"], sums["free"] * share, atol=1e-8)
