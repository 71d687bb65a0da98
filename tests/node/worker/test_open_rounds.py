"""A worker with many open rounds: its view is, bit for bit, what a plain fold of the same sets gives."""

import random

import msgspec

from atoll.protocols.ids import Round, digest
from atoll.protocols.local.worker_messages import FinalizeRequest, FoldRequest, Member
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member

ROUNDS = 200
LONG = msgspec.structs.replace(SPEC, outer=msgspec.structs.replace(SPEC.outer, rounds=ROUNDS))


def contributions(tmp_path) -> list[Member]:
    """Real payloads of two members: a round's set names some of them under entry ids of its own."""
    homes = [Home(tmp_path / peer[-4:], peer, LONG) for peer in (ME, OTHER)]
    return [member(home.train(number).pending, home.start.peer) for number in range(3) for home in homes]


def plain_view(path, sets, final):
    """The view of a fresh worker that is given each set once, in the order of the rounds."""
    home, view = Home(path, ME, LONG), b""
    for number in sorted(sets):
        if number <= final:
            home.ask(FinalizeRequest(Round(number), sets[number]))
        else:
            view = home.ask(FoldRequest(Round(number), sets[number])).state
    return view, home.session._fold.state_digest()


def test_the_view_of_many_open_rounds_is_the_plain_refold(tmp_path):
    """Sets come in any order, grow and shrink, and old rounds become final meanwhile, some with another set."""
    made, luck, sets = contributions(tmp_path), random.Random(7), {}

    def some(number):
        chosen = luck.sample(made, luck.randint(1, 3))
        return tuple(msgspec.structs.replace(one, entry=digest(one.entry, bytes([number]))) for one in chosen)

    home, final, view = Home(tmp_path / "view", ME, LONG), -1, b""
    for at in range(ROUNDS):
        sets[at] = some(at)
        view = home.ask(FoldRequest(Round(at), sets[at])).state
        for number in luck.sample(range(final + 1, at + 1), min(2, at - final)):
            sets[number] = some(number)
            view = home.ask(FoldRequest(Round(number), sets[number])).state
        if at % 70 == 69:
            assert len(home.session._fold._open) == at - final > 60
            assert (view, home.session._fold.state_digest()) == plain_view(tmp_path / str(at), sets, final)
            for number in range(final + 1, final + 4):
                if luck.random() < 0.5:
                    sets[number] = some(number)
                home.ask(FinalizeRequest(Round(number), sets[number]))
            final += 3
    view = home.session._fold.view_digest()
    assert (view, home.session._fold.state_digest()) == plain_view(tmp_path / "end", sets, final)
