"""What leases say of a run to somebody who may join it: medians, and the owner's word on its end."""

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.cli.preview_lines import outlook_line
from atoll.node.daemon.telemetry.run_outlook import outlook_of, rate_now
from atoll.node.runs.presets import preset
from atoll.protocols.ids import Round, peer_id_of
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local.progress import RateNow
from atoll.protocols.run.learning_rate import learning_rate
from tests.node.learning.inner.test_inner import inner_spec

SPEC = preset("tiny", peer_id_of(bytes(range(32))), 1)
TOKENS = SPEC.steps(20) * SPEC.inner.batch * SPEC.model.context
LAST = SPEC.outer.rounds - 1
FORTY = 103
"""256ths of the 100 steps after the warm-up that are 40 whole ones."""


def lease(number: int, final: int, tokens_per_s: float = TOKENS / 2.0) -> Lease:
    return Lease("training", Round(number), final, b"", -1, tokens_per_s)


def members(*leases: Lease) -> dict:
    return {peer_id_of(bytes([number]) * 32): one for number, one in enumerate(leases, 1)}


def test_nobody_says_nothing():
    assert outlook_of(SPEC, {}) is None
    assert outlook_line(SPEC, None) == "unknown: no member was asked, or none answered"


def test_how_far_and_how_fast():
    seen = outlook_of(SPEC, members(lease(20, 18), lease(20, 18), lease(20, 17, 0.0)))
    assert (seen.members, seen.round, seen.final) == (3, 20, 18)
    assert seen.round_s == pytest.approx(2.0)
    assert seen.tokens_per_s == pytest.approx(TOKENS)
    left = f"{(SPEC.outer.rounds - 20) * 2 // 60} m {(SPEC.outer.rounds - 20) * 2 % 60:02d} s left"
    assert outlook_line(SPEC, seen) == (
        f"round 20, 3 members, 19 rounds are final; {TOKENS:.0f} tokens/s together, 2.0 s of steps a round, "
        f"at least {left}"
    )


def test_loss_and_pace_are_medians_of_those_who_say_them():
    leases = (
        replace(lease(20, 18), loss=loss, round_s=pace) for loss, pace in ((2.5, 4.0), (2.0, 5.0), (900.0, 1e6))
    )
    seen = outlook_of(SPEC, members(*leases, lease(20, 18)))
    assert (seen.loss, seen.pace_s) == (2.5, 5.0)
    left_s = (SPEC.outer.rounds - 20) * 5
    line = outlook_line(SPEC, seen)
    assert "19 rounds are final, training loss 2.500; " in line
    assert line.endswith(f" 5.0 s a round, about {left_s // 60} m {left_s % 60:02d} s left")


def test_who_is_paused_promises_no_time():
    paused = replace(lease(20, 18), activity="paused", round_s=4.0)
    alone = outlook_line(SPEC, outlook_of(SPEC, members(paused)))
    assert alone == "round 20, 1 member (nobody trains now), 19 rounds are final"
    both = outlook_of(SPEC, members(paused, replace(paused, activity="training")))
    assert both.tokens_per_s == TOKENS / 2.0, "of who trains"
    assert outlook_line(SPEC, both).startswith("round 20, 2 members (1 trains now), 19 rounds are final; ")


def test_without_a_speed_no_time_is_claimed():
    seen = outlook_of(SPEC, members(lease(3, -1, 0.0)))
    assert seen.round_s is None
    assert outlook_line(SPEC, seen) == "round 3, 1 member, 0 rounds are final"


@pytest.mark.parametrize(("owner", "complete"), [(None, False), (LAST - 1, False), (LAST, True)])
def test_a_run_is_complete_if_its_owner_says_so(owner, complete):
    """Anybody can make up members that say so, and keep newcomers away."""
    known = members(*[lease(LAST, LAST)] * 5)
    if owner is not None:
        known[SPEC.owner] = lease(LAST, owner)
    seen = outlook_of(SPEC, known)
    assert seen.is_complete(SPEC) is complete
    assert outlook_line(SPEC, seen).startswith("complete: its owner") is complete


def test_a_round_beyond_the_run_leaves_no_negative_time():
    assert outlook_line(SPEC, outlook_of(SPEC, members(lease(LAST + 50, 3)))).endswith("at least 0 ms left")


@pytest.mark.parametrize(
    ("decay_256", "step", "phase", "until"),
    [
        (UNSET, 9, "warm-up", 10),
        (UNSET, 10, "cosine", 110),
        (UNSET, 110, "at its least", None),
        (FORTY, 69, "stable", 70),
        (FORTY, 70, "decay", 110),
        (FORTY, 110, "at its least", None),
        (0, 10, "stable", None),
        (0, 200, "stable", None),
    ],
)
def test_the_part_of_the_schedule_at_a_step(decay_256, step, phase, until):
    spec = inner_spec(decay_256=decay_256)
    assert rate_now(spec, step) == RateNow(rate=learning_rate(spec, step), phase=phase, step=step, until=until)
    if step >= 30:  # the same step of a run that continues another one at its step 30
        later = rate_now(msgspec.structs.replace(spec, first_step=30), step - 30)
        assert (later.phase, later.rate, later.until) == (phase, learning_rate(spec, step), until and until - 30)
