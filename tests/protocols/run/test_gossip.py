"""Gossip in a RunSpec: earlier runs are what they were, it travels, and what it cannot go with is refused."""

import re

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.run.run_spec import Stage, open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.compression import CompressSpec
from atoll.protocols.run.sections.variants.gossip import MOST_BYTES, GossipSpec
from atoll.protocols.run.slices import ReduceSpec


@pytest.fixture
def gossiping(spec):
    """The run of the tests with gossip."""
    outer = replace(
        spec.outer, stages=(Stage(0, 8),), overlap_steps=0, overlap_most=UNSET, fragments=1, holders=0,
        gossip=GossipSpec(),
    )  # fmt: skip
    compress = CompressSpec(codec="int8", k=4096, feedback=0.5)
    found = replace(spec, outer=outer, compress=compress, reduce=None)
    found.check()
    return found


def test_a_run_without_gossip_has_the_bytes_that_it_always_had(spec):
    assert b"gossip" not in codec.encode(spec)


def test_it_travels(gossiping, owner):
    assert open_run(sign_run(gossiping, owner)) == gossiping


REFUSED = [
    (
        {"reduce": ReduceSpec(), "compress": {"codec": "sparse2", "k": 64}},
        "outer.gossip and reduce cannot go together",
    ),
    ({"compress": {"codec": "sparse2", "k": 64}}, "outer.gossip and compress.codec cannot go together"),
    ({"compress": {"codec": "lookup2", "k": 64}}, "outer.gossip and compress.codec cannot go together"),
    (
        {"compress": {"feedback_rule": "econtrol", "feedback": 1.0}},
        "outer.gossip and compress.feedback_rule cannot go together",
    ),
    ({"outer": {"overlap_steps": 1}}, "outer.gossip and outer.overlap_steps cannot go together"),
    ({"outer": {"fragments": 2}}, "outer.gossip and outer.fragments cannot go together"),
    ({"outer": {"aggregate": "clip", "floor_256": 64}}, "outer.gossip and outer.aggregate cannot go together"),
    ({"audit": AuditSpec()}, "outer.gossip and audit cannot go together"),
    ({"pace": {"excise_rounds": 4}}, "outer.gossip and pace.excise_rounds cannot go together"),
    ({"outer": {"gossip": GossipSpec(steps=8)}}, "no round has a tick before its end, at step 8"),
    ({"outer": {"gossip": GossipSpec(last_256=0)}}, "else nobody pulls"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_what_it_cannot_go_with_is_refused_in_one_line(gossiping, changes, why):
    changed = {
        key: replace(getattr(gossiping, key), **change) if isinstance(change, dict) else change
        for key, change in changes.items()
    }
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        replace(gossiping, **changed).check()
    assert "\n" not in str(caught.value)


def test_zeroth_order_steps_are_refused(gossiping):
    inner = replace(gossiping.inner, optimizer="spsa", lr=1e-4, clip=4.0, weight_decay=0.0)
    compress = CompressSpec(codec="scalar", k=8, feedback=0.0)
    with pytest.raises(ConfigError, match=r"outer\.gossip and inner\.optimizer spsa cannot go together"):
        replace(gossiping, inner=inner, compress=compress).check()


def test_members_that_train_other_experts_are_refused(gossiping):
    model = replace(gossiping.model, ffn=128, ffn_slices=2)
    changed = replace(gossiping, model=model, outer=replace(gossiping.outer, holders=2))
    with pytest.raises(ConfigError, match=r"outer\.gossip and outer\.holders cannot go together"):
        changed.check()


def test_a_payload_that_two_daemons_cannot_hold_in_memory_is_refused(gossiping):
    model = replace(gossiping.model, vocab=1 << 17, dim=2048, heads=16, kv_heads=16, layers=2)
    with pytest.raises(ConfigError, match=f"a pull of .* above {MOST_BYTES}"):
        replace(gossiping, model=model).check()


@pytest.mark.parametrize("key", ["first_256", "last_256", "steps"])
@pytest.mark.parametrize("value", [-1, 1 << 17, 1.5, "1"])
def test_values_outside_their_range_are_refused(key, value):
    with pytest.raises(DecodeError):
        codec.decode(codec.encode({"steps": 1, "first_256": 0, "last_256": 1, key: value}), GossipSpec)
    assert msgspec.structs.fields(GossipSpec)
