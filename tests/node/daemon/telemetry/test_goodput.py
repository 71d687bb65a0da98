"""The node's books of time: readings of many workers, split waits, lost steps, and the window."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.rounds.machine import begin
from atoll.node.daemon.rounds.participants import MemberView, RoundBook
from atoll.node.daemon.rounds.state import Phase, RoundConfig, RoundState
from atoll.node.daemon.telemetry.collector import UploadState, idle_reason
from atoll.node.daemon.telemetry.goodput import (
    SLICE_S,
    WINDOW_S,
    GoodputAccount,
    add,
    move_to_recompute,
    total_s,
)
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.local.control_messages import TimeShares
from atoll.protocols.local.time_spent import TimeSpent

S = 10**9


class Rig:
    """GoodputAccount with a worker whose every second is told; what `spend` heard."""

    def __init__(self) -> None:
        self.heard, self.lost_s = TimeShares(), 0.0
        self.books = GoodputAccount(100.0, self._spend)
        self.now, self.spent = 100.0, TimeSpent()

    def _spend(self, shares: TimeShares, lost_s: float) -> None:
        add(self.heard, shares)
        move_to_recompute([self.heard], lost_s)
        self.lost_s += lost_s

    def do(self, **seconds: float) -> "Rig":
        """Time goes by as the worker says."""
        news = {f"{name}_ns": getattr(self.spent, f"{name}_ns") + round(s * S) for name, s in seconds.items()}
        self.spent = msgspec.structs.replace(self.spent, **news)
        self.now += sum(value for name, value in seconds.items() if name != "unsaved")
        self.books.add_reading(self.spent, self.now)
        return self

    def die(self, down_s: float) -> "Rig":
        self.books.end_worker(self.now)
        self.now += down_s
        self.spent = TimeSpent()
        return self

    @property
    def total(self) -> TimeShares:
        return self.books.report(self.now).total

    @property
    def window(self) -> TimeShares:
        return self.books.report(self.now).window


def whole(shares: TimeShares) -> float:
    return sum(msgspec.structs.astuple(shares))


NAMES = ("start", "steps", "encode", "fold", "checkpoint", "evaluate", "wait")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(NAMES), st.integers(0, 200)),
            st.tuples(st.sampled_from(["die", "begin", "lose", "transfer", "idle", "busy"]), st.integers(0, 200)),
        ),
        max_size=60,
    )
)
def test_the_totals_add_up_to_the_wall_time_whatever_happens(story):
    rig = Rig()
    for what, seconds in story:
        if what == "die":
            rig.die(seconds)
        elif what == "begin":
            rig.die(0.0).books.add_reading(TimeSpent(), rig.now)
            rig.now += seconds
        elif what == "lose":
            unsaved_s = rig.spent.unsaved_ns / S
            rig.do(steps=-unsaved_s, recompute=unsaved_s, unsaved=-unsaved_s)
        elif what in ("transfer", "idle", "busy"):
            rig.books.set_idle_reason({"transfer": "transfer", "idle": "wait", "busy": None}[what], rig.now)
        elif what == "steps":
            rig.do(steps=seconds, unsaved=seconds)
        else:
            rig.do(**{what: seconds})
        for shares in (rig.total, rig.window):
            assert min(msgspec.structs.astuple(shares)) >= -1e-6
        assert whole(rig.total) == pytest.approx(rig.now - 100.0)
        assert whole(rig.window) == pytest.approx(rig.books.report(rig.now).window_s)
        assert rig.books.report(rig.now).window_s <= min(rig.now - 100.0, WINDOW_S + SLICE_S + 400.0) + 1e-6


def test_a_new_worker_goes_on_with_the_totals_and_the_time_without_one_is_down():
    rig = Rig()
    rig.now += 3.0
    assert rig.total.down_s == pytest.approx(3.0), "it has not begun"
    rig.do(start=2.0, steps=10.0).die(5.0)
    assert rig.total.down_s == pytest.approx(8.0), "while it is away, too"
    rig.do(start=1.0).do(wait=4.0)
    found = rig.total
    assert (found.start_s, found.steps_s, found.wait_s, found.down_s) == pytest.approx((3.0, 10.0, 4.0, 8.0))


def test_from_the_begin_of_the_process_to_its_first_word_it_starts():
    rig = Rig()
    rig.now += 3.0
    rig.books.add_reading(TimeSpent(), rig.now)
    rig.now += 4.0
    assert (rig.total.down_s, rig.total.start_s) == (3.0, 4.0)
    rig.do(start=2.0, wait=1.0)
    rig.now += 0.5
    assert (rig.total.down_s, rig.total.start_s, rig.total.wait_s) == (3.0, 6.0, 1.0)


def test_a_worker_that_dies_before_its_first_word_was_starting():
    rig = Rig()
    rig.books.add_reading(TimeSpent(), rig.now)
    rig.now += 4.0
    rig.die(2.0)
    assert (rig.total.start_s, rig.total.down_s) == (4.0, 2.0)


def test_the_unsaved_steps_of_a_dead_worker_are_recompute():
    rig = Rig().do(start=1.0, steps=20.0, unsaved=0.0).do(steps=6.0, unsaved=6.0).die(1.0)
    assert (rig.total.steps_s, rig.total.recompute_s) == pytest.approx((20.0, 6.0))
    assert (rig.heard.steps_s, rig.heard.recompute_s, rig.lost_s) == pytest.approx((20.0, 6.0, 6.0))


def test_superseded_steps_are_taken_back_from_where_they_were_booked():
    """They began before the window's last slices: no slice may hold less than nothing."""
    rig = Rig().do(start=1.0, steps=15.0)
    for _ in range(4):
        rig.do(steps=SLICE_S, unsaved=SLICE_S)
    rig.do(steps=-4 * SLICE_S, recompute=4 * SLICE_S, unsaved=-4 * SLICE_S).do(wait=2.0)
    for shares in (rig.total, rig.window):
        assert (shares.steps_s, shares.recompute_s, shares.wait_s) == pytest.approx((15.0, 4 * SLICE_S, 2.0))


def test_a_wait_is_split_by_what_was_seen_during_it():
    rig = Rig().do(start=1.0)
    rig.books.set_idle_reason("transfer", 101.0)
    rig.books.set_idle_reason("wait", 104.0)
    rig.books.set_idle_reason(None, 105.0)
    rig.books.set_idle_reason("wait", 115.0)
    rig.now = 111.0
    rig.do(wait=4.0)
    assert (rig.total.transfer_s, rig.total.wait_s) == pytest.approx((3.0, 1.0))


def test_without_a_look_in_between_the_last_one_counts():
    rig = Rig().do(start=1.0)
    rig.books.set_idle_reason("transfer", 101.0)
    rig.do(wait=2.0)
    assert (rig.total.transfer_s, rig.total.wait_s) == (2.0, 0.0)


def test_the_window_forgets_and_the_total_does_not():
    rig = Rig().do(start=50.0)
    for _ in range(200):
        rig.do(steps=9.0, fold=1.0)
    assert rig.total.start_s == 50.0
    assert rig.window.start_s == 0.0
    assert rig.window.steps_s / whole(rig.window) == pytest.approx(0.9)
    assert WINDOW_S - SLICE_S <= whole(rig.window) <= WINDOW_S + SLICE_S


def test_taking_back_says_what_it_did_not_find():
    parts = [TimeShares(steps_s=1.0), TimeShares(steps_s=2.0, recompute_s=1.0)]
    assert move_to_recompute(parts, 4.0) == 1.0
    assert [(part.steps_s, part.recompute_s) for part in parts] == [(0.0, 1.0), (0.0, 3.0)]
    assert sum(map(total_s, parts)) == 4.0


# --- what an idle worker waits for ------------------------------------------------------------------

ME, YOU = PeerId("me"), PeerId("you")


def state(phase: Phase, *, missing: int | None = None, alone: bool = False) -> RoundState:
    """At round 5, round 4 closed; a payload of round `missing` is not here."""
    entry = digest(b"e")
    books = {at: RoundBook({entry: YOU}, frozenset(() if at == missing else (entry,))) for at in (3, 5)}
    members = {} if alone else {YOU: MemberView("training", Round(5), 0.0)}
    return replace(
        begin(RoundConfig(ME, 50, 128, 256, 20.0)),
        phase=phase, round=5, closed=4, books=books, members=members,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "missing", "unsent", "found"),
    [
        (Phase.COLLECT, None, False, "wait"),
        (Phase.COLLECT, 5, False, "transfer"),
        (Phase.COLLECT, 3, False, "wait"),
        (Phase.COLLECT, None, True, "transfer"),
        (Phase.TRAIN, 5, False, "transfer"),
        (Phase.CATCH_UP, 3, False, "transfer"),
        (Phase.CATCH_UP, None, True, "wait"),
        (Phase.FOLD, 5, True, None),
        (Phase.GATHER, 5, True, "wait"),
        (Phase.PAUSED, 5, True, "wait"),
        (Phase.FULL, 5, True, "wait"),
        (Phase.DONE, 5, True, "wait"),
    ],
)
def test_what_an_idle_worker_waits_for(phase, missing, unsent, found):
    assert idle_reason(state(phase, missing=missing), unsent=unsent) == found


def test_alone_there_is_nobody_to_send_to():
    assert idle_reason(state(Phase.COLLECT, alone=True), unsent=True) == "wait"


def test_a_payload_is_sent_when_as_many_bytes_went_up_since_it_was_new():
    sending = UploadState()
    assert not sending.is_unsent(None, 0)
    assert not sending.is_unsent(None, 500), "a snapshot for a newcomer"
    assert sending.is_unsent((3, 1000), 700), "200 of them went up since the last look"
    assert not sending.is_unsent((3, 1000), 1500)
    assert sending.is_unsent((4, 1000), 1600)
    assert not sending.is_unsent((4, 1000), 9000)
