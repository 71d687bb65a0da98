"""One of three members is killed, then one of two: presets' pace, and the others lose few round times by it."""

import signal
import statistics
import time

import pytest

pytestmark = pytest.mark.swarm

LIMIT_ROUNDS = 8.0
"""What a missing member may cost, in the longest of the rounds just before. The promise is three usual ones, which
`atoll bench leave` measures on a quiet machine; on a busy one some rounds are several times the median. Where the
missing one's lease is waited for, that is a minute."""
LOOK_S = 0.05


def gaps(node, until, rounds):
    """Seconds between the next so many changes of the node's round."""
    changed = []
    number = node.status()["round"]

    def look():
        nonlocal number
        status = node.status()
        if status is not None and status["round"] > number:
            number = status["round"]
            changed.append(time.monotonic())
        return len(changed) > rounds

    began = time.monotonic()
    until(f"{rounds} rounds", look)
    return [after - before for before, after in zip([began, *changed], changed, strict=False)]


@pytest.mark.slow(
    slice=(
        "tests/node/virtual/test_virtual_goodput.py::"
        "test_four_nodes_keep_most_of_their_goodput_at_a_kill_in_15_s, "
        "tests/swarm/test_sim.py::test_three_nodes_a_kill_and_a_late_joiner"
    )
)
def test_a_kill_costs_few_round_times(nodes, until, capsys):
    names = ("owner", "second", "third")
    owner, second, third = (nodes(name) for name in names)
    words = ("run", "new", "tiny", "--preset", "tiny", "--seed", "1", "--data", "synthetic:markov")
    assert owner.atoll(*words, "--set", "pace.min_members=3").code == 0
    owner.start("--run", "tiny").up()
    for node in (second, third):
        node.start("--run", str(owner.home.run_file("tiny")), "--seed", owner.seed()).up()
    until("rounds of all three are final", lambda: owner.final() >= 1)
    for left, victim in ((3, third), (2, second)):
        before = gaps(owner, until, 8)
        usual_s = statistics.median(before)
        victim.signal(signal.SIGKILL)
        worst_s = max(gaps(owner, until, 4))
        cost = (worst_s - usual_s) / usual_s
        with capsys.disabled():
            print(
                f"\n{left} members, one killed: rounds of {usual_s:.2f} s, at most {max(before):.2f} s; "
                f"the longest after it {worst_s:.2f} s: {cost:.2f} round times"
            )
        assert worst_s <= LIMIT_ROUNDS * max(before)
