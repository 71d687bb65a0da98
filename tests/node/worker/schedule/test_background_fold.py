"""Work beside the steps: one after the other, each commit before the next work."""

import threading

import pytest

from atoll.node.worker.schedule.background_fold import BackgroundFold
from atoll.protocols.errors import Divergence
from atoll.protocols.local.worker_messages import Answer, ReportReply, ReportRequest, RequestEnvelope
from tests.waiting import HANGS_S


def request(number: int) -> RequestEnvelope:
    return RequestEnvelope(number, ReportRequest())


def test_the_next_work_begins_after_the_commit_of_the_one_before():
    ended = threading.Semaphore(0)
    beside, seen = BackgroundFold(ended.release), list[str]()

    def work(name: str):
        seen.append(f"work {name}")

        def commit() -> Answer:
            seen.append(f"commit {name}")
            return ReportReply()

        return commit

    assert not beside.is_busy
    for number, name in enumerate("abc"):
        beside.add(request(number), lambda name=name: work(name))
    for number in range(3):
        assert beside.is_busy
        assert ended.acquire(timeout=HANGS_S)
        done = beside.next_result()
        assert done is not None
        assert done.request.id == number
        assert done.commit() == ReportReply()
        assert (beside.next_result() is None) or number == 2
    assert seen == ["work a", "commit a", "work b", "commit b", "work c", "commit c"]
    assert not beside.is_busy
    assert beside.next_result(wait=True) is None


def test_a_fault_of_the_work_is_raised_by_its_commit_and_stops_nothing():
    beside = BackgroundFold(lambda: None)

    def fault():
        raise Divergence("lost")

    beside.add(request(1), fault)
    beside.add(request(2), lambda: ReportReply)
    first = beside.next_result(wait=True)
    assert first is not None
    with pytest.raises(Divergence):
        first.commit()
    second = beside.next_result(wait=True)
    assert second is not None
    assert (second.request.id, second.commit()) == (2, ReportReply())


def test_what_is_not_done_is_not_taken_without_waiting():
    gate = threading.Event()
    beside = BackgroundFold(lambda: None)
    beside.add(request(1), lambda: (gate.wait(60), ReportReply)[1])
    assert beside.next_result() is None
    gate.set()
    done = beside.next_result(wait=True)
    assert done is not None
    assert done.commit() == ReportReply()
