"""A short link's invite from its node: on every transport; other answers are refused."""

import pytest

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.swarm.invite_fetch import fetch_invite, serve_invites
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, public_key_of
from atoll.protocols.run.invite import Seed, ShortInvite, invite_id, make_invite, read_invite
from atoll.protocols.wires import INVITE

ME = Identity(bytes([5]) * 32)
LINK, OTHER = [
    make_invite(ME, RunId(bytes([7]) * 32), (Seed(ME.public_key, ("/ip4/203.0.113.7/tcp/1",)),), at)
    for at in (9, 10)
]
ID = invite_id(read_invite(LINK))


def wanted(address: PeerAddress, named: bytes = ID) -> ShortInvite:
    return ShortInvite(named, public_key_of(address.peer), address.maddrs)


def giving(answer: str):
    asked = []

    async def find(named: bytes) -> str:
        asked.append(named)
        return answer

    return find, asked


def test_a_node_gives_the_invite_that_is_named(run_lab, dial):
    async def scenario(lab):
        find, asked = giving(LINK)
        asker, seed = await lab.host(), await lab.host(prepare=lambda host: serve_invites(host, find))
        assert await fetch_invite(asker, wanted(await dial(seed))) == LINK
        assert asked == [ID]
        serve_invites(seed, giving("")[0])
        assert await fetch_invite(asker, wanted(await dial(seed))) == "", "it has it no more"
        assert lab.faults == []

    run_lab(scenario)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (OTHER, DecodeError, "gave another invite"),
        (LINK[:-1], DecodeError, "cut off"),
        ("atoll:" + "a" * 20_000, PeerFault, "bytes"),
    ],
    ids=["another", "cut", "long"],
)
def test_other_answers_are_refused(run_memory, dial, answer, error, said):
    async def scenario(lab):
        asker, seed = await lab.host(), await lab.host()
        serve_invites(seed, giving(answer)[0])
        with pytest.raises(error, match=said):
            await fetch_invite(asker, wanted(await dial(seed)))

    run_memory(scenario)


@pytest.mark.parametrize("named", [b"", bytes(15)])
def test_an_id_has_its_length(run_memory, dial, named):
    async def scenario(lab):
        asker, seed = await lab.host(), await lab.host()
        find, asked = giving(LINK)
        serve_invites(seed, find)
        with pytest.raises(Unreachable):
            await fetch_invite(asker, wanted(await dial(seed), named))
        assert asked == []
        assert [type(fault) for _, fault in lab.faults] == [DecodeError]

    run_memory(scenario)


def test_a_node_that_never_answers(run_memory, dial):
    async def scenario(lab):
        asker, seed = await lab.host(), await lab.host()

        async def silent(stream) -> None:
            await stream.read_exactly(1 << 20)

        seed.set_handler(INVITE.protocol(), silent)
        with pytest.raises(Unreachable, match="no answer in 15 s"):
            await fetch_invite(asker, wanted(await dial(seed)))

    run_memory(scenario)
