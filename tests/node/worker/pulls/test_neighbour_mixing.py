"""Pulls in the worker: what a neighbour is given, what mixing does to the weights, and what a contribution is."""

import tempfile
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.checkpoint.snapshot import read_own_snapshot
from atoll.node.learning.compress.codecs import OnHost, codec_of
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.outer.fixed import clear, padding_of, state_digest, to_fixed, to_float
from atoll.node.worker.local_weights import LocalWeights
from atoll.node.worker.multi_device.modes import check_devices
from atoll.node.worker.pulls.neighbour_mixing import NeighbourMixing
from atoll.protocols.errors import AtollError, ConfigError, DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import AdoptRequest, FinalizeRequest, SnapshotRequest, TrainReply
from atoll.protocols.pulls.draw import neighbour_of, pairs
from atoll.protocols.pulls.requests import DifferenceReply, DifferenceRequest, MixReply, MixRequest
from atoll.protocols.run.arena import Span, arena_of, state_arena_of
from atoll.protocols.run.run_spec import CompressSpec, Stage
from atoll.protocols.run.sections.variants.gossip import GossipSpec
from tests.golden.__main__ import recorded
from tests.node.worker.session_home import SPEC, Home, member

torch.set_num_threads(1)
PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 5)]
STEPS = 6
ARENA = arena_of(SPEC.model)


PLAIN, ALWAYS = GossipSpec(), GossipSpec(first_256=256, last_256=256)


def spec_of(codec="int8", gossip=PLAIN, **more):
    stages = (Stage(0, STEPS),)
    outer = msgspec.structs.replace(SPEC.outer, rule="average", gossip=gossip, stages=stages, **more)
    compress = CompressSpec(codec=codec, k=4096, feedback=0.0)
    found = msgspec.structs.replace(SPEC, outer=outer, compress=compress)
    found.check()
    return found


def crew(tmp_path, count=2, **more):
    return [Home(tmp_path / str(at), peer, spec_of(**more)) for at, peer in enumerate(PEERS[:count])]


def delta_of(weights):
    """A − L now."""
    return weights.anchor_C4096 - weights.rows(Span(0, len(weights.anchor_C4096)))


def delta(home):
    return delta_of(home.session._learner.weights)


def values(payload, codec="int8"):
    found = torch.zeros((ARENA.chunks, 4096))
    codec_of(codec, 4096).give_back(found, payload)
    return found


def given(home, number, path):
    """What a neighbour is given of this round now."""
    assert home.ask(DifferenceRequest(Round(number), str(path))) == DifferenceReply(True)
    return values(path.read_bytes(), home.spec.compress.codec)


def begun(home, number, steps):
    """A round after so many steps."""
    events = home.events(number)
    for _ in range(steps):
        next(events)
    return events


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
def test_a_mix_in_the_middle_of_a_round_is_in_the_contribution(tmp_path, codec):
    """The rest of the round goes on from the mixed weights, the anchor stays, and what is sent is A − L."""
    one, two = crew(tmp_path, codec=codec)
    mine_goes_on, _ = begun(one, 0, 2), begun(two, 0, 2)
    mine, theirs, path = delta(one), given(two, 0, tmp_path / "d"), tmp_path / "d"
    anchor_C4096 = one.session._learner.weights.anchor_C4096.clone()
    assert one.ask(MixRequest(Round(0), str(path))) == MixReply(True)
    share = min(1.0, float(mine.double().norm() / theirs.double().norm()))
    assert torch.allclose(delta(one), (mine + share * theirs) / 2, atol=1e-6)
    assert torch.equal(one.session._learner.weights.anchor_C4096, anchor_C4096)
    before = delta(one)
    *_, reply = mine_goes_on
    assert isinstance(reply, TrainReply)
    assert (reply.pulls, reply.pending.steps) == (1, STEPS)
    sent = values(Path(reply.pending.path).read_bytes(), codec)
    alone = Home(tmp_path / "alone", PEERS[0], spec_of(codec))
    unmixed = values(Path(alone.train(0).pending.path).read_bytes(), codec)
    # Nearer to what it was right after the mix than to what nobody mixed.
    assert float((sent - before).norm()) < float((sent - unmixed).norm()) + float((unmixed - mine).norm())
    assert not torch.allclose(sent, unmixed, atol=1e-3)


def test_what_a_neighbour_is_given_changes_nothing_here(tmp_path):
    plain, asked = (Home(tmp_path / name, PEERS[0], spec_of()) for name in ("plain", "asked"))
    events = begun(asked, 0, 3)
    told = given(asked, 0, tmp_path / "d")
    assert torch.allclose(told, delta(asked), atol=float(delta(asked).abs().max()) / 127)
    *_, reply = events
    assert reply.pending.payload == plain.train(0).pending.payload


def test_a_round_that_ended_gives_its_contribution_and_takes_no_mix(tmp_path):
    one, two = crew(tmp_path)
    reply = one.train(0)
    assert torch.equal(given(one, 0, tmp_path / "d"), values(Path(reply.pending.path).read_bytes()))
    before = delta(one)
    assert one.ask(MixRequest(Round(0), str(tmp_path / "d"))) == MixReply(False)
    assert torch.equal(delta(one), before)
    assert two.ask(DifferenceRequest(Round(0), str(tmp_path / "none"))) == DifferenceReply(False)
    assert one.ask(DifferenceRequest(Round(1), str(tmp_path / "none"))) == DifferenceReply(False)
    assert not (tmp_path / "none").exists()


def test_a_loud_neighbour_moves_a_member_no_further_than_it_is_already(tmp_path):
    one, two = crew(tmp_path)
    begun(one, 0, 2), begun(two, 0, 2)
    loud = torch.randn((ARENA.chunks, 4096), generator=torch.Generator().manual_seed(1)) * 100
    weights_C4096 = torch.zeros_like(loud)
    payload = codec_of("int8", 4096).encode(loud, weights_C4096, weights_C4096, 1.0)
    (tmp_path / "loud").write_bytes(payload)
    before = delta(one)
    assert one.ask(MixRequest(Round(0), str(tmp_path / "loud"))) == MixReply(True)
    assert float(delta(one).norm()) <= float(before.norm()) * (1 + 1e-5)
    assert float((delta(one) - before / 2).norm()) == pytest.approx(float(before.norm()) / 2, rel=1e-3)


@pytest.mark.parametrize(
    "break_it", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: bytes(len(data))]
)
def test_what_is_no_payload_of_the_run_is_refused_and_moves_nothing(tmp_path, break_it):
    one, two = crew(tmp_path)
    begun(one, 0, 2), begun(two, 0, 2)
    given(two, 0, tmp_path / "d")
    before = delta(one)
    (tmp_path / "d").write_bytes(break_it((tmp_path / "d").read_bytes()))
    with pytest.raises(DecodeError):
        one.ask(MixRequest(Round(0), str(tmp_path / "d")))
    assert torch.equal(delta(one), before)


def test_weights_that_are_not_finite_are_given_to_nobody(tmp_path):
    one = crew(tmp_path, 1)[0]
    events = begun(one, 0, 2)
    weights = one.session._learner.weights
    weights.replace_rows(Span(0, 1), torch.full((1, 4096), torch.nan))
    assert one.ask(DifferenceRequest(Round(0), str(tmp_path / "d"))) == DifferenceReply(False)
    events.close()


def test_a_run_without_gossip_answers_no_such_request(tmp_path):
    plain = Home(tmp_path, PEERS[0], spec_of(gossip=msgspec.UNSET))
    with pytest.raises(AtollError, match="no answer"):
        plain.ask(DifferenceRequest(Round(0), str(tmp_path / "d")))
    assert not plain.session.is_reported(1)


def test_the_daemon_learns_of_the_first_step_and_of_every_tick(tmp_path):
    one = Home(tmp_path, PEERS[0], spec_of(gossip=GossipSpec(steps=3)))
    assert [step for step in range(1, 10) if one.session.is_reported(step)] == [1, 3, 6, 9]


def test_several_devices_are_refused():
    with pytest.raises(ConfigError, match="gossip takes each step on one device"):
        check_devices(spec_of(), 2)
    check_devices(spec_of(), 1)


def test_a_kill_and_a_late_join_give_one_digest(tmp_path):
    """Each member mixes another one in every round; what becomes final is the fold of what they send."""
    homes = crew(tmp_path)

    def trained(homes, number):
        events = [begun(home, number, 3) for home in homes]
        for at, home in enumerate(homes):
            given(homes[at - 1], number, tmp_path / "d")
            assert home.ask(MixRequest(Round(number), str(tmp_path / "d"))) == MixReply(True)
        replies = [list(each)[-1] for each in events]
        assert [reply.pulls for reply in replies] == [1] * len(homes)
        pairs = zip(replies, homes, strict=True)
        return tuple(member(reply.pending, home.start.peer) for reply, home in pairs)

    states = set()
    for number in range(3):
        members = trained(homes, number)
        states = {home.ask(FinalizeRequest(Round(number), members)).state for home in homes}
        assert len(states) == 1
    assert homes[1].restart().state in states
    reply = homes[0].ask(SnapshotRequest(str(tmp_path / "snapshot")))
    joiner = Home(tmp_path / "late", PEERS[2], spec_of())
    joiner.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    members = trained([*homes, joiner], 3)
    assert len({home.ask(FinalizeRequest(Round(3), members)).state for home in (*homes, joiner)}) == 1
    arena = state_arena_of(SPEC.model, 0)
    assert read_own_snapshot(tmp_path / "snapshot", arena, state_digest).state in states


# --- on a quadratic ------------------------------------------------------------------------------


def noise(seed, size=1e-2):
    found = torch.randn((ARENA.chunks, 4096), generator=torch.Generator().manual_seed(seed)) * size
    return clear(found, padding_of(ARENA))


class Member:
    """One member whose steps go a quarter of the way to its own target."""

    def __init__(self, spec, target):
        self.module, self.target = Decoder(spec.model), target
        self.weights = LocalWeights(self.module, spec)
        self.mixing = NeighbourMixing(
            spec=spec, gossip=spec.outer.gossip, encoder=OnHost(), padding=padding_of(ARENA)
        )

    def step(self):
        local = self.weights.rows(Span(0, ARENA.chunks))
        self.weights.replace_rows(Span(0, ARENA.chunks), local.lerp(self.target, 0.25))


def on_a_quadratic(folder, rounds, gossip=ALWAYS):
    """Θ after each round of four members whose targets differ in two directions, all folded with equal weight."""
    spec, view = spec_of(gossip=gossip), to_fixed(noise(0, 0.02))
    targets = [noise(7) + sign * noise(seed) for seed in (8, 9) for sign in (1, -1)]
    members = [Member(spec, target) for target in targets]
    for number in range(rounds):
        for each in members:
            each.weights.start(view)
            each.mixing.begin(number)
        for tick in range(1, STEPS):
            for each in members:
                each.step()
            drawn = pairs(gossip, bytes(32), number, tick, ticks=STEPS - 1, members=PEERS)
            for peer, each in zip(PEERS, members, strict=True):
                each.mixing.write(DifferenceRequest(Round(number), str(folder / peer)), each.weights)
            for peer, each in zip(PEERS, members, strict=True):
                if (other := neighbour_of(peer, drawn)) is not None:
                    each.mixing.mix(MixRequest(Round(number), str(folder / other)), each.weights)
        for each in members:
            each.step()
        deltas = [clear(delta_of(each.weights), padding_of(ARENA)) for each in members]
        view = view - to_fixed(torch.stack(deltas).mean(dim=0))
        yield to_float(view), deltas


def test_on_a_quadratic_the_merge_comes_to_the_mean_of_all_targets_and_stays(tmp_path):
    *_, (view, deltas) = on_a_quadratic(tmp_path, 8)
    # The neighbours' differences are clipped, and their lengths differ a little: so does the fixed point.
    assert float((view - noise(7)).norm()) < 0.02 * float(noise(8).norm())
    alone = [*on_a_quadratic(tmp_path, 8, GossipSpec(first_256=0, last_256=1))][-1][1]
    assert sum(float(d.norm()) for d in deltas) < 0.6 * sum(float(d.norm()) for d in alone), "they did not mix"


def golden():
    """Θ after each of four rounds on the quadratic: the content of tests/golden/gossip.json."""
    with tempfile.TemporaryDirectory() as folder:
        found = on_a_quadratic(Path(folder), 4, GossipSpec(first_256=64, last_256=256))
        return [[round(float(value), 6) for value in view[0, :4]] for view, _ in found]


def test_golden_trajectory_of_pairwise_gossip():
    found = golden()
    for mine, known in zip(found, recorded("gossip"), strict=True):
        assert mine == pytest.approx(known, abs=2e-6)
