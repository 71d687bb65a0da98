"""Thousands of made-up identities against real nodes of an open run, then an honest newcomer."""

import time

import pytest

from atoll.protocols.ids import RunId
from tests.e2e.conftest import stop_all
from tests.e2e.hostile_peer import beside_us
from tests.p2p.swarm.flooder import Flooder, fake_work

pytestmark = pytest.mark.swarm
FEW, MANY = 2_000, 10_000
"""Few are eight times the places of newcomers; `tests/node/virtual/test_virtual_flood.py` always brings many."""
IN_S = 60.0
SLOW = pytest.mark.slow(slice="tests/node/virtual/test_virtual_flood.py::test_a_newcomer_gets_into_a_flooded_run")


@pytest.mark.parametrize("made_up", [pytest.param(FEW, marks=SLOW), pytest.param(MANY, marks=pytest.mark.measure)])
def test_a_newcomer_gets_into_a_flooded_run(nodes, until, capsys, made_up):
    owner, second, newcomer = (nodes(name) for name in ("owner", "second", "newcomer"))
    run = owner.new_run("--data", "synthetic:markov", "--set", "pace.min_members=2")
    owner.start("--run", "tiny").up()
    second.start("--run", str(run), "--seed", owner.seed()).up()
    until("rounds are final", lambda: min(owner.final(), second.final()) >= 4)
    flood = Flooder(RunId(bytes.fromhex(owner.status()["run"])), made_up, [fake_work(owner.final() + 20)])
    with beside_us(flood.serve, [owner.seed(), second.seed()]):
        until("half of the flood is out", lambda: flood.sent >= made_up // 2, 300.0)
        first = owner.status()
        began = time.monotonic()
        newcomer.start("--run", str(run), "--seed", owner.seed()).up()
        up_s = time.monotonic() - began
        peer = newcomer.status()["peer"]
        until("it is in a final set", lambda: any(peer in r["contributors"] for r in owner.rows() if r["final"]))
        in_s = time.monotonic() - began
        until("the flood is out", lambda: flood.sent >= made_up, 300.0)
        last = owner.status()
    with capsys.disabled():
        print(
            f"\nup after {up_s:.1f} s, in a final set after {in_s:.1f} s; {last['final'] - first['final']} rounds"
        )
        print(first["ledger"], last["ledger"], sum(map(len, flood.entries)))
    assert in_s <= IN_S
    fakes = {author.peer_id for author in flood.authors}
    assert not any(fakes & {*row["contributors"]} for row in owner.rows())
    assert last["ledger"]["new"] <= last["ledger"]["places"]
    assert last["ledger"]["disk_bytes"] < 8 << 20, "most of it is SQLite's log, at most 4 MiB"
    assert "authors," in owner.atoll("status").out
    stop_all(owner, second, newcomer)
