"""Real nodes with privacy and data of their own: ε rises through a kill and a restart, and ends one's training."""

import json
import random
import signal
from pathlib import Path

import pytest

from atoll.protocols.run.sections.privacy import epsilon
from tests.e2e.test_given_start import one_digest

pytestmark = pytest.mark.swarm
MOST_USES = 6
AGREED = {"clip": 1.0, "noise": 1.0, "most": epsilon(MOST_USES, 1.0, 1e-5) * 1.001, "own_data": True}


def text(path: Path, size: int, seed: int) -> str:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    path.write_text(" ".join(rng.choices(words, k=size // 5))[:size])
    return str(path)


def spent(node) -> dict:
    """ε of a node, once it trains."""
    status = node.status()
    return (status or {}).get("privacy") or {"epsilon": 0.0, "uses": 0}


@pytest.mark.slow(
    slice=(
        "tests/node/worker/test_privacy.py::test_a_round_that_a_kill_cut_off_counts_and_counts_again, "
        "tests/node/worker/test_privacy.py::test_each_round_counts_and_a_restart_goes_on_from_there, "
        "tests/node/worker/test_privacy.py::test_no_round_goes_beyond_the_largest_epsilon"
    )
)
def test_epsilon_of_real_nodes_rises_and_never_falls_and_the_one_that_spent_it_rests(nodes, until, tmp_path: Path):
    owner, second, late = (nodes(name) for name in ("owner", "second", "late"))
    texts = [text(tmp_path / f"{name}.txt", size, size) for name, size in (("a", 150_000), ("b", 4_200))]
    keys = (f"privacy={json.dumps(AGREED)}", "pace.min_members=2", "inner.batch=8")
    run = owner.new_run("--data", texts[0], *(word for key in keys for word in ("--set", key)))
    shown = owner.atoll("run", "show", "tiny")
    assert "gradients of a sequence clipped to 1, and noise of 1 times that" in shown.out
    assert "a member that takes all steps reads 3,200 sequences" in shown.out
    assert "4.38 after 1, 17.9 after 10, 91.8 after 100 steps that use it" in shown.out
    owner.start("--run", "tiny").up()
    join = ("--run", str(run), "--seed", owner.seed(), "--data", texts[1])
    second.start(*join).up()
    seen = [0.0]

    def watch(uses: int) -> bool:
        """Whether the second node used a sequence so often; each look is compared with the one before."""
        now = spent(second)
        if now["uses"]:
            assert now["epsilon"] == pytest.approx(epsilon(now["uses"], 1.0, 1e-5))
            assert now["epsilon"] >= seen[-1], "it never falls"
            seen.append(now["epsilon"])
        return now["uses"] >= uses

    until("its data were used", lambda: watch(1))
    before = spent(second)["uses"]
    second.signal(signal.SIGKILL)
    second.process.wait()
    second.start(*join).up()
    until("it trains after the kill", lambda: watch(before + 1))
    second.stop()
    second.start(*join).up()
    until("and after a stop", lambda: watch(before + 2))
    until("its ε is spent", lambda: second.status() and "privacy: the next round" in second.status()["reason"])
    now = second.status()
    assert now["activity"] == "paused"
    assert now["privacy"]["spent"]
    assert now["privacy"]["uses"] <= MOST_USES
    assert now["privacy"]["epsilon"] <= now["privacy"]["most"]
    shown = second.atoll("status")
    assert f"for each sequence, used in {now['privacy']['uses']} steps at most; no round beyond" in shown.out
    assert ", so none any more" in shown.out
    late_text = text(tmp_path / "c.txt", 100_000, 3)
    late.start("--run", str(run), "--seed", owner.seed(), "--data", late_text).up()
    at = owner.final()
    until("the others go on without its work", lambda: min(n.final() for n in (owner, second, late)) >= at + 3)
    assert len(one_digest(owner, second, late)) >= 3
    assert spent(owner)["uses"] < now["privacy"]["uses"], "its text is longer"
    for node in (late, second, owner):
        node.stop()
