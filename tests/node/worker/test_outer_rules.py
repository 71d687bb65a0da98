"""A rule with momentum in whole sessions: a kill, a late join from a snapshot, other sets, and one digest."""

import msgspec
import pytest
import torch

from atoll.node.checkpoint.snapshot import read_own_snapshot
from atoll.node.import_export.export_run import saved_weights
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.learning.outer.isotropic import isotropic
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    CheckRequest,
    FinalizeRequest,
    FoldRequest,
    SnapshotReply,
    SnapshotRequest,
)
from atoll.protocols.run.arena import Span, arena_of, state_arena_of
from atoll.protocols.run.bounds import snapshot_max_bytes
from atoll.protocols.run.run_spec import CompressSpec
from tests.node.worker.session_home import SPEC, Home, K, member

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]
CODECS = {"sparse2": K, "int8": 4096, "e3m0": 4096}


def spec_of(rule, codec="sparse2", **more):
    outer = msgspec.structs.replace(SPEC.outer, rule=rule, floor_256=64, **more)
    compress = CompressSpec(codec=codec, k=CODECS[codec], feedback=0.95)
    found = msgspec.structs.replace(SPEC, outer=outer, compress=compress)
    found.check()
    return found


def trained(homes, number):
    """Members of a round in which all of these trained."""
    return tuple(member(home.train(number).pending, home.start.peer) for home in homes)


CASES = [
    ("average", "int8", {}),
    ("nesterov", "int8", {"alpha_256": 179}),
    ("nesterov", "e3m0", {"alpha_256": 179, "fragments": 2}),
    ("nesterov", "sparse2", {"alpha_256": 179, "overlap_steps": 1}),
    ("slowmo", "sparse2", {"momentum_256": 128, "fragments": 2}),
    ("nesterov", "e3m0", {"alpha_256": 102, "fragments": 2, "overlap_steps": 1, "late": "blend"}),
    ("co2", "int8", {"alpha_256": 256}),
    ("co2", "sparse2", {"fragments": 2, "stale_256": 200, "clip_65536": 99, "overlap_steps": 1}),
    ("nesterov", "int8", {"alpha_256": 179, "aggregate": "edit", "step_most_256": 1}),
    ("sgd", "sparse2", {"aggregate": "edit", "fragments": 2}),
    ("sgd", "sparse2", {"spectrum": "isotropic", "alpha_256": 538, "overlap_steps": 1}),
    ("nesterov", "int8", {"spectrum": "isotropic", "alpha_256": 461, "momentum_256": 205, "fragments": 2}),
]


@pytest.mark.parametrize(("rule", "codec", "more"), CASES)
def test_a_kill_and_a_late_join_give_one_digest(tmp_path, rule, codec, more):
    killed_and_joined(tmp_path, spec_of(rule, codec, **more))


def test_muloco_has_one_digest_after_a_kill_and_a_late_join(tmp_path):
    spec = spec_of("nesterov", "int8", alpha_256=179, momentum_256=154)
    spec = msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, optimizer="muon"))
    spec.check()
    killed_and_joined(tmp_path, spec)


def test_slow_momentum_has_one_digest_after_a_kill_and_a_late_join(tmp_path):
    """MT-DAO's, which lives in each member and not in the fold."""
    spec = spec_of("sgd")
    inner = msgspec.structs.replace(spec.inner, beta1=0.995, beta2=0.999, momentum_share=0.5)
    spec = msgspec.structs.replace(spec, inner=inner)
    spec.check()
    killed_and_joined(tmp_path, spec)


def killed_and_joined(tmp_path, spec):
    homes = [Home(tmp_path / str(at), peer, spec) for at, peer in enumerate(PEERS[:2])]
    states = set()
    for number in range(3):
        members = trained(homes, number)
        states = {home.ask(FinalizeRequest(Round(number), members)).state for home in homes}
        assert len(states) == 1
    final = homes[0].session._fold
    assert bool((final.final_state_S4096[final.final_C4096.shape[0] :] != 0).any()) == bool(spec.outer.momenta)

    # A kill after the save of a round: the momentum is as it was, and the next round gives the same bits.
    assert homes[1].restart().state in states
    # A late joiner has the state, momentum included, from a snapshot alone.
    reply = homes[0].ask(SnapshotRequest(str(tmp_path / "snapshot")))
    assert isinstance(reply, SnapshotReply)
    assert reply.size_bytes <= snapshot_max_bytes(spec)
    joiner = Home(tmp_path / "late", PEERS[2], spec)
    joiner.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    members = trained([*homes, joiner], 3)
    mine = members[::-1]
    homes[0].ask(FoldRequest(Round(3), mine[:1]))  # provisional, with another set
    seen = {joiner.ask(CheckRequest(Round(3), mine)).state, homes[0].ask(FoldRequest(Round(3), mine)).state}
    seen |= {home.ask(FinalizeRequest(Round(3), members)).state for home in (*homes, joiner)}
    assert len(seen) == 1

    # What is exported is Θ; the saved state and a snapshot file have the digest of the whole state.
    joiner.session.close()
    assert saved_weights(spec, joiner.path).state in seen
    arena = state_arena_of(spec.model, spec.outer.momenta)
    assert read_own_snapshot(tmp_path / "snapshot", arena, state_digest).state in states


def test_an_isotropic_mean_is_what_the_worker_folds(tmp_path):
    """U of one set, against what follows from the plain mean of the same payloads."""
    plain, iso = (
        Home(tmp_path / name, PEERS[0], spec_of("sgd", "int8", **more))
        for name, more in (("plain", {}), ("iso", {"spectrum": "isotropic"}))
    )
    members = trained([plain], 0)
    before = iso.session._fold.final_C4096.clone()
    for home in (plain, iso):
        home.ask(FinalizeRequest(Round(0), members))
    wanted, arena = plain.session._fold.final_C4096.clone(), arena_of(SPEC.model)
    isotropic(wanted, before, arena, (Span(0, arena.chunks),))
    assert torch.equal(iso.session._fold.final_C4096, wanted)
    assert not torch.equal(wanted, plain.session._fold.final_C4096)


def test_a_snapshot_without_the_momentum_is_refused(tmp_path):
    """It is shorter than the one legal file; one with another momentum has another digest."""
    plain, ruled = (Home(tmp_path / name, PEERS[0], spec_of(name)) for name in ("sgd", "nesterov"))
    found = plain.ask(SnapshotRequest(str(tmp_path / "snapshot")))
    with pytest.raises(DecodeError, match="snapshot"):
        ruled.ask(AdoptRequest(Round(3), found.path, found.state, ()))
