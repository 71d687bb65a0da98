"""What a node does with invites: keep one, open its feed with its permit, give others away."""

import msgspec
import pytest

from atoll.node.config.home import Home
from atoll.node.runs.invites import (
    ADDRESSES,
    SEED_PEERS,
    InviteOptions,
    check_admission,
    invite_text,
    load_invite,
    opening_entry,
    own_seeds,
    reach_rank,
    store_invite,
)
from atoll.node.runs.presets import preset
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import peer_id_of
from atoll.protocols.ledger.records import Solved
from atoll.protocols.run.admission import CLOCK_SKEW_S, AdmissionSpec, Rule, puzzle_refusal, refusal
from atoll.protocols.run.invite import read_invite
from atoll.protocols.run.run_spec import sign_run

OWNER, ANN, BEN = (Identity(bytes([number]) * 32) for number in range(3))
SPEC = preset("tiny", OWNER.peer_id, 1)
NOW = 1_800_000_000.0
SEEDS = [f"/ip4/9.9.9.9/tcp/4710/p2p/{OWNER.peer_id}"]


def run(mode: str, *members: Identity):
    listed = tuple(sorted(member.peer_id for member in members))
    return msgspec.structs.replace(SPEC, admission=AdmissionSpec(mode=mode, members=listed))


def test_a_restart_tries_other_numbers_for_the_puzzle():
    spec = msgspec.structs.replace(SPEC, admission=AdmissionSpec(mode="open", puzzle_bits=4))
    rule = Rule(spec.id, spec.owner, spec.admission)
    found = set()
    for _ in range(5):
        *_, solved = opening_entry(spec, ANN.peer_id, None)
        assert solved == codec.decode(codec.encode(solved), Solved), "a legal number"
        assert not puzzle_refusal(rule, ANN.peer_id, solved.nonce)
        found.add(solved.nonce)
    assert len(found) == 5
    assert next(opening_entry(spec, ANN.peer_id, None, 7)) == next(opening_entry(spec, ANN.peer_id, None, 7))


def test_kept_and_read_back(tmp_path):
    home = Home(tmp_path)
    assert load_invite(home, SPEC.id) is None
    link = invite_text(SPEC, OWNER, SEEDS, NOW)
    store_invite(home, SPEC.id, f" {link}\n")
    assert load_invite(home, SPEC.id) == read_invite(link)
    (home.run(SPEC.id) / "invite").write_bytes(b"\xff\x00")
    with pytest.raises(CorruptFault, match="not an invite"):
        load_invite(home, SPEC.id)


@pytest.mark.parametrize("mode", ["open", "allowlist", "invite"])
def test_the_opening_of_a_feed(mode):
    spec = run(mode, *([BEN] if mode != "open" else []))
    invite = read_invite(invite_text(run("invite", BEN) if mode == "invite" else spec, OWNER, SEEDS, NOW))
    assert not [*opening_entry(spec, OWNER.peer_id, invite)]
    assert not [*opening_entry(spec, BEN.peer_id, invite)]
    assert not [*opening_entry(spec, ANN.peer_id, None)]
    admit = next(opening_entry(spec, ANN.peer_id, invite), None)
    assert (admit is not None) == (mode == "invite")
    rule = Rule(spec.id, spec.owner, spec.admission)
    refused = refusal(rule, ANN.peer_id, admit.permit if admit else None, admit.proof if admit else b"")
    assert bool(refused) == (mode == "allowlist")


def test_admission_as_the_joiner_sees_it():
    spec = run("invite", BEN)
    invite = read_invite(invite_text(spec, OWNER, SEEDS, NOW, options=InviteOptions(expires_s=60)))
    for me in (ANN.peer_id, None):
        check_admission(spec, me, invite, NOW)
        with pytest.raises(ConfigError, match="the permit expired 1 h 0 m ago; ask for a new invite"):
            check_admission(spec, me, invite, NOW + 61 + CLOCK_SKEW_S)
        with pytest.raises(ConfigError, match="no permit came along"):
            check_admission(spec, me, None, NOW)
        with pytest.raises(ConfigError, match="is not on it"):
            check_admission(run("allowlist", BEN), me, invite, NOW)
        check_admission(SPEC, me, None, NOW)
    for spec in (run("invite", BEN), run("allowlist", BEN)):
        for me in (BEN.peer_id, OWNER.peer_id):
            check_admission(spec, me, None, NOW)


def test_a_permit_of_another_run_is_noticed():
    other = msgspec.structs.replace(run("invite"), seed=2)
    invite = read_invite(invite_text(other, OWNER, SEEDS, NOW))
    with pytest.raises(ConfigError, match="was not signed by the run's owner"):
        check_admission(run("invite"), ANN.peer_id, invite, NOW)


def test_an_embedded_run_is_left_out_when_it_is_too_large():
    small = sign_run(SPEC, OWNER)
    assert (
        read_invite(invite_text(SPEC, OWNER, SEEDS, NOW, options=InviteOptions(run_file=small))).run_file == small
    )
    assert (
        read_invite(invite_text(SPEC, OWNER, SEEDS, NOW, options=InviteOptions(run_file=bytes(2000)))).run_file
        == b""
    )


def test_what_no_link_can_say():
    for options in (InviteOptions(expires_s=-int(NOW)), InviteOptions(expires_s=1 << 50)):
        with pytest.raises(ConfigError, match="no invite can say this"):
            invite_text(SPEC, OWNER, SEEDS, NOW, options=options)


def test_own_addresses_best_first():
    public, home, loop = "/ip4/9.9.9.9/tcp/1", "/ip4/192.168.0.4/tcp/1", "/ip4/127.0.0.1/tcp/1"
    relayed = f"/ip4/8.8.8.8/tcp/1/p2p/{ANN.peer_id}/p2p-circuit"
    me = OWNER.peer_id

    def seeds(*addresses: str) -> list[str]:
        return [seed.removesuffix(f"/p2p/{me}") for seed in own_seeds(addresses, me)]

    assert seeds(loop, home, relayed, public, "/ip6/2606:4700::1/udp/1/quic-v1") == [
        public, "/ip6/2606:4700::1/udp/1/quic-v1", relayed,
    ]  # fmt: skip
    assert seeds(home, relayed) == [relayed]
    assert seeds(loop, home, home) == [home]
    assert seeds(loop) == [loop]
    assert seeds() == []
    assert [reach_rank(one) for one in (public, relayed, home, loop, "/dns4/a.example.org/tcp/1")] == [
        0,
        1,
        2,
        3,
        0,
    ]
    assert len(own_seeds([f"/ip4/9.9.9.{n}/tcp/1" for n in range(9)], me)) == ADDRESSES


def test_other_seeds_of_other_peers():
    others = [f"/ip4/9.9.9.9/tcp/1/p2p/{peer_id_of(bytes([n]) * 32)}" for n in range(9)]
    doubled = [others[1], others[1].replace("/1/", "/2/"), *others[2:]]
    chosen = own_seeds(["/ip4/9.9.9.9/tcp/1"], OWNER.peer_id, [*SEEDS, *doubled])
    assert (
        chosen == [f"/ip4/9.9.9.9/tcp/1/p2p/{OWNER.peer_id}", others[1], *others[2 : SEED_PEERS + 1]][:SEED_PEERS]
    )
