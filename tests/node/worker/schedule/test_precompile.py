"""A worker that was warmed compiles nothing in the middle of a round."""

import sys
from threading import Event

import pytest
from msgspec.structs import replace
from numba.core.dispatcher import Dispatcher

from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.worker.schedule import precompile
from atoll.node.worker.schedule.precompile import KernelsBeside, parts, warm
from atoll.node.worker.session import Session
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    CheckRequest,
    FinalizeRequest,
    FoldRequest,
    OpenRequest,
    VerifyRequest,
)
from atoll.protocols.run.arena import CHUNK
from tests.node.worker.folding.test_reduction_work import Pair
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, K, member


def machine_code():
    """Compiled function -> the types that it was compiled for."""
    return {
        f"{name}.{key}": set(value.overloads)
        for name, module in list(sys.modules.items())
        if name.startswith("atoll.")
        for key, value in vars(module).items()
        if isinstance(value, Dispatcher)
    }


@pytest.mark.parametrize(
    ("codec", "k", "rule"), [("sparse2", 64, None), ("int8", CHUNK, None), ("int8", CHUNK, "edit")]
)
def test_rounds_need_no_compiler(tmp_path, codec, k, rule):
    warm(codec_of(codec, k))
    before = machine_code()
    assert sum(map(len, before.values())) >= 5
    compress = type(SPEC.compress)(codec=codec, k=k, feedback=0.95)
    # A limit of 1/256 shortens the step of each round.
    outer = replace(SPEC.outer, aggregate=rule, floor_256=64, step_most_256=1) if rule else SPEC.outer
    spec = replace(SPEC, compress=compress, outer=outer)
    node, other = (Home(tmp_path / name, peer, spec) for name, peer in (("a", ME), ("b", OTHER)))
    for number in range(2):
        ours, theirs = node.train(number).pending, other.train(number).pending
        node.ask(VerifyRequest(theirs.path, Round(number)))
        node.ask(FoldRequest(Round(number), (member(ours),)))
        node.ask(FoldRequest(Round(number), (member(ours), member(theirs, OTHER))))
        members = (member(theirs, OTHER),) if number else (member(ours), member(theirs, OTHER))
        node.ask(CheckRequest(Round(number), members))
        node.ask(FinalizeRequest(Round(number), members))
    node.session = Session(node.start, saves=TimeBudget(1.0))
    node.train(2)
    assert machine_code() == before


def test_reduced_rounds_need_no_compiler(tmp_path):
    warm(codec_of("sparse2", K))
    before = machine_code()
    pair = Pair(tmp_path)
    for number in range(2):
        pair.train(number)
        pair.mine.ask(FoldRequest(Round(number), (), pair.slices(pair.reduce(number, number - 1))))
    assert pair.mine.ask(OpenRequest(Round(1), 3)).opening
    assert machine_code() == before


def test_a_worker_starts_when_it_can_encode_and_compiles_only_what_its_run_has():
    names = list(parts(codec_of("sparse2", K), judges=False, rules=()))
    assert names == ["encoding", "fold", "late work"]
    assert list(parts(codec_of("sparse2", K), judges=True, rules=("slowmo",)))[2:4] == ["aggregation", "slowmo"]
    beside = KernelsBeside(SPEC)
    beside.wait()
    before = machine_code()
    warm(codec_of(SPEC.compress.codec, SPEC.compress.k))
    new = {name for name, types in machine_code().items() if types - before.get(name, set())}
    assert not {
        name for name in new if name.startswith("atoll.node.learning.compress.") and "measuring" not in name
    }


def test_a_worker_that_stops_waits_for_one_function_of_the_compiler_at_most(monkeypatch):
    reached, gate, began = Event(), Event(), []

    def slow_parts(*_, **__):
        yield "encoding"
        for name in ("fold", "late work"):
            began.append(name)
            reached.set()
            assert gate.wait(60)
            yield name

    monkeypatch.setattr(precompile, "parts", slow_parts)
    beside = KernelsBeside(SPEC)
    assert reached.wait(60)
    beside.end()
    gate.set()
    beside.wait()
    assert began == ["fold"]


def test_the_number_of_parts_is_known_before_they_are_compiled():
    told: list[str] = []
    for codec in precompile.all_codecs():
        warm(codec, told.append)
    assert len(told) == precompile.PART_COUNT
