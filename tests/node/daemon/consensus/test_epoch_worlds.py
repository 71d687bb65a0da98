"""Members leave, vanish, return and are cut off from each other; the others go on, and meet in one chain."""

import random

import pytest

from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import (
    Contribution,
    Epoch,
    Excise,
    Exclude,
    Follow,
    Prepare,
    Promise,
    Proposal,
    Vote,
)
from tests.node.daemon.consensus.epoch_world import (
    FAULTS,
    LEASE,
    ROUND,
    BoundedNode,
    Node,
    ShownNode,
    World,
    final,
)

MORE_LIARS = pytest.mark.slow(slice="test_liars_below_a_third_exclude_nobody_and_may_only_join_the_others")
MORE_UNDONE = pytest.mark.slow(slice="test_what_a_side_that_loses_voted_is_undone_with_its_chain")
MORE_FAULTS = pytest.mark.slow(slice="test_random_faults")
LARGE = pytest.mark.slow(slice="test_the_others_go_on_when_any_number_leaves_for_good")
LONG_CUTS = pytest.mark.slow(slice="test_both_sides_of_a_cut_go_on_and_meet")
MORE_LIARS_BESIDE = pytest.mark.slow(slice="test_members_that_keep_back_their_votes_stop_nobody")
MORE_STAYED = pytest.mark.slow(slice="test_what_those_that_stayed_did_is_not_undone_when_the_others_come_back")
SIZES = [(1, 1), (2, 2), (3, 3), (2, 1), (3, 2), (7, 1), (5, 3), (4, 4)]
"""Of the two sides of a cut."""
CUTS = [
    pytest.param(
        length,
        sizes,
        marks=() if length == 30 or sum(sizes) <= 3 or (length, sizes) == (400, (3, 2)) else LONG_CUTS,
    )
    for length in (30, 100, 400)
    for sizes in SIZES
]


@pytest.mark.parametrize("count", [*range(2, 7), pytest.param(7, marks=LARGE), pytest.param(8, marks=LARGE)])
@pytest.mark.parametrize("way", ["stop", "vanish"])
def test_the_others_go_on_when_any_number_leaves_for_good(count, way):
    for gone in range(1, count):
        world = World(count * 10 + gone, count)
        world.run(60)
        assert min(map(final, world.nodes)) > 3
        for node in world.rng.sample(world.nodes, gone):
            if way == "stop":
                node.stop()
                world.spread(1.0)
            node.is_up = False
        before = max(map(final, world.up()))
        bound = 2 * ROUND if way == "stop" else LEASE + 3 * ROUND
        steps = 0
        while any(final(node) <= before for node in world.up()):
            world.step()
            steps += 1
            assert steps <= 3 * bound, f"{gone} of {count} gone: stuck"
        print(way, count, gone, steps, bound)
        world.run(60)
        assert min(map(final, world.up())) > before + 8
        world.agree()


@pytest.mark.parametrize(("length", "sizes"), CUTS)
def test_both_sides_of_a_cut_go_on_and_meet(sizes, length):
    world = World(sum(sizes) + length, sum(sizes))
    world.run(60)
    for node in world.nodes[: sizes[0]]:
        world.side[node.peer] = 1
    before = max(map(final, world.nodes))
    world.run(length)
    if length > 2 * LEASE:
        assert min(map(final, world.nodes)) > before
    for peer in world.side:
        world.side[peer] = 0
    steps = 0
    while (
        len({tuple(s.epoch for s in node.state.chain) for node in world.nodes}) > 1
        or min(map(final, world.nodes)) <= before + length // ROUND // 2
    ):
        world.step()
        steps += 1
        assert steps < 100
    print(sizes, length, steps)
    world.run(60)
    world.agree()


@pytest.mark.parametrize(
    ("probation", "excludes", "excise_rounds"),
    [
        (1, "", 0),
        (8, "owner", 0),
        (1, "votes", 0),
        (4, "votes", 0),
        (1, "owner", 12),
        (1, "votes", 12),
        (4, "shown", 0),
        (4, "bounded", 0),
    ],
)
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=MORE_FAULTS) for block in range(1, 6))])
def test_random_faults(block, probation, excludes, excise_rounds):
    """`excludes`: the owner, or each of the others for itself, excludes a member, which goes on until the end.

    "shown": voters must have shown work; "bounded": and a set names one newcomer, or as many as others.
    With `excise_rounds` they also take its work out, and each node lacks payloads for that at times.
    """

    def removal(number, peer):
        return Excise(number, peer, "", Round(0)) if excise_rounds else Exclude(number, peer, "")

    for seed in range(block * 5, block * 5 + 5):
        rng = random.Random(seed)
        count = rng.randint(2, 6)
        kind = {"shown": ShownNode, "bounded": BoundedNode}.get(excludes, Node)
        world, gone = World(seed, count, probation, excise_rounds, kind), None
        world.run(rng.randint(20, 60))
        for _ in range(rng.randint(2, 6)):
            owner = world.nodes[0]
            if excludes == "owner" and gone is None and owner.is_up and owner.state.live and rng.random() < 0.5:
                gone = rng.choice(world.nodes[1:])
                owner.write(removal(owner.state.deciding, gone.peer))
            if excludes == "votes" and count > 2:
                gone = gone or rng.choice(world.nodes[1:])
                for node in world.nodes[1:]:
                    if node is not gone and node.is_up and node.state.live and rng.random() < 0.3:
                        node.write(removal(node.state.deciding, gone.peer))
            world.strike(rng.choice(FAULTS), rng.choice(world.nodes), rng)
            world.run(rng.randint(5, 120))
        for peer in world.side:
            world.side[peer] = 0
        if gone is not None:
            gone.is_up = False
        for node in world.nodes:
            if node is not gone and not node.is_up and rng.random() < 0.7:
                node.is_up = True
                node.boot(world.now)
        if not world.up():
            world.nodes[0].is_up = True
            world.nodes[0].boot(world.now)
        world.run(20)
        before = max(map(final, world.up()))
        steps = 0
        while (
            len({tuple(s.epoch for s in node.state.chain) for node in world.up()}) > 1
            or min(map(final, world.up())) <= before + 3
        ):
            world.step()
            steps += 1
            assert steps < 200, f"seed {seed}: stuck"
        print(seed, count, len(world.up()), steps, world.up()[0].state.epochs.voted_out)
        print(world.up()[0].state.excised)
        world.agree()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MORE_LIARS) for seed in range(1, 4))])
def test_liars_below_a_third_exclude_nobody_and_may_only_join_the_others(seed):
    """They vote against everybody, from round 0 on, and train along."""
    world = World(seed, 7)
    world.run(40)
    liars, bad, honest = world.nodes[1:3], world.nodes[3], world.nodes[4:]
    for liar in liars:
        for node in world.nodes[1:]:
            liar.write(Exclude(Round(0), node.peer, ""))
    world.run(40)
    for node in honest[:2]:
        node.write(Exclude(node.state.deciding, bad.peer, ""))
    world.run(40)
    assert not any(node.state.epochs.voted_out for node in world.nodes)
    honest[2].write(Exclude(honest[2].state.deciding, bad.peer, ""))
    before = max(map(final, world.nodes))
    world.run(80)
    world.agree()
    assert all(node.state.epochs.voted_out.keys() == {bad.peer} for node in world.nodes)
    assert min(map(final, world.nodes)) > before + 10
    first = honest[0].state.epochs.voted_out[bad.peer]
    late = {name for node in world.nodes for at, names in node.finals.items() if at >= first for name in names}
    assert not late & {each.get(bad.peer) for each in world.nodes[0].rounds.values()}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MORE_UNDONE) for seed in range(1, 4))])
def test_what_a_side_that_loses_voted_is_undone_with_its_chain(seed):
    """Three of seven are cut off. In their own epoch two exclude the third, and nobody that is not there."""
    world = World(seed, 7)
    world.run(40)
    few = world.nodes[4:]
    for node in few:
        world.side[node.peer] = 1
    for node in few[:2]:
        for other in (*world.nodes[1:4], few[2]):
            node.write(Exclude(node.state.deciding, other.peer, ""))
    steps = 0
    while not all(node.state.epochs.voted_out for node in few):
        world.step()
        steps += 1
        assert steps < 40 * LEASE, f"stuck at {[final(node) for node in few]}"
    assert all(node.state.epochs.voted_out.keys() == {few[2].peer} for node in few)
    for peer in world.side:
        world.side[peer] = 0
    before = max(map(final, world.nodes))
    world.run(8 * LEASE)
    world.agree()
    assert not any(node.state.epochs.voted_out for node in world.nodes)
    assert min(map(final, world.nodes)) > before + 5


WITHHELD = {
    "votes": (Vote,),
    "ballots": (Prepare, Promise, Proposal, Vote),
    "signatures": (Epoch, Follow),
    "all": (Epoch, Follow, Prepare, Promise, Proposal, Vote),
}


KEPT_BACK = [
    pytest.param(*counts, what, marks=() if (counts == (4, 1, 1)) != (what == "all") else MORE_LIARS_BESIDE)
    for counts in ((4, 1, 1), (4, 2, 1), (5, 1, 1), (8, 2, 2))
    for what in WITHHELD
]
"""In `make test` each kind with four members, and all kinds at once with other numbers of them."""


@pytest.mark.parametrize(("count", "gone", "liars", "what"), KEPT_BACK)
def test_members_that_keep_back_their_votes_stop_nobody(what, count, gone, liars):
    """They renew their leases and train along. Beside others that are gone, the rest are no quorum."""
    world = World(count, count)
    world.run(60)
    places = world.rng.sample(world.nodes, gone + liars)
    go_down(world, places[:gone])
    for node in places[gone:]:
        node.keeps_back = WITHHELD[what]
    honest = [node for node in world.nodes if node not in places]
    before, steps = max(map(final, honest)), 0
    while min(map(final, honest)) <= before + 5:
        world.step()
        steps += 1
        assert steps < 20 * LEASE, f"stuck at {[final(node) - before for node in honest]}"
    print(what, count, gone, liars, steps)
    come_back(world, places[:gone])
    for node in places[gone:]:
        node.keeps_back = ()
    world.run(4 * LEASE)
    world.agree()


@pytest.mark.parametrize("seed", range(6))
def test_who_missed_a_ballot_goes_on_with_those_that_signed(seed):
    """Two of eight are gone and one keeps back its ballots. One of the others begins again after the first of two.

    Those that saw both sign at once. Without its signature they give up after a patience, and all look again.
    In a quarter of all seeds they do so all the same, after ballots that came between: 31 to 68 steps.
    """
    world = World(seed, 8)
    world.run(30)
    go_down(world, world.nodes[6:])
    world.nodes[5].keeps_back = WITHHELD["ballots"]
    honest, steps, is_back = world.nodes[:5], 0, False
    while not all(node.state.epoch for node in honest):
        world.step()
        steps += 1
        if not is_back and all(node.state.took_part for node in honest):
            honest[4].boot(world.now)
            is_back = True
        assert steps <= LEASE + ROUND + 1, f"{[node.state.epoch for node in honest]}"
    assert is_back


def go_down(world, nodes):
    for node in nodes:
        node.is_up = False


def come_back(world, nodes):
    for node in nodes:
        node.is_up = True
        node.boot(world.now)


@pytest.mark.parametrize(("count", "gone"), [(2, 1), (3, 2), (3, 1), (4, 3), (5, 4), (6, 4)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MORE_STAYED) for seed in (1, 2))])
def test_what_those_that_stayed_did_is_not_undone_when_the_others_come_back(count, gone, seed):
    """Two of three were a quorum, and could decide the round again in which they went down."""
    world = World(seed, count)
    world.run(60)
    away, stayed = world.nodes[:gone], world.nodes[gone:]
    go_down(world, away)
    world.run(400)
    before = [dict(node.finals) for node in stayed]
    assert min(map(len, before)) > 50
    come_back(world, away)
    world.run(60)
    go_down(world, away[:1])
    world.run(5)
    come_back(world, away[:1])
    world.run(60)
    world.agree()
    for node, finals in zip(stayed, before, strict=True):
        assert node.finals.items() >= finals.items()
    assert min(map(final, world.nodes)) > max(max(finals) for finals in before) + 10


class FarLiar(Node):
    """Signs an epoch of itself alone, contributes to far rounds, and takes nobody else's work."""

    lies = False

    def known(self, number):
        found = self.rounds.get(number, {}).get(self.peer)
        return super().known(number) if not self.lies else (found,) if found else ()

    def lie(self, newest):
        self.lies = True
        self.write(Epoch(self.state.deciding, self.state.epoch, (self.peer,)))
        for number in range(self.state.deciding, newest + 20):
            if self.peer not in self.rounds.get(number, {}):
                payload = digest(self.peer.encode(), number.to_bytes(4, "big"))
                self.write(Contribution(Round(number), digest(b"base"), payload, 1, 1, 64, 1.0))
        self.round = newest + 20


class NearNode(Node):
    """It trains one round after the other, wherever others are."""

    def train(self, now):
        others, self.rounds = self.rounds, {}
        for number, book in others.items():
            if number <= self.round or self.peer in book:
                self.rounds[number] = book
        super().train(now)
        for number, book in self.rounds.items():
            others.setdefault(number, {}).update(book)
        self.rounds = others


@pytest.mark.parametrize(("count", "down"), [(4, 1), (7, 3), (7, 6)])
def test_a_liar_that_works_far_ahead_takes_no_run_while_others_restart(count, down):
    """Who was just new-started followed it, the two were as many as the others, and these followed, for ever."""
    world = World(1, count, node=NearNode)
    liar = world.nodes[-1] = FarLiar(count - 1)
    world.run(60)
    restarted = world.nodes[:down]
    go_down(world, restarted)
    liar.lie(max(max(node.rounds) for node in world.nodes))
    world.run(2)
    come_back(world, restarted)
    world.run(160)
    honest = world.nodes[:-1]
    authors = {name: peer for book in honest[0].rounds.values() for peer, name in book.items()}
    newest = sorted(honest[0].finals)[-20:]
    works = [{authors[name] for name in honest[0].finals[number]} - {liar.peer} for number in newest]
    assert min(map(len, works)) > 0
    assert all({node.peer for node in honest} <= {*node.state.voters} for node in honest)


@pytest.mark.parametrize("sleeper", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_wakes_up_without_a_network_does_not_undo_a_long_chain(sleeper, seed):
    world = World(seed, 2)
    world.run(60)
    node, other = world.nodes[sleeper], world.nodes[1 - sleeper]
    node.is_up = False  # it sleeps: its memory stays
    world.run(400)
    node.is_up = True
    world.side[node.peer] = 1
    world.run(30)
    assert len(node.state.chain) > 1, "it went on alone"
    before = dict(other.finals)
    world.side[node.peer] = 0
    world.run(60)
    world.agree()
    assert other.finals.items() >= before.items()
    assert final(node) > max(before) + 5
