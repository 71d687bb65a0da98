"""A rule of aggregation in whole sessions: equal sets give equal bits, and one liar does not decide."""

import msgspec
import pytest
import torch

from atoll.node.learning.compress.codecs import codec_of
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.coverage import cover_of, size_of
from atoll.protocols.local.worker_messages import CheckRequest, FinalizeRequest, FoldRequest, Member
from tests.node.worker.session_home import SPEC, Home, K, member

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 5)]


def spec_of(rule):
    outer = msgspec.structs.replace(SPEC.outer, aggregate=rule, floor_256=64)
    return msgspec.structs.replace(SPEC, outer=outer)


def lie_of(spec, path):
    """A legal payload, as large as one can be."""
    chunks = size_of(cover_of(spec, 0))
    values = torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(1))
    nothing = torch.zeros_like(values)
    raw = bytes(codec_of("sparse2", K).encode(values, nothing, nothing, 1.0))
    path.write_bytes(raw)
    return Member(digest(b"liar"), PEERS[3], 255, digest(raw), str(path))


@pytest.mark.parametrize("rule", ["clip", "nnm", "krum", "rfa", "cclip", "flag", "edit"])
def test_members_in_any_order_give_one_digest_for_views_checks_and_final_states(tmp_path, rule):
    spec = spec_of(rule)
    homes = [Home(tmp_path / str(at), peer, spec) for at, peer in enumerate(PEERS[:3])]
    for number in range(2):
        pending = [home.train(number).pending for home in homes]
        members = [member(each, peer) for each, peer in zip(pending, PEERS, strict=False)]
        seen = set()
        for at, home in enumerate(homes):
            mine = tuple(members[at:] + members[:at])
            # One home has the whole set at once, the others have a part of it first.
            if at:
                home.ask(FoldRequest(Round(number), mine[:at]))
            seen.add(home.ask(FoldRequest(Round(number), mine)).state)
            seen.add(home.ask(CheckRequest(Round(number), mine)).state)
        seen |= {home.ask(FinalizeRequest(Round(number), tuple(members))).state for home in homes}
        assert len(seen) == 1


def test_a_liar_that_would_end_the_run_moves_it_no_further_than_the_others(tmp_path):
    moved = {}
    for rule in (msgspec.UNSET, "clip", "nnm"):
        spec = spec_of(rule)
        homes = [Home(tmp_path / f"{rule}{at}", peer, spec) for at, peer in enumerate(PEERS[:3])]
        members = [member(home.train(0).pending, peer) for home, peer in zip(homes, PEERS, strict=False)]
        folds = homes[0].session._fold
        before = folds.view_C4096.double()
        lie = lie_of(spec, tmp_path / "lie")
        homes[0].ask(FoldRequest(Round(0), tuple(members)))
        honest = float((folds.view_C4096 - before).norm())
        homes[0].ask(FoldRequest(Round(0), (*members, lie)))
        moved[rule] = float((folds.view_C4096 - before).norm()) / honest
    assert moved[msgspec.UNSET] > 20
    assert moved["clip"] < 2
    assert moved["nnm"] < 2


def test_a_tie_is_broken_by_the_entries_and_not_by_their_order(tmp_path):
    """Four members who send nothing in common, at one length: all distances are equal, and krum takes three."""
    spec = spec_of("krum")
    chunks = size_of(cover_of(spec, 0))
    members = []
    for at, peer in enumerate(PEERS):
        values = torch.zeros((chunks, 4096))
        values[:, 64 * at : 64 * (at + 1)] = 1e-3
        nothing = torch.zeros_like(values)
        raw = bytes(codec_of("sparse2", K).encode(values, nothing, nothing, 1.0))
        path = tmp_path / str(at)
        path.write_bytes(raw)
        members.append(Member(digest(peer.encode()), peer, 64, digest(raw), str(path)))
    seen = set()
    for at in range(4):
        home = Home(tmp_path / f"home{at}", PEERS[0], spec)
        seen.add(home.ask(FoldRequest(Round(0), tuple(members[at:] + members[:at]))).state)
    assert len(seen) == 1
    assert seen != {Home(tmp_path / "none", PEERS[0], spec).session.started().state}


@pytest.mark.parametrize("rule", ["clip", "nnm"])
def test_a_run_has_votes_by_weight_only_with_the_key(tmp_path, rule):
    """One member, and three newcomers with less of the weight together, that send a hundredth."""
    plain = spec_of(rule)
    keyed = msgspec.structs.replace(plain, outer=msgspec.structs.replace(plain.outer, by_weight=True))
    chunks, members = size_of(cover_of(plain, 0)), []
    for at, peer in enumerate(PEERS):
        noise = torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(at))
        nothing = torch.zeros_like(noise)
        raw = bytes(codec_of("sparse2", K).encode(noise * (1e-5 if at else 1e-3), nothing, nothing, 1.0))
        (tmp_path / str(at)).write_bytes(raw)
        members.append(Member(digest(peer.encode()), peer, 16 if at else 64, digest(raw), str(tmp_path / str(at))))
    moved = []
    for name, spec in (("plain", plain), ("keyed", keyed)):
        home = Home(tmp_path / name, PEERS[0], spec)
        before = home.session._fold.view_C4096.double()
        home.ask(FoldRequest(Round(0), tuple(members)))
        moved.append(float((home.session._fold.view_C4096 - before).norm()))
    assert moved[1] > 50 * moved[0]
