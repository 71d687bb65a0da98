"""The worker's books of time: every moment is booked once, and steps in vain are booked as such."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.worker.schedule.time_account import TimeAccount
from atoll.protocols.local.worker_messages import TimeSpent

DOING = ("start", "steps", "encode", "fold", "checkpoint", "evaluate", "audit", "wait")


class Clock:
    """Moves when told."""

    def __init__(self) -> None:
        self.ns = 5_000

    def __call__(self) -> int:
        return self.ns


def opened() -> tuple[Clock, TimeAccount]:
    clock = Clock()
    return clock, TimeAccount(clock)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**15), st.sampled_from([*DOING, "confirm_saved", "discard", "nest", "fail"])),
        max_size=40,
    )
)
def test_the_books_always_add_up_to_the_age_exactly(story):
    clock, ledger = opened()
    for gone_ns, what in story:
        clock.ns += gone_ns
        if what in ("confirm_saved", "discard"):
            getattr(ledger, what)()
        elif what in ("nest", "fail"):
            try:
                with ledger.within("checkpoint"):
                    clock.ns += gone_ns
                    if what == "fail":
                        raise OSError
            except OSError:
                pass
        else:
            ledger.enter(what)
        found = ledger.read()
        assert found.age_ns == clock.ns - 5_000
        assert 0 <= found.unsaved_ns <= found.steps_ns


def test_each_moment_goes_to_what_is_done_then():
    clock, ledger = opened()
    clock.ns += 10
    ledger.enter("wait")
    clock.ns += 200
    ledger.enter("steps")
    clock.ns += 3_000
    with ledger.within("encode"):
        clock.ns += 40_000
        with ledger.within("checkpoint"):
            clock.ns += 500_000
        clock.ns += 20_000
    clock.ns += 1_000
    ledger.begin_save()
    ledger.confirm_saved()
    assert ledger.read() == TimeSpent(
        start_ns=10, wait_ns=200, steps_ns=4_000, encode_ns=60_000, checkpoint_ns=500_000, unsaved_ns=0
    )


def test_steps_that_are_thrown_away_are_recompute_and_saved_ones_are_safe():
    clock, ledger = opened()
    ledger.enter("steps")
    clock.ns += 100
    ledger.begin_save()
    ledger.confirm_saved()
    clock.ns += 7
    assert ledger.read().unsaved_ns == 7
    ledger.discard()
    clock.ns += 50
    ledger.enter("fold")
    ledger.discard()
    ledger.discard()
    clock.ns += 3
    found = ledger.read()
    assert (found.steps_ns, found.recompute_ns, found.fold_ns, found.unsaved_ns) == (100, 57, 3, 0)
