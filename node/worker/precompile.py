"""Machine code for codecs and fold, before it is needed: `python -m atoll.node.worker.precompile`.

A worker compiles its codec when it starts: the compiler takes half a minute, and in the middle of a round the
other members would wait for it. Machine code that was made once is only loaded, in a second.
"""

import sys
import time

import numpy as np
import torch

from atoll.node.learning.compress.codecs import Codec, codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.outer.aggregation import Aggregation
from atoll.node.learning.outer.edit import shorten_step
from atoll.node.learning.outer.fixed import plus
from atoll.node.learning.outer.judging import RULES
from atoll.node.learning.outer.rules.choice import rule_of
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import DENSE_BLOCK, NUMBERS
from atoll.protocols.run.run_spec import MOMENTA, OuterSpec, Stage


def warm(codec: Codec) -> None:
    """Put one chunk through all functions of a codec and of the fold, so that they are compiled."""
    residual, anchor, local = torch.zeros((1, CHUNK)), torch.zeros((1, CHUNK)), torch.ones((1, CHUNK))
    payload = codec.encode(residual, anchor, local, 1.0)
    codec.check(payload, 1)
    judge = Aggregation(RULES["nnm"], 64, np.zeros(1, np.int32), [0], 0)
    nothing = torch.zeros((1, CHUNK), dtype=torch.int32)
    theta = codec.apply_update(nothing, [1], [payload], OuterStep(256, 256), judge=judge)
    plus(theta, theta)
    plus(theta, theta, theta)
    shorten_step(torch.ones((1, CHUNK), dtype=torch.int32), nothing, judge.atom_C, 0)
    codec.give_back(residual, payload)
    for name, momenta in MOMENTA.items():
        rule = rule_of(OuterSpec(rounds=1, stages=(Stage(0, 1),), alpha_256=256, floor_256=0, rule=name))
        assert rule is not None
        rule.step(torch.zeros((1 + momenta, CHUNK), dtype=torch.int32), nothing, (Span(0, 1),))


def main() -> None:
    """Compile every codec and print how long it took."""
    began = time.monotonic()
    for name in NUMBERS:
        warm(codec_of(name, CHUNK if name in DENSE_BLOCK else 64))
    sys.stdout.write(f"codecs compiled in {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
