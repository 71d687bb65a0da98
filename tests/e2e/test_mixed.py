"""Two libp2p implementations in one swarm, started as users start them: they train to one digest."""

import pytest


@pytest.mark.swarm
def test_go_and_python_nodes_agree(nodes, until):
    go, python = nodes("go"), nodes("python")
    go.new_run()
    go.start().up()
    python.start(
        *("--run", str(go.home.run_file("tiny")), "--transport", "pylibp2p", "--seed", go.seed()),
    ).up()
    for node in (go, python):
        until("both are members", lambda node=node: node.status()["members"] == 2)
    go.goes_on(3)
    python.goes_on(3)

    def agreed():
        theirs = {
            row["round"]: row["digest"] for row in python.rows() if row["final"] and len(row["contributors"]) == 2
        }
        ours = {row["round"]: row["digest"] for row in go.rows() if row["final"] and row["round"] in theirs}
        common = [number for number in ours if theirs[number] == ours[number]]
        assert len(common) == len(ours)
        return len(common) >= 3

    until("three rounds of both have one digest on both", agreed)
    assert python.process is not None
    python.stop()
    go.stop()


@pytest.mark.swarm
def test_what_it_cannot_do_is_refused_at_the_start(node):
    node.new_run()
    refused = node.start_refused("--transport", "pylibp2p", "--port-map")
    refused.refused(78, "port_map", "use transport p2pd")
    refused = node.start_refused("--transport", "pylibp2p", "--dht")
    refused.refused(78, "dht")
