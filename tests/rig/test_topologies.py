"""What is typed on the command line becomes the lab that it says; nonsense is refused with an example."""

import pytest

from atoll_lab.lab import Home, LabError, LinkSpec, Nat, Public
from tests.rig.topologies import bits_s, path_link, seconds, share, topology


def test_a_path_of_two_links_has_what_was_asked():
    link = path_link("100mbit/20mbit", "60ms", "4ms", "1%")
    assert (link.down_bits_s, link.up_bits_s) == (100e6, 20e6)
    assert link.delay_s * 4 == pytest.approx(0.06)
    assert link.jitter_s * 2 == pytest.approx(0.004)
    assert 1 - (1 - link.loss) ** 2 == pytest.approx(0.01)


def test_one_rate_holds_for_both_ways():
    link = path_link("2.5mbit", "0ms", "0ms", "0%")
    assert link.up_bits_s == link.down_bits_s == 2.5e6
    assert path_link(None, "0ms", "0ms", "0%") == LinkSpec()


def test_homes_have_a_seed_and_their_nats():
    link = LinkSpec(up_bits_s=1e6, delay_s=0.01)
    spec = topology("home-home", link, "cone,symmetric")
    assert spec.hosts == {
        "seed": Public(LinkSpec(delay_s=0.01)),
        "home1": Home(Nat.CONE, link),
        "home2": Home(Nat.SYMMETRIC, link),
    }
    assert list(topology("homes-12", link, "noudp").hosts)[-1] == "home12"


def test_public_counts_the_seed():
    assert topology("public-3", LinkSpec()).hosts == {name: Public() for name in ("seed", "public1", "public2")}


@pytest.mark.parametrize("name", ["", "home", "homes-0", "public-x", "homes-1000", "home-home-2"])
def test_unknown_topologies_are_refused(name: str):
    with pytest.raises(LabError, match="a topology is"):
        topology(name, LinkSpec())


@pytest.mark.parametrize("kinds", ["con", "", "cone,cone,cone", "cone,"])
def test_wrong_nats_are_refused(kinds: str):
    with pytest.raises(LabError, match="NAT"):
        topology("home-home", LinkSpec(), kinds)


@pytest.mark.parametrize(
    ("read", "text"), [(bits_s, "10"), (bits_s, "0mbit"), (seconds, "60"), (share, "101%"), (share, "1")]
)
def test_wrong_figures_are_refused(read, text: str):
    with pytest.raises(LabError, match="is like"):
        read(text)
