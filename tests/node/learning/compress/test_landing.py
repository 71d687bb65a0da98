"""A rule's step at the end of a fold: the bits of the step of Θ + U, made first, for every codec that has it."""

import pytest
import torch

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep, rows_of
from atoll.node.learning.outer.rules.choice import KERNELS
from atoll.node.learning.outer.rules.landing import landing_of
from atoll.node.learning.outer.rules.momentum import MomentumRule
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.ledger.coverage import Span, size_of
from atoll.protocols.run.run_spec import MOMENTA
from tests.node.learning.compress.test_covering import payload
from tests.node.learning.outer.conftest import pattern

CODECS = [("sparse2", 64), ("sparse2", 200), ("sparse1", 64), ("lookup2", 32)]
CHUNKS = 7
COVERS = {"whole": (Span(0, 7),), "some": (Span(1, 3), Span(4, 7))}
STEP = OuterStep(256, 64)


def rule_of(name, alpha=179, beta=230):
    more = (200, 1200) if name == "co2" else ()
    return MomentumRule(KERNELS[name], alpha, beta, momenta=MOMENTA[name], more=more)


def state_of(name, scale):
    return (torch.cat([pattern(CHUNKS, 1 + at) for at in range(1 + MOMENTA[name])]) * scale).to(torch.int32)


def both(codec, rule, state, members, cover, threads=1):
    """The state in one pass, and by Θ + U."""
    weights, payloads, rows = zip(*members, strict=True)
    landing = landing_of(rule, cover, CHUNKS)
    in_one = codec.apply_update(state, weights, payloads, STEP, rows=rows, landing=landing, threads=threads)
    theta = torch.cat([state[span.start : span.stop] for span in cover])
    return in_one, rule.step(state, codec.apply_update(theta, weights, payloads, STEP, rows=rows), cover)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cover", COVERS.values(), ids=COVERS)
@pytest.mark.parametrize(("codec", "k"), CODECS)
@pytest.mark.parametrize("name", sorted(MOMENTA))
@pytest.mark.parametrize(("scale", "sent"), [(2**24, 0.3), (2**18, 0.002)])  # of the second all values are small
def test_one_pass_has_the_bits_of_two(scale, sent, name, codec, k, cover, threads):
    codec, chunks = codec_of(codec, k), size_of(cover)
    first = (Span(cover[-1].start, cover[-1].start + 2),)  # whom a member covers that has two chunks alone
    members = [(weight, payload(codec, weight, chunks, sent), None) for weight in (3, 64, 255)]
    members.append((9, payload(codec, 1, 2, sent), rows_of(first, cover)))
    state = state_of(name, scale)
    before = state.clone()
    in_one, stepped = both(codec, rule_of(name), state, members, cover, threads)
    assert torch.equal(in_one, stepped)
    assert not torch.equal(in_one, state)
    assert torch.equal(state, before)


@pytest.mark.parametrize("momentum", [2**21 - 1, 2**21, -(2**21), -(2**21) - 1, 2**24])
@pytest.mark.parametrize("theta", [2**30 - 1, 2**30, -(2**30), -(2**30) - 1])
@pytest.mark.parametrize("name", sorted(MOMENTA))
def test_values_at_the_limits_of_the_loops_in_int32_have_the_bits_of_two(name, theta, momentum):
    """By turns of each sign, with β, α and 256/Λ of their largest values, which leave most."""
    codec, cover, state = codec_of("sparse2", 64), COVERS["whole"], state_of(name, 0)
    state[:CHUNKS], state[CHUNKS:, ::2], state[CHUNKS:, 1::2] = theta, momentum, -momentum
    rule = rule_of(name, 256, 256)
    rule = rule._replace(more=(256, 2**24)) if name == "co2" else rule
    in_one, stepped = both(codec, rule, state, [(64, payload(codec, 5, CHUNKS, 0.01), None)], cover)
    assert torch.equal(in_one, stepped)


FAR = {"theta + u": (2**31 - 9, 0), "step": (-(2**31) + 2**27, 2**30), "momentum": (0, -(2**31) + 9)}
"""What Θ and the momenta begin at, where something leaves int32: each by itself is refused."""


@pytest.mark.parametrize("alpha", [256, 1024])
@pytest.mark.parametrize("case", FAR)
@pytest.mark.parametrize("name", sorted(MOMENTA))
def test_what_leaves_the_range_is_divergence_in_one_pass_too(name, case, alpha):
    codec, cover = codec_of("sparse2", 64), COVERS["whole"]
    # Small moves where they are enough: only Θ tells the loops in int32 then.
    said, state = payload(codec, 5, CHUNKS, 0.5 if case == "momentum" else 0.01), state_of(name, 0)
    state[:CHUNKS], state[CHUNKS:] = FAR[case]
    rule = rule_of(name, alpha, 255)
    if name == "co2":
        rule = rule._replace(more=(256, 2**30))  # its momentum is clamped: only Θ can leave int32
    landing = landing_of(rule, cover, CHUNKS)

    def steps():
        moved = codec.apply_update(state[:CHUNKS], [64], [said], STEP)
        return rule.step(state, moved, cover)

    if (name, case, alpha) == ("co2", "momentum", 256):
        assert torch.equal(codec.apply_update(state, [64], [said], STEP, landing=landing), steps())
        return
    with pytest.raises(Divergence):
        steps()
    with pytest.raises(Divergence):
        codec.apply_update(state, [64], [said], STEP, landing=landing)


def test_an_illegal_payload_is_refused_and_the_state_stays():
    codec, rule = codec_of("sparse2", 64), rule_of("nesterov")
    bad = bytearray(payload(codec, 5, CHUNKS))
    bad[-16:] = bytes(16 * [255])  # all values of the last chunk are large: a second form
    state = state_of("nesterov", 2**20)
    before = state.clone()
    with pytest.raises(DecodeError):
        codec.apply_update(state, [64], [bytes(bad)], STEP, landing=landing_of(rule, COVERS["whole"], CHUNKS))
    assert torch.equal(state, before)
