"""`compress.sizes`: what it cannot go with is refused in one line; a head that nobody may send is refused."""

import struct

import msgspec
import pytest

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ledger.coverage import exchange_bytes, largest_payload, payload_size
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.compression import CompressSpec, WarmUp
from atoll.protocols.run.sections.variants.sizes import SizesSpec
from atoll.protocols.run.sized_payload import SizedLayout, part_bytes, read_head, sized_layout, write_head
from atoll.protocols.run.slices import ReduceSpec

SIZES = SizesSpec(goal="bytes")
LAYOUT = SizedLayout((3, 1, 2), (16, 64, 256), 64, True)
ERRORS = [[500, 400, 300]] * 3


def sized(spec, compress=None, outer=None, pace=None, **more):
    made = CompressSpec(**({"codec": "sparse2", "k": 64, "feedback": 0.95, "sizes": SIZES} | (compress or {})))
    return msgspec.structs.replace(
        spec,
        compress=made,
        outer=msgspec.structs.replace(spec.outer, **(outer or {})),
        pace=msgspec.structs.replace(spec.pace, **(pace or {})),
        **more,
    )


REFUSED = [
    ({"compress": {"codec": "sparse1"}}, "codec other than sparse2"),
    ({"compress": {"codec": "int8", "k": 4096}}, "codec other than sparse2"),
    ({"compress": {"codec": "lookup2"}}, "codec other than sparse2"),
    ({"compress": {"warmup": (WarmUp(4, 256),)}}, "compress.warmup"),
    ({"compress": {"k": 63}}, "compress.k is one"),
    ({"compress": {"sizes": SizesSpec(goal="error", ks=(64, 16))}}, "rising ks"),
    ({"compress": {"sizes": SizesSpec(goal="error", ks=(64, 64))}}, "rising ks"),
    ({"reduce": ReduceSpec()}, "reduce"),
    ({"audit": AuditSpec()}, "audit"),
    ({"outer": {"aggregate": "clip", "floor_256": 64}}, "outer.aggregate"),
    ({"outer": {"fragments": 2}}, "outer.fragments"),
    ({"outer": {"rule": "nesterov"}}, "outer.rule with momentum"),
    ({"pace": {"excise_rounds": 8}}, "pace.excise_rounds"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_sizes_cannot_go_with_is_refused_in_one_line(spec, owner, given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(sized(spec, **given), owner)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"goal": "loss"}, {"goal": "bytes", "every": 0}, {"goal": "bytes", "ks": [64]}])
def test_values_that_no_run_can_have_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, SizesSpec)


def test_a_run_with_sizes_opens_again_and_no_node_requests_more_than_one_k_has(spec, owner):
    run = sized(spec)
    assert open_run(sign_run(run, owner)) == run
    layout = sized_layout(run, 0)
    plain = payload_bytes("sparse2", sum(layout.chunks_T), 64)
    assert payload_size(run, 0) == largest_payload(run) == layout.most_bytes
    assert payload_size(run, 0) - payload_size(run, 1) == 2 * len(layout.chunks_T) * len(SIZES.ks)
    assert exchange_bytes(run) < 1.05 * plain + 1000


def payload(k_T=(16, 64, 64), layout=LAYOUT):
    parts = sum(part_bytes(chunks, k) for chunks, k in zip(layout.chunks_T, k_T, strict=True))
    return write_head(msgspec.structs.replace(layout, chosen_T=k_T), ERRORS) + bytes(parts)


def test_a_head_says_k_errors_and_where_each_tensor_begins():
    head = read_head(payload(), LAYOUT)
    assert head.k_T == (16, 64, 64)
    assert head.errors_TK == ((500, 400, 300),) * 3
    assert head.offsets_T[0] == 8 + 3 + 18
    assert head.offsets_T[-1] == len(payload())


def changed(at, byte):
    return payload()[:at] + bytes([byte]) + payload()[at + 1 :]


ILLEGAL = {
    "nothing": b"",
    "one byte less": payload()[:-1],
    "one byte more": payload() + b"\0",
    "the head alone": payload()[: LAYOUT.head_bytes],
    "more bytes than one k has": payload((256, 64, 64)),
    "another magic": changed(0, 0),
    "another version": changed(4, 2),
    "not measured": changed(5, 0),
    "more tensors": changed(6, 4),
    "a k that is not in the list": changed(8, 3),
    "another k": changed(8, 1),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_head_that_nobody_may_send_is_refused_before_a_part_is_read(name):
    with pytest.raises(DecodeError, match="payload"):
        read_head(ILLEGAL[name], LAYOUT)


def test_a_round_that_is_not_measured_has_no_errors():
    plain = msgspec.structs.replace(LAYOUT, is_measured=False)
    bare = write_head(plain) + bytes(sum(part_bytes(chunks, 64) for chunks in plain.chunks_T))
    assert read_head(bare, plain).errors_TK == ()
    for data, layout in ((bare, LAYOUT), (payload(), plain)):
        with pytest.raises(DecodeError, match="payload"):
            read_head(data, layout)


def test_the_golden_head():
    assert write_head(LAYOUT, ERRORS) == (
        b"atlk\x01\x01\x03\x00" + bytes([1, 1, 1]) + struct.pack("<9H", *[500, 400, 300] * 3)
    )


def test_a_run_without_sizes_has_the_bytes_that_it_had(spec):
    assert codec.encode(spec.compress) == codec.encode({"codec": "sparse2", "k": 64, "feedback": 0.95})
