"""The pictures of the documentation are drawn from a report's own rows."""

import pytest

from tests.site.run_plots import SHARES, losses, write_pictures

pytest.importorskip("matplotlib")
PEERS = {"0": "a", "1": "b"}


def row(node, number, *, tokens=100, final=True, loss=None, authors=("a", "b")):
    times = {f"{share}_s": 1.0 for share in SHARES}
    peer = PEERS[str(node)]
    facts = {"node": node, "peer": peer, "round": number, "tokens": tokens, "final": final, "bytes_up": 1000}
    return {**times, **facts, "train_loss": loss, "contributors": authors}


REPORT = {
    "nodes": PEERS,
    "rounds": [
        {"round": 0, "nodes": [row(0, 0, loss=5.0), row(1, 0, loss=3.0)]},
        {"round": 1, "nodes": [row(0, 1), row(1, 1, authors=("a",))]},  # b's work is in no set that it saw
        {"round": 2, "nodes": [row(0, 2, loss=3.5), row(1, 2, final=False)]},
    ],
}


def test_tokens_are_those_of_contributions_in_final_sets_and_bytes_of_all_nodes():
    assert losses(REPORT) == [(0, 200, 2000, 4.0), (2, 400, 6000, 3.5)]


def test_the_same_report_gives_the_same_small_pictures(tmp_path):
    first = write_pictures(REPORT, tmp_path / "one")
    again = write_pictures(REPORT, tmp_path / "two")
    assert [path.name for path in first] == ["run-loss.svg", "run-rounds.svg"]
    for one, two in zip(first, again, strict=True):
        assert one.read_bytes() == two.read_bytes()
        assert b"node 1" in one.read_bytes() or one.name == "run-loss.svg"
