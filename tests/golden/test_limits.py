"""By type, a float of a peer has a range and a list a length; bytes are decoded in one place, and capped."""

import ast
import math
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from tests.golden.__main__ import recorded
from tests.golden.messages import CASES
from tests.golden.reading import Place, inside, nodes, reads_sources, structs

PEERS = {name: case for name, case in CASES.items() if not case.is_local}
BYTES = {name: bytes.fromhex(text) for name, text in recorded("wires")["messages"].items()}
LARGEST = 2.0**40
"""No legal float of a peer is larger: Unix seconds, and tokens per second."""
FOREIGN_DECODERS = {
    "cli/node_commands/last_end.py": "the journal of this home's own node",
    "node/checkpoint/universal.py": "JSON with a cap, and without floats",
    "node/daemon/loggers/child.py": "events of this node's own daemon",
    "node/daemon/samples/sampler.py": "the answer of this node's own process, after its cap",
    "node/daemon/telemetry/log_ring.py": "this node's own log and journal",
    "node/daemon/telemetry/logfile.py": "this node's own log",
    "node/daemon/telemetry/round_log.py": "this node's own log",
    "node/daemon/telemetry/round_rows.py": "this node's own log",
    "node/learning/data/documents.py": "the user's own text",
    "node/serving/requests.py": "the local user's own requests, after the cap of a body",
    "p2p/membership/address_book.py": "this node's own cache",
    "protocols/codec.py": "the decoder of all messages",
    "protocols/local/control_lines.py": "the control socket, whose other end is the same user",
    "protocols/run/run_spec.py": "the version in front of a RunSpec, after its cap",
}
"""Modules that decode with msgspec themselves; everything else goes through `codec.decode`, which has a cap."""
BAD = (
    math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, -5e-324, sys.float_info.min / 2,
    -sys.float_info.min / 2, 2 * LARGEST, -2 * LARGEST, 1e300, -1e300, sys.float_info.max, -sys.float_info.max,
)  # fmt: skip
"""NaN, infinities, −0, subnormals and huge numbers: legal in no field."""


@cache
def typed_floats() -> dict[Place, inspect.FloatType]:
    """Every float in a peer's messages, by class and field."""
    kinds = (inspect.type_info(case.kind) for case in PEERS.values())
    return {at: info for kind in kinds for at, info in inside(kind) if isinstance(info, inspect.FloatType)}


def places(value: Any, at: Place = (), owner: Place = ()) -> Iterator[tuple[Place, Place]]:
    """Places of floats in a message: the keys that lead to one in its unpacked bytes, and its class and field."""
    if isinstance(value, float):
        yield at, owner
    elif isinstance(value, msgspec.Struct):
        config = type(value).__struct_config__
        for number, field in enumerate(msgspec.structs.fields(value)):
            found = getattr(value, field.name)
            if not (config.omit_defaults and found == field.default):
                key = number + (config.tag is not None) if config.array_like else field.encode_name
                yield from places(found, (*at, key), (type(value), field.name))
    elif isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from places(part, (*at, number), owner)


FLOATS = [(name, at, owner) for name, case in PEERS.items() for at, owner in places(case.value)]


def changed(name: str, at: Place, number: float) -> bytes:
    """The golden bytes of a message with another float at one place."""
    tree = msgpack.unpackb(BYTES[name], strict_map_key=False)
    inner = tree
    for key in at[:-1]:
        inner = inner[key]
    assert isinstance(inner[at[-1]], float)
    inner[at[-1]] = number
    return bytes(msgpack.packb(tree))


def is_accepted(name: str, at: Place, number: float) -> bool:
    try:
        codec.decode(changed(name, at, number), PEERS[name].kind)
    except DecodeError:
        return False
    return True


def test_every_float_of_a_peer_has_a_range() -> None:
    found = typed_floats()
    assert len(found) > 25
    wide = [
        at
        for at, real in found.items()
        if (real.ge is None and real.gt is None) or (real.le is None and real.lt is None)
    ]
    assert not wide, f"without a least and a largest value in the type: {wide}"
    bounds = [bound for real in found.values() for bound in (real.ge, real.gt, real.le, real.lt)]
    assert max(abs(bound) for bound in bounds if bound is not None) <= LARGEST


def test_the_examples_have_every_float() -> None:
    assert {owner for _, _, owner in FLOATS} == typed_floats().keys()


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_float_that_nobody_writes_is_refused_in_every_field(bad: float) -> None:
    accepted = [owner for name, at, owner in FLOATS if is_accepted(name, at, bad)]
    assert not accepted


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FLOATS), st.one_of(st.floats(), st.floats(-2, 2), st.floats(0, LARGEST)))
def test_a_float_is_accepted_in_its_range_only(place: tuple[str, Place, Place], number: float) -> None:
    name, at, owner = place
    real = typed_floats()[owner]
    low, high = real.gt if real.ge is None else real.ge, real.lt if real.le is None else real.le
    assert low is not None
    assert high is not None
    is_inside = low <= number <= high and number not in (real.gt, real.lt)
    is_plain = abs(number) >= sys.float_info.min or (number == 0 and math.copysign(1, number) > 0)
    assert is_accepted(name, at, number) == (is_inside and is_plain)


@reads_sources
def test_only_the_pipe_of_the_worker_takes_any_float() -> None:
    calls = [(path, node) for path, node in nodes() if isinstance(node, ast.Call)]
    users = [path for path, call in calls if any(word.arg == "any_float" for word in call.keywords)]
    assert users == ["node/ipc/framing.py", "node/ipc/worker_pipe.py"]
    kind, lost = CASES["worker: EvaluateReply"].kind, msgpack.packb(math.nan)
    data = BYTES["worker: EvaluateReply"].replace(msgpack.packb(1.75), lost)
    assert lost in data
    assert math.isnan(codec.decode(data, kind, any_float=True).answer.val_bpb)
    with pytest.raises(DecodeError):
        codec.decode(data, kind)


def test_nothing_in_a_message_is_untyped() -> None:
    untyped = inspect.AnyType | inspect.RawType | inspect.ExtType
    kinds = {name: inspect.type_info(case.kind) for name, case in CASES.items()}
    assert not [name for name, kind in kinds.items() if any(isinstance(each, untyped) for _, each in inside(kind))]


def test_every_list_of_a_peer_has_a_length() -> None:
    """An element of one byte takes fifty in memory, so a cap in bytes alone does not bound what a list takes."""
    many = inspect.VarTupleType | inspect.ListType | inspect.SetType | inspect.FrozenSetType | inspect.DictType
    kinds = [inspect.type_info(case.kind) for case in PEERS.values()]
    found = {at: each for kind in kinds for at, each in inside(kind) if isinstance(each, many)}
    assert len(found) > 15
    assert not [at for at, each in found.items() if each.max_length is None]


@reads_sources
def test_bytes_are_decoded_in_one_place() -> None:
    decoder = re.compile(r"msgspec\.(msgpack|json)\.(decode|Decoder)")
    # By the last word first: to write out each attribute of the sources takes seconds.
    last = ((path, node) for path, node in nodes() if getattr(node, "attr", "") in ("decode", "Decoder"))
    found = {path for path, node in last if decoder.fullmatch(ast.unparse(node))}
    assert found == FOREIGN_DECODERS.keys()


@pytest.mark.parametrize("name", PEERS)
def test_the_cap_comes_first(name: str) -> None:
    with pytest.raises(DecodeError, match="where at most"):
        codec.decode(BYTES[name], PEERS[name].kind, max_bytes=len(BYTES[name]) - 1)


@reads_sources
def test_calls_carry_structs_or_bytes() -> None:
    """A call that carries a plain tuple would be a message that no test here sees."""
    known = {"bytes", *(struct.partition(":")[2] for struct in structs())}
    carried = set()
    for _, node in nodes():
        method = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
        if method in ("register", "register_notice") and ast.unparse(node.func.value).endswith("calls"):
            carried |= {ast.unparse(kind) for kind in node.args[1 : 2 if method == "register_notice" else 3]}
    assert {"bytes", "Exchange"} <= carried <= known
