"""Invites that a home gave out: found until they expire or are revoked, listed, used again by a node."""

import pytest

from atoll.node.config.home import Home
from atoll.node.runs.given_invites import (
    FORGOTTEN_S,
    ShownInvite,
    find_given,
    given_invites,
    revoke_given,
    store_given,
)
from atoll.node.runs.invites import EXPIRES_S, invite_text
from atoll.node.runs.presets import preset
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.identity import Identity
from atoll.protocols.run.invite import invite_id, read_invite, read_short, shorten

ME = Identity(bytes([8]) * 32)
SPEC = preset("tiny", ME.peer_id, 1)
SEEDS = [f"/ip4/203.0.113.7/tcp/4710/p2p/{ME.peer_id}"]
NOW = 1_900_000_000.0


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def given(home) -> str:
    """The long link of an invite that was given out."""
    link = invite_text(SPEC, ME, SEEDS, NOW)
    assert store_given(home, link, NOW) == shorten(link)
    return link


def found(home: Home, link: str, unix_s: float = NOW) -> str:
    return find_given(home, SPEC.id, invite_id(read_invite(link)), unix_s)


def test_an_invite_is_given_until_it_expires(home, given):
    assert found(home, given, NOW + EXPIRES_S - 1) == given
    assert found(home, given, NOW + EXPIRES_S) == ""
    assert find_given(home, SPEC.id, bytes(16), NOW) == ""


def test_a_revoked_invite_is_given_to_nobody(home, given):
    named = invite_id(read_invite(given)).hex()
    for wanted in ("", "zz", named + "0"):
        with pytest.raises(ConfigError, match="no invite of this home"):
            revoke_given(home, wanted)
    assert revoke_given(home, named[:4].upper()).is_revoked
    assert revoke_given(home, named).is_revoked, "again"
    assert found(home, given) == ""
    (row,) = given_invites(home)
    assert (row.id, row.is_revoked, row.made, row.link) == (named, True, int(NOW), given)


def test_a_prefix_of_several(home, given):
    for at in range(40):
        store_given(home, invite_text(SPEC, ME, SEEDS, NOW + at + 1), NOW)
    first = [row.id[0] for row in given_invites(home)]
    common = next(letter for letter in first if first.count(letter) > 1)
    with pytest.raises(ConfigError, match="invites of this home begin"):
        revoke_given(home, common)


def test_long_expired_invites_are_forgotten(home, given):
    later = NOW + EXPIRES_S + FORGOTTEN_S + 1
    store_given(home, invite_text(SPEC, ME, SEEDS, later), later)
    assert [row.made for row in given_invites(home)] == [int(later)]


def test_a_damaged_file_is_named(home, given):
    (row,) = given_invites(home)
    row.path.write_bytes(b"x")
    with pytest.raises(CorruptFault, match="not an invite; remove"):
        raise_with_hint(home)


def raise_with_hint(home: Home) -> None:
    try:
        given_invites(home)
    except CorruptFault as error:
        raise CorruptFault(error.line()) from error


def test_a_node_shows_one_invite_again(home):
    shown = ShownInvite(home, SPEC, ME)
    first = shown.link(SEEDS, NOW)
    assert read_short(first) is not None
    assert shown.link(SEEDS, NOW + 7200) == first
    assert ShownInvite(home, SPEC, ME).link(SEEDS, NOW + 7200) == first, "after a restart"
    assert len(given_invites(home)) == 1
    assert shown.link(SEEDS, NOW + EXPIRES_S / 2) != first
    revoke_given(home, given_invites(home)[1].id)
    assert ShownInvite(home, SPEC, ME).link(SEEDS, NOW + EXPIRES_S / 2 + 10) not in ("", first)


def test_without_a_disk_the_link_is_long(home):
    home.root.mkdir()
    home.runs.write_bytes(b"in the way")
    assert read_invite(ShownInvite(home, SPEC, ME).link(SEEDS, NOW)).run == SPEC.id
