"""Control traffic over real gossip on virtual time: records reach all nodes, and are counted as they leave."""

from click.testing import CliRunner

from atoll.cli.sim.command import sim
from atoll.p2p.gossip.push_trees import Ids
from atoll_bench.scale import scale
from atoll_bench.simulator.clock import Clock
from atoll_bench.simulator.mesh import Mesh
from atoll_bench.simulator.traffic import Traffic, measure_traffic
from atoll_bench.simulator.world import peer_of


def test_a_run_among_followers_decides_rounds_and_all_nodes_get_all_records():
    one, again = (measure_traffic(24, 3, 1.5, 1)._replace(cpu_s=0.0) for _ in range(2))
    assert one == again, "not a function of the seed"
    assert one.finals >= 2
    assert one.lost == 0
    assert 1.9 <= one.copies <= 2.6
    assert 0.0 < one.p50_s <= one.p99_s < 2.0
    assert {"gossip.entry", "gossip.ids", "gossip.register", "ledger.sync", "ping", "registers.pull"} == {
        *one.sent_bytes
    }


def test_a_node_that_passes_nothing_on_is_seen_in_the_meter():
    """Two groups that one node joins: nothing gets through if it does not answer."""
    peers = [peer_of(number) for number in range(5)]
    got = []
    mesh = Mesh(Clock(), peers, 1, lambda number, item: got.append(number))
    for number, near in enumerate(([1, 2], [0, 2], [0, 1, 3, 4], [2, 4], [2, 3])):
        mesh.near[number] = [peers[other] for other in near]
    mesh.publish(0, "entry", b"first", "item")
    mesh._clock.run(10.0)
    assert sorted(got) == [1, 2, 3, 4]
    assert len(mesh.dissemination(0.0, 1.0)) == 1

    async def ignore(sender, message):
        return None

    mesh._nodes[2].handlers = dict.fromkeys(mesh._nodes[2].handlers, ignore)
    mesh.publish(0, "entry", b"second", "item")
    mesh._clock.run(20.0)
    assert sorted(got) == [1, 1, 2, 3, 4]
    assert mesh.lost(9.0, 11.0) == 1


def test_the_meter_counts_the_bytes_of_the_frames():
    peers = [peer_of(number) for number in range(2)]
    mesh = Mesh(Clock(), peers, 1, lambda number, item: None)
    mesh.send(0, peers[1], "gossip.ids", Ids(have=bytes(8)))
    # A kind byte, the length of the method, the method, then an array of three byte strings with their lengths.
    assert mesh.totals.sent_bytes["gossip.ids"] == 1 + 1 + len("gossip.ids") + 1 + (2 + 8) + 2 + 2
    assert mesh.totals.messages["gossip.ids"] == 1


def test_the_command_measures_one_swarm():
    outcome = CliRunner().invoke(sim, ["--virtual", "-n", "12", "--trainers", "2", "--minutes", "1.5"])
    assert outcome.exit_code == 0, outcome.output
    assert "12 nodes, 2 train" in outcome.output
    assert "(p99); 0 did not" in outcome.output


def traffic(nodes, trainers, factor=1.0, **changes):
    whole = Traffic(
        nodes, trainers, rounds=3, finals=4, records=10.0 * trainers, sent_bytes={"gossip.entry": 1e5 * factor},
        messages={"gossip.entry": 300.0 * factor}, p50_s=0.1, p99_s=0.2, lost=0, copies=2.0, cpu_s=1.0,
    )  # fmt: skip
    return whole._replace(**changes)


def judged(rows):
    return {row.metric: row.passed for row in rows if row.bar is not None}


def test_growth_beyond_the_bar_is_missed():
    small, large = traffic(100, 6), traffic(2000, 6, 1.29)
    assert all(judged(scale._grown(small, large)).values())
    assert [*judged(scale._grown(small, traffic(2000, 6, 1.31))).values()][:4] == [False] * 4
    assert not all(judged(scale._grown(small, traffic(2000, 6, lost=1))).values())
    assert not all(judged(scale._grown(small, traffic(2000, 6, finals=0))).values())


def test_where_all_train_traffic_is_judged_per_record():
    few, many = traffic(12, 12), traffic(24, 24, 2.0)
    assert [*judged(scale._all_train(few, many)).values()] == [True]
    assert [*judged(scale._all_train(few, traffic(24, 24, 2.7))).values()] == [False]
