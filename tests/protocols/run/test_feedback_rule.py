"""`compress.feedback_rule` and `compress.warmup`: what they cannot go with is refused; unset, run ids stay."""

import msgspec
import pytest

from atoll.node.runs.presets import continuation_of, fragmented
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.ledger.coverage import exchange_bytes, largest_payload, payload_size
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.compression import CompressSpec, WarmUp
from atoll.protocols.run.slices import ReduceSpec

SLOWMO = {"rule": "slowmo", "momentum_256": 192, "floor_256": 256}
DENSE = {"codec": "int8", "k": 4096}
RULES = ("econtrol", "dgc")
WARM = (WarmUp(4, 1024), WarmUp(8, 256))
UNEQUAL = [
    ({"least_256": 255}, "pace.least_256 below 256"),
    ({"most_256": 257}, "pace.most_256 above 256"),
    ({"probation": 32, "probation_256": 64}, "pace.probation_256"),
]
REFUSED = [
    *[({"feedback_rule": rule, "feedback": 0.95}, {}, {}, f"{rule} needs compress.feedback 1") for rule in RULES],
    *[
        ({"feedback_rule": rule}, {}, {"audit": AuditSpec()}, f"{rule} and audit cannot go together")
        for rule in RULES
    ],
    *[({"feedback_rule": rule}, {"rule": "nesterov"}, {}, f"{rule} and outer.rule nesterov") for rule in RULES],
    ({"feedback_rule": "dgc"}, SLOWMO, {}, "dgc and outer.rule slowmo cannot go together"),
    ({"feedback_rule": "dgc", **DENSE}, {"rule": "average"}, {}, "dgc needs a sparse codec"),
    ({"feedback_rule": "econtrol"}, SLOWMO | {"floor_256": 64}, {}, "needs outer.floor_256 256"),
    ({"feedback_rule": "econtrol"}, SLOWMO | {"aggregate": "clip"}, {}, "econtrol and outer.aggregate"),
    ({"feedback_rule": "econtrol"}, SLOWMO, {"reduce": ReduceSpec()}, "slowmo and reduce cannot go together"),
    *[
        ({"feedback_rule": "econtrol"}, SLOWMO, {"pace": pace}, f"outer.rule slowmo and {key}")
        for pace, key in UNEQUAL
    ],
    *[
        ({"feedback_rule": rule, "codec": "lookup2"}, {}, {}, f"lookup2 and compress.feedback_rule {rule}")
        for rule in RULES
    ],
    ({"codec": "lookup2", "k": 64}, {"rule": "average"}, {}, "average needs compress.codec int8 or e3m0"),
    ({"codec": "lookup2"}, {}, {"reduce": ReduceSpec()}, "reduce needs compress.codec sparse2"),
    ({"control": 0.5}, {}, {}, "compress.control is for runs with compress.feedback_rule econtrol"),
    ({"feedback_rule": "econtrol", "momentum": 0.5}, {}, {}, "compress.momentum is for runs with"),
    ({"feedback_rule": "econtrol", "clip": 1.0}, {}, {}, "compress.clip is for runs with"),
    ({"feedback_rule": "ef", "clip": 1.0}, {}, {}, "compress.clip is for runs with"),
    ({"feedback_rule": "ef21"}, {}, {}, "feedback_rule"),
    ({"feedback_rule": "dgc", "momentum": 1.0}, {}, {}, "momentum"),
    ({"warmup": WARM, **DENSE}, {}, {}, "compress.warmup is for sparse codecs"),
    ({"warmup": WARM[::-1]}, {}, {}, "rising rounds, and k that falls"),
    ({"warmup": (WarmUp(4, 64),)}, {}, {}, "rising rounds, and k that falls"),
    ({"warmup": (WarmUp(4, 256), WarmUp(8, 1024))}, {}, {}, "rising rounds, and k that falls"),
    ({"warmup": (WarmUp(4, 4097),)}, {}, {}, "compress.k = 4097 is outside"),
    ({"warmup": WARM}, {}, {"reduce": ReduceSpec()}, "reduce and compress.warmup cannot go together"),
    ({"warmup": WARM}, {}, {"audit": AuditSpec()}, "audit and compress.warmup cannot go together"),
]
LEGAL = [
    ({"codec": "lookup2", "feedback": 0.95}, {"floor_256": 1, "aggregate": "clip"}, {"audit": AuditSpec()}),
    ({"feedback_rule": "ef", "feedback": 0.95}, {}, {}),
    ({"feedback_rule": "econtrol", "control": 0.3}, {}, {"reduce": ReduceSpec()}),
    ({"feedback_rule": "econtrol", **DENSE}, {"rule": "average"}, {}),
    ({"feedback_rule": "econtrol"}, SLOWMO | {"fragments": 2, "overlap_steps": 1}, {}),
    ({"feedback_rule": "econtrol"}, SLOWMO, {"pace": {"probation": 32}}),  # it votes later, and weighs as others
    ({"feedback_rule": "econtrol"}, {}, {"pace": {"least_256": 64, "most_256": 512}}),
    ({"feedback_rule": "dgc", "momentum": 0.5, "clip": 2.0, "warmup": WARM}, {"fragments": 2}, {}),
    ({"feedback_rule": "dgc"}, {"aggregate": "clip"}, {}),
    ({"warmup": WARM, "feedback": 0.95}, {"rule": "nesterov"}, {}),
]


def changed(spec, compress, outer, more):
    if "pace" in more:
        more = more | {"pace": msgspec.structs.replace(spec.pace, **more["pace"])}
    found = CompressSpec(**({"codec": "sparse2", "k": 64, "feedback": 1.0} | compress))
    return msgspec.structs.replace(
        spec, compress=found, outer=msgspec.structs.replace(spec.outer, **outer), **more
    )


@pytest.mark.parametrize(("compress", "outer", "more", "said"), REFUSED)
def test_what_a_rule_cannot_work_with_is_refused_in_one_line(spec, owner, compress, outer, more, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(changed(spec, compress, outer, more), owner)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("compress", "outer", "more"), LEGAL)
def test_what_works_is_a_run_that_opens_again(spec, owner, compress, outer, more):
    run = changed(spec, compress, outer, more)
    assert open_run(sign_run(run, owner)) == run


def test_a_run_without_a_rule_has_the_bytes_that_it_had(spec):
    assert codec.encode(spec.compress) == codec.encode({"codec": "sparse2", "k": 64, "feedback": 0.95})
    assert spec.compress.memories(1) == 0


def test_a_warm_up_says_k_of_each_round_and_no_node_requests_more(spec):
    run = changed(spec, {"warmup": WARM}, {}, {})
    assert [run.compress.k_of(number) for number in (0, 3, 4, 7, 8, 1000)] == [1024, 1024, 256, 256, 64, 64]
    chunks = arena_of(run.model).chunks
    assert payload_size(run, 3) == payload_bytes("sparse2", chunks, 1024) == largest_payload(run)
    assert payload_size(run, 8) == payload_bytes("sparse2", chunks, 64) == exchange_bytes(run)


def test_a_warm_up_goes_on_where_a_checkpoint_was_and_takes_as_long_in_fragments(spec):
    run = changed(spec, {"warmup": WARM}, {}, {})
    assert continuation_of(run, 5).compress.stages == (WarmUp(3, 256),)
    assert continuation_of(run, 8).compress.warmup is msgspec.UNSET
    assert fragmented(run, 3).compress.stages == (WarmUp(12, 1024), WarmUp(24, 256))


def test_which_rules_keep_an_array(spec):
    for rule, momenta, arrays in [("ef", 1, 0), ("econtrol", 0, 0), ("econtrol", 1, 1), ("dgc", 0, 1)]:
        compress = CompressSpec(codec="sparse2", k=64, feedback=1.0, feedback_rule=rule)
        assert compress.memories(momenta) == arrays
