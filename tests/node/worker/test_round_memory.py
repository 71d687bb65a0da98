"""What a worker's session holds more after each round, once it keeps as many payloads of final rounds as it may.

Torch's arrays are the C library's and are not counted here: all of a round are equally large and used again.
"""

import gc
import tracemalloc

import pytest
from msgspec.structs import replace

from atoll.node.runs.capacity import open_rounds
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import FinalizeRequest, FoldRequest
from tests.node.worker.session_home import SPEC, Home, member

LONG = replace(SPEC, outer=replace(SPEC.outer, rounds=4000))
KEPT = 8
"""Payloads of final rounds that are kept here: so that few rounds fill the table."""
WARM, LAST = 40, 80
MOST_BYTES = 1500
"""Of a round; 400 to 800 are seen here, 160 in rounds 166 to 196. A payload that stays has more than 3,000."""


@pytest.fixture
def few_kept(monkeypatch):
    monkeypatch.setattr(open_rounds, "PAST_PAYLOADS", KEPT)


def test_a_round_leaves_hardly_anything_in_a_workers_memory(tmp_path, few_kept, capsys):
    home, held = Home(tmp_path, spec=LONG), dict[int, int]()
    tracemalloc.start()
    try:
        for number in range(LAST + 1):
            members = (member(home.train(number).pending),)
            home.ask(FoldRequest(Round(number), members))
            home.ask(FinalizeRequest(Round(number), members))
            if number in (WARM, LAST):
                gc.collect()
                held[number] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        home.session.close()
    per_round = (held[LAST] - held[WARM]) / (LAST - WARM)
    with capsys.disabled():
        print(f"\n{per_round:.0f} bytes of a round stay in a worker's memory")
    assert per_round < MOST_BYTES
