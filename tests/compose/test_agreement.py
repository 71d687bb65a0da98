"""What counts as agreement in the container story: another digest or a missing round must show."""

from typing import Any

from tests.compose.agreement import agreed_rounds, disputed_rounds, newest_round


def row(number: int, digest: str, *, final: bool = True, by: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    return {"round": number, "digest": digest, "final": final, "contributors": list(by)}


def test_rounds_final_everywhere_with_one_digest_are_agreed():
    nodes = {"x": [row(0, "p"), row(1, "q")], "y": [row(1, "q"), row(0, "p")]}
    assert agreed_rounds(nodes) == {0: "p", 1: "q"}


def test_a_missing_an_open_and_another_digest_are_no_agreement():
    x = [row(0, "p"), row(1, "q"), row(2, "r")]
    y = [row(1, "q", final=False), row(2, "s")]
    assert agreed_rounds({"x": x, "y": y}) == {}


def test_a_node_that_does_not_answer_agrees_to_nothing():
    assert agreed_rounds({"x": [row(0, "p")], "y": []}) == {}
    assert agreed_rounds({}) == {}


def test_only_rounds_of_all_wanted_contributors_count():
    rows = [row(0, "p", by=("a",)), row(1, "q", by=("a", "b", "c"))]
    assert agreed_rounds({"x": rows}, by=("a", "b")) == {1: "q"}


def test_two_final_digests_are_a_dispute_and_an_open_one_is_not():
    nodes = {"x": [row(0, "p"), row(1, "q")], "y": [row(0, "z"), row(1, "z", final=False)]}
    assert disputed_rounds(nodes) == [0]


def test_newest_round_of_any_node():
    assert newest_round({"x": [row(0, "p")], "y": [row(4, "q", final=False)], "z": []}) == 4
    assert newest_round({}) == -1
