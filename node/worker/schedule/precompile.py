"""Machine code for codecs and fold, before it is needed: `atoll node kernels`, and at the start of a worker.

The compiler takes about 20 s of CPU after an install. What the other members would wait for, the encoding of a
round, is compiled before a worker has started; the rest beside its first steps. Machine code that was made once is
only loaded, in a second.
"""

from collections.abc import Callable, Iterator
from threading import Event, Thread

import numpy as np
import torch

from atoll.node.learning.compress.codecs import Codec, codec_of
from atoll.node.learning.compress.folding import OuterStep, decode
from atoll.node.learning.outer.aggregation import Aggregation
from atoll.node.learning.outer.edit import shorten_step
from atoll.node.learning.outer.fixed import plus
from atoll.node.learning.outer.judging import RULES
from atoll.node.learning.outer.mixed_fold import fold_mixed
from atoll.node.learning.outer.rules.choice import rule_of
from atoll.node.learning.zeroth_order.directions import WALSH, perturb
from atoll.node.learning.zeroth_order.scalar_fold import ScalarStep, apply_scalars, write_scalars
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import DENSE_BLOCK, NUMBERS, SCALAR
from atoll.protocols.run.run_spec import MOMENTA, OuterSpec, RunSpec, Stage, Step
from atoll.protocols.run.sized_payload import CODEC

PART_COUNT = len(NUMBERS) * (4 + len(MOMENTA)) + 3 + len(MOMENTA)
"""Parts of all codecs: encoding, fold, aggregation, late work, rules; of SCALAR perturbations, fold, rules; of
CODEC a fold of several k."""


def warm(codec: Codec, report: Callable[[str], None] = lambda part: None) -> None:
    """Put one chunk through all functions of codec and fold; `report` is given the name of each part then."""
    for name in parts(codec, judges=True, mixes=codec.name == CODEC, rules=tuple(MOMENTA)):
        report(name)


def all_codecs() -> Iterator[Codec]:
    """Every codec, with the k that its machine code does not depend on."""
    return (codec_of(name, CHUNK if name in DENSE_BLOCK else 64) for name in (*NUMBERS, SCALAR))


def parts(codec: Codec, *, judges: bool, mixes: bool = False, rules: tuple[Step, ...]) -> Iterator[str]:
    """Compile part by part, the encoding first; the name of each when it is there.

    `judges`: also the fold with `outer.aggregate`; `mixes`: of members with another k each, in a run with
    `compress.sizes`; `rules`: of the outer step with momentum.
    """
    if codec.name == SCALAR:
        yield from _scalar_parts(codec, rules)
        return
    residual, anchor, local = torch.zeros((1, CHUNK)), torch.zeros((1, CHUNK)), torch.ones((1, CHUNK))
    payload = codec.encode(residual, anchor, local, 1.0)
    yield "encoding"
    codec.check(payload, 1)
    nothing = torch.zeros((1, CHUNK), dtype=torch.int32)
    theta = codec.apply_update(nothing, [1], [payload], OuterStep(256, 256))
    plus(theta, theta)
    plus(theta, theta, theta)
    yield "fold"
    if judges:
        judge = Aggregation(RULES["nnm"], 64, np.zeros(1, np.int32), [0], 0)
        codec.apply_update(nothing, [1], [payload], OuterStep(256, 256), judge=judge)
        shorten_step(torch.ones((1, CHUNK), dtype=torch.int32), nothing, judge.atom_C, 0)
        yield "aggregation"
    if mixes:
        fold_mixed(nothing, [(1, *decode(payload, codec.layout(1)))], 256, 0)
        yield "fold of another k"
    yield from _rule_parts(rules)
    codec.give_back(residual, payload)
    yield "late work"


def _rule_parts(rules: tuple[Step, ...]) -> Iterator[str]:
    nothing = torch.zeros((1, CHUNK), dtype=torch.int32)
    for name in rules:
        rule = rule_of(OuterSpec(rounds=1, stages=(Stage(0, 1),), alpha_256=256, floor_256=0, rule=name))
        assert rule is not None
        rule.step(torch.zeros((1 + MOMENTA[name], CHUNK), dtype=torch.int32), nothing, (Span(0, 1),))
        yield name


def _scalar_parts(codec: Codec, rules: tuple[Step, ...]) -> Iterator[str]:
    """As `parts`, of runs whose payloads are scalars: the perturbations first, which the first step waits for."""
    nothing, layout = torch.zeros((1, CHUNK), dtype=torch.int32), codec.layout(1)
    perturb(nothing.numpy(), 0, np.uint64(0), np.zeros(WALSH, np.float32), np.empty((1, CHUNK), np.float32))
    yield "perturbations"
    apply_scalars(nothing, [1], [bytes(write_scalars([1], layout))], [0], layout, ScalarStep(256, 1))
    plus(nothing, nothing, nothing)
    yield "fold"
    yield from _rule_parts(rules)


class KernelsBeside:
    """Compiles what a run needs: its encoding now, the rest in a thread. A function that is needed earlier waits.

    numba compiles one function at a time, and looks again whether it is there when its turn comes. So the thread
    and the worker never compile the same one twice.
    """

    def __init__(self, spec: RunSpec) -> None:
        codec, rule = codec_of(spec.compress.codec, spec.compress.k), str(spec.outer.rule)
        self._parts = parts(
            codec,
            judges=bool(spec.outer.aggregate),
            mixes=bool(spec.compress.sizes),
            rules=(rule,) if rule in MOMENTA and spec.outer.momenta else (),
        )
        next(self._parts)
        self._is_over = Event()
        # No daemon thread: the interpreter would end it in the midst of the compiler's C++, which aborts.
        self._thread = Thread(target=self._compile_rest, name="compiler", daemon=False)
        self._thread.start()

    def _compile_rest(self) -> None:
        while not self._is_over.is_set() and next(self._parts, ""):
            pass

    def wait(self) -> None:
        """Return when all is compiled."""
        self._thread.join()

    def end(self) -> None:
        """Begin no other part: a worker that stops must not wait for the compiler longer than for one function."""
        self._is_over.set()
