"""Members leave for good, with real nodes: the others go on, and who comes back works with them again."""

import signal
import time

import pytest

pytestmark = pytest.mark.swarm
LEASE_S, LONG_LEASE_S = 15.0, 60.0
"""While the first one lasts a command says who is missing; the other one is longer than a few rounds anywhere."""


def members(nodes, until, count, lease_s):
    names = ("owner", "second", "third")[:count]
    owner, *others = (nodes(name) for name in names)
    pace = ("--set", f"pace.min_members={count}", "--set", f"pace.lease_s={lease_s:.0f}")
    run = owner.new_run("--data", "synthetic:markov", *pace)
    owner.start("--run", "tiny").up()
    for node in others:
        node.start("--run", str(run), "--seed", owner.seed()).up()
    until("rounds of all are final", lambda: min(node.final() for node in (owner, *others)) >= 4)
    return owner, *others


def seconds_to(until, node, rounds, began=None):
    """Seconds since `began`, by default now, until so many more rounds are final."""
    began, wanted = began or time.monotonic(), node.final() + rounds
    until(f"round {wanted} is final", lambda: node.final() >= wanted)
    return time.monotonic() - began


@pytest.mark.slow(
    slice=(
        "tests/node/virtual/test_virtual_epochs.py::test_the_others_go_on_when_members_leave_for_good, "
        "test_one_of_two_leaves_in_good_order_and_the_other_goes_on"
    )
)
def test_two_of_three_are_killed_for_good_and_the_third_goes_on(nodes, until, capsys):
    owner, second, third = members(nodes, until, 3, lease_s=LEASE_S)
    usual_s = seconds_to(until, second, 4) / 4
    killed = time.monotonic()
    for node in (owner, third):
        node.signal(signal.SIGKILL)
        node.wait()
    said = until(
        "the status says who is missing", lambda: "lacks 2 of 3 voters" in second.status()["trouble"] or None
    )
    assert said
    assert second.atoll("status", "--exit-code").code == 4
    took_s = seconds_to(until, second, 1, killed)
    with capsys.disabled():
        print(
            f"\n2 of 3 killed: rounds of {usual_s:.2f} s, lease {LEASE_S:.0f} s, "
            f"the next final round after {took_s:.2f} s"
        )
    second.goes_on(rounds=4)
    assert second.atoll("status", "--exit-code").code == 0
    assert second.atoll("pause").code == 0
    third.start("--run", "tiny", "--seed", second.seed()).up()
    until("who came back is where the other is", lambda: abs(third.final() - second.final()) <= 2 < third.final())
    assert second.atoll("resume").code == 0
    third.goes_on(rounds=3)
    second.stop()
    third.goes_on(rounds=3)
    third.stop()


def test_one_of_two_leaves_in_good_order_and_the_other_goes_on(nodes, until, capsys):
    owner, second = members(nodes, until, 2, lease_s=LONG_LEASE_S)
    usual_s = seconds_to(until, second, 4) / 4
    owner.stop()
    took_s = seconds_to(until, second, 1)
    with capsys.disabled():
        print(f"\n1 of 2 stopped: rounds of {usual_s:.2f} s, the next final round after {took_s:.2f} s")
    assert took_s < LONG_LEASE_S, "it waited for no lease"
    assert second.status()["members"] == 1, "who left is no member, although its lease lives"
    assert not any(row["member"] for row in second.peers())
    second.goes_on(rounds=4)
    second.stop()
