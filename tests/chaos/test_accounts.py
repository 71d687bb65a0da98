"""What became of the work of a partition: folded, returned, too old, or nowhere."""

import json
from functools import partial

import pytest

from atoll.cli.sim.homes import History
from atoll.node.checkpoint.local import LocalBody, PastPayload
from atoll.protocols.identity import Identity
from atoll.protocols.ids import digest
from atoll.protocols.ledger.records import Contribution, sign_entry
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.local.worker_messages import Pending
from atoll.protocols.run.arena import Span
from tests.chaos.accounts import Account, Change, account, loss_at, read_changes
from tests.node.worker.session_home import SPEC

AUTHOR, OTHER = Identity(digest(b"author")), Identity(digest(b"other"))
STATE, WHOLE = digest(b"state"), (Span(0, 4),)
TOKENS = 10
home = partial(
    History, "n0", SPEC, AUTHOR.peer_id, orphans=(), forked=frozenset(), damage="", whole=frozenset(), banned=(),
    lost_feedback=0,
)  # fmt: skip


def contributed(rounds):
    bodies = (Contribution(at, STATE, digest(bytes([at])), 1, TOKENS, 1, 1.0) for at in rounds)
    return tuple(sign_entry(SPEC.id, AUTHOR, seq, STATE if seq else b"", body) for seq, body in enumerate(bodies))


def saved(final, rows):
    """A saved state with these past payloads, and which of their rows counted."""
    past = (
        PastPayload(Pending(at, STATE, digest(bytes([at])), "", 1, TOKENS, 1, 1.0), counted)
        for at, counted in rows.items()
    )
    return LocalBody(SPEC.id, final, STATE, 1, (), past=tuple(past))


def sets(counted):
    """Final rows; `counted`: whether the author is in the set of each round."""
    names = {True: (AUTHOR.peer_id, OTHER.peer_id), False: (OTHER.peer_id,)}
    return tuple(
        RoundStatus(round=at, peer=AUTHOR.peer_id, final=True, contributors=names[here])
        for at, here in counted.items()
    )


def judged(counted, past, *, at_heal=None, moved=()):
    entries = contributed(counted)
    end = home(rows=sets(counted), entries=entries, saved=saved(max(counted), past))
    heal = [home(rows=(), entries=entries, saved=saved(max(counted), at_heal))] if at_heal else []
    return account([end], [end], heal, {AUTHOR.peer_id: moved}, range(min(counted), max(counted) + 1))


NOWHERE = "the contribution of n0 to round {} is nowhere"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # A node that stays in its chain: round 2 missed its set.
        (judged({1: True, 2: False}, {1: WHOLE, 2: ()}), (20, 10, 10, 0, ())),
        # The saved state at the heal still knew of it.
        (judged({1: True, 2: False, 3: True}, {3: WHOLE}, at_heal={2: ()}), (30, 20, 10, 0, ())),
        # It counts as sent, and no set has it.
        (judged({1: True, 2: False}, {1: WHOLE, 2: WHOLE}), (20, 10, 0, 0, (NOWHERE.format(2),))),
        (judged({1: True, 2: False}, {1: WHOLE}), (20, 10, 0, 0, (NOWHERE.format(2),))),
        # A node that left its chain at round 1: 1 is too old, 2 is only in the journal, 3 is in the saved state.
        (
            judged({1: False, 2: False, 3: False, 4: True}, {3: (), 4: WHOLE}, moved=[Change(1, 1)]),
            (40, 10, 20, 10, ()),
        ),
        # What the journal says is pending again and the saved state holds for sent is lost.
        (
            judged({1: False, 2: False, 3: False}, {2: (), 3: WHOLE}, moved=[Change(1, 1)]),
            (30, 0, 10, 10, (NOWHERE.format(3),)),
        ),
        # What returned before the fork returned in both chains. Its saved state may have forgotten it since.
        (
            judged({1: True, 2: False, 3: True}, {3: WHOLE}, at_heal={2: ()}, moved=[Change(3, 0)]),
            (30, 20, 10, 0, ()),
        ),
        # What it knew to be returned in the chain that it left says nothing about the other one.
        (
            judged({1: True, 2: False, 3: True}, {2: WHOLE, 3: WHOLE}, at_heal={2: ()}, moved=[Change(2, 0)]),
            (30, 20, 0, 0, (NOWHERE.format(2),)),
        ),
    ],
)
def test_each_contribution_is_in_one_place(found, expected):
    assert found == Account(*expected)


def test_only_the_rounds_asked_for_count():
    end = home(rows=sets({1: True, 2: True}), entries=contributed([1, 2]), saved=saved(2, {2: WHOLE}))
    assert account([end], [end], [], {}, range(2, 3)).line == (
        "of 10 tokens 10 folded, 0 in error feedback, 0 too old for it, 0 contributions lost"
    )


def test_changes_of_chain_are_read_from_the_journal(tmp_path):
    (tmp_path / "runs" / "r").mkdir(parents=True)
    events = [{"event": "final", "round": 1}, {"event": "chain_changed", "round": 2, "again": 64, "lost": 3}]
    (tmp_path / "runs" / "r" / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    assert read_changes(tmp_path) == [Change(2, 3)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({9: 3.0, 11: 1.0}, 2.0),
        ({8: 9.0, 10: 5.0, 11: 1.0}, 5.0),
        ({7: 5.0, 11: 1.0}, 2.0),
        ({11: 1.0}, None),
        ({9: 1.0}, None),
        ({}, None),
    ],
)
def test_a_loss_lies_on_the_line_between_the_nearest_rounds(losses, expected):
    assert loss_at(losses, 10) == expected
