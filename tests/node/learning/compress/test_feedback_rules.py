"""EControl and DGC beside the encoder: against the published formulas, on a quadratic, and golden payloads."""

import math

import pytest
import torch
from blake3 import blake3
from msgspec.structs import replace

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.feedback.choice import feedback_rule_of
from atoll.node.learning.compress.feedback.memory import Memory
from atoll.node.learning.outer.rules.choice import rule_of
from atoll.protocols.errors import CorruptFault
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.sections.compression import CompressSpec
from tests.node.worker.session_home import SPEC

torch.set_num_threads(1)
HOST = torch.device("cpu")
CHUNKS = arena_of(SPEC.model).chunks
WHOLE = Span(0, CHUNKS)
TRACKING = {"rule": "slowmo", "momentum_256": 192, "floor_256": 256}
CASES = {
    "econtrol": ({"feedback_rule": "econtrol"}, {}),
    "econtrol and slowmo": ({"feedback_rule": "econtrol"}, TRACKING),
    "dgc": ({"feedback_rule": "dgc"}, {}),
}
GOLDEN = {
    "econtrol": "4456fe02f97dce519c74ebdacf4b61a98e2d1de1ca703f27018f46a95444e615",
    "econtrol and slowmo": "f18e8d2acaa79a5840a695a6ffb26256378f24797e0c41887487190fe9ca2b52",
    "dgc": "5a97a98e9fa731a059e94090f5ad5c9e42f013e8943e2081eccd82ac9f0d4b4f",
}
"""BLAKE3 of the payloads of five rounds; changes only with a rule's arithmetic, which needs a new name."""


def spec_of(name, codec="sparse2", k=64, **more):
    compress, outer = CASES[name]
    made = CompressSpec(codec=codec, k=k, feedback=1.0, **compress)
    found = replace(SPEC, compress=made, outer=replace(SPEC.outer, **{**outer, **more}))
    found.check()
    return found


class Sender:
    """One member: its e, its rule, and its payloads."""

    def __init__(self, spec):
        self.spec, self.codec = spec, codec_of(spec.compress.codec, spec.compress.k)
        self.rule = feedback_rule_of(spec, HOST)
        self.error_C4096 = torch.zeros((CHUNKS, 4096))

    @property
    def memory_C4096(self):
        return self.rule.memory.values_C4096

    def send(self, number, delta_C4096):
        """The payload of a round, and its values."""
        payloads = []

        def encode(wanted):
            nothing = torch.zeros_like(wanted)
            payloads.append(self.codec.encode(wanted, nothing, nothing, 1.0))

        self.rule.send(number, WHOLE, self.error_C4096, delta_C4096.clone(), encode)
        return payloads[0], self.values(payloads[0])

    def values(self, payload):
        found = torch.zeros((CHUNKS, 4096))
        self.codec.give_back(found, payload)
        return found


COMPRESS_OF_EF = CompressSpec(codec="sparse2", k=1024, feedback=1.0, feedback_rule="econtrol", control=1.0)
"""With η = 1 and no h it is error feedback."""


def noise(seed, scale=1e-3):
    return torch.randn((CHUNKS, 4096), generator=torch.Generator().manual_seed(seed)) * scale


def close(one, other):
    return torch.allclose(one, other.float(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("codec", ["sparse2", "sparse1", "int8", "e3m0"])
@pytest.mark.parametrize("name", ["econtrol", "econtrol and slowmo"])
def test_econtrol_is_the_published_algorithm_with_the_decay_of_the_fold(name, codec):
    """In float64, with what the codec sent of our own values."""
    sender = Sender(spec_of(name, codec, 64 if "sparse" in codec else 4096))
    beta = 192 / 256 if sender.rule.memory else 0
    e, h = (torch.zeros((CHUNKS, 4096), dtype=torch.float64) for _ in range(2))
    for number in range(5):
        delta = noise(number)
        _, c = sender.send(number, delta)
        h = beta * h + c
        e = e + delta - h
        assert close(sender.error_C4096, e)
        assert sender.rule.memory is None or close(sender.memory_C4096, h)


def test_what_econtrol_encodes_is_the_error_by_the_control_step_and_the_news():
    """One value that is much larger than the others is sent almost as it is: ηe + Δ − βh."""
    sender = Sender(spec_of("econtrol and slowmo", "int8", 4096))
    sender.error_C4096[0, 0], sender.memory_C4096[0, 0] = 0.5, 0.25
    sender.rule.memory.round_C[:] = 6
    delta = torch.zeros((CHUNKS, 4096))
    delta[0, 0] = 0.375
    _, c = sender.send(7, delta)
    assert c[0, 0] == pytest.approx(0.1 * 0.5 + 0.375 - 0.75 * 0.25, rel=1e-2)


def test_dgc_is_the_published_algorithm_with_the_quantisers_error_in_e():
    sender = Sender(spec_of("dgc"))
    u, v = (torch.zeros((CHUNKS, 4096), dtype=torch.float64) for _ in range(2))
    for number in range(5):
        delta = noise(number)
        _, c = sender.send(number, delta)
        u = 0.9 * u + delta
        v = v + u
        assert v.abs()[c == 0].max() <= v.abs()[c != 0].max()
        assert int((c != 0).sum()) == 64 * CHUNKS
        v, u = v - c, torch.where(c != 0, 0.0, u)
        assert close(sender.error_C4096, v)
        assert close(sender.memory_C4096, u)


def test_dgcs_bound_is_what_the_steps_of_a_round_can_move():
    spec = spec_of("dgc")
    rule = feedback_rule_of(spec, HOST)
    assert rule.most_norm(0, 400) == pytest.approx(spec.inner.lr * 2 * 20)
    longer = replace(spec, outer=replace(spec.outer, fragments=2), compress=replace(spec.compress, clip=0.5))
    assert feedback_rule_of(longer, HOST).most_norm(1, 400) == pytest.approx(spec.inner.lr * 2 * 20)
    assert feedback_rule_of(spec_of("econtrol"), HOST).most_norm(0, 400) == math.inf


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_golden_payloads(name):
    sender, seen = Sender(spec_of(name)), blake3()
    for number in range(5):
        seen.update(sender.send(number, pattern(number))[0])
    assert seen.hexdigest() == GOLDEN[name]


def pattern(salt):
    """Values without an order, from integers alone."""
    at = torch.arange(CHUNKS * 4096, dtype=torch.int64).view(CHUNKS, 4096)
    return (((at * 2654435761 + salt * 40503) % 65521) - 32760).float() * 2.0**-24


def distance(spec, targets, rounds=300):
    """From the mean of the targets, as a share of it. Δ is a tenth of a member's way; the fold is the run's."""
    senders, mean, step = [Sender(spec), Sender(spec)], sum(targets) / 2, rule_of(spec.outer)
    state = torch.zeros(((1 + spec.outer.momenta) * CHUNKS, 4096), dtype=torch.int32)
    for number in range(rounds):
        theta = state[:CHUNKS].float() * 2.0**-24
        sent = [one.send(number, (theta - target) * 0.1)[1] for one, target in zip(senders, targets, strict=True)]
        update = -((sent[0] + sent[1]) / 2).double() * 2**24
        if step is not None:
            state = step.step(state, state[:CHUNKS] + update.round().to(torch.int32), (WHOLE,))
        else:
            state = state + (update * spec.outer.alpha_256 / 256).round().to(torch.int32)
    return float((state[:CHUNKS].float() * 2.0**-24 - mean).norm() / mean.norm())


@pytest.mark.parametrize("name", sorted(CASES))
def test_on_a_quadratic_members_come_to_their_target_and_stay(name):
    spec = spec_of(name, k=1024, alpha_256=26 if name == "dgc" else 256)
    assert distance(spec, [noise(1, 0.1)] * 2, 900 if name == "dgc" else 300) < 1e-3


def test_where_members_want_other_things_econtrol_comes_to_their_mean_and_error_feedback_does_not():
    """The paper's claim. Without h, and with h that decays fast, something of each member's own target remains."""
    targets = [noise(1, 0.1), noise(2, 0.1)]
    plain = replace(spec_of("econtrol", k=1024), compress=COMPRESS_OF_EF)
    assert distance(spec_of("econtrol and slowmo", k=1024, momentum_256=255), targets) < 1e-3
    assert distance(spec_of("econtrol and slowmo", k=1024), targets) > 1e-2
    assert distance(plain, targets) > 3e-2


def test_the_momentum_of_the_fold_is_the_mean_of_what_members_keep():
    spec = spec_of("econtrol and slowmo")
    senders, step = [Sender(spec), Sender(spec)], rule_of(spec.outer)
    state = torch.zeros((2 * CHUNKS, 4096), dtype=torch.int32)
    for number in range(4):
        sent = [each.send(number, noise(10 * number + at))[1] for at, each in enumerate(senders)]
        update = -((sent[0] + sent[1]) / 2).double() * 2**24
        state = step.step(state, state[:CHUNKS] + update.round().to(torch.int32), (WHOLE,))
    kept = (senders[0].memory_C4096 + senders[1].memory_C4096).double() / 2 * 2**24
    assert float((state[CHUNKS:] - kept).abs().max()) < 8, "steps of 2⁻²⁴ that the fold rounds"


def applied(values, missed, beta=192 / 256):
    """What the fold moved by of one member's payloads {round: values}, up to the last of `missed` rounds."""
    total, v = torch.zeros((CHUNKS, 4096)), torch.zeros((CHUNKS, 4096))
    for number in range(missed):
        v = v * beta + values.get(number, 0)
        total += v
    return total


def test_what_was_trained_is_applied_or_in_the_error_also_after_rounds_that_were_missed():
    sender, trained, sent = Sender(spec_of("econtrol and slowmo")), torch.zeros((CHUNKS, 4096)), {}
    for number in (0, 1, 5, 6, 9):
        delta = noise(number)
        trained += delta
        _, sent[number] = sender.send(number, delta)
        assert torch.allclose(applied(sent, number + 1) + sender.error_C4096, trained, atol=1e-7)


@pytest.mark.parametrize(("name", "lost"), [("econtrol", 1), ("econtrol and slowmo", 1), ("dgc", 1)])
def test_a_payload_without_a_set_returns_as_if_it_had_not_been_sent(name, lost):
    sender, trained, sent = Sender(spec_of(name)), torch.zeros((CHUNKS, 4096)), {}
    for number in range(4):
        delta = noise(number)
        trained += delta
        _, sent[number] = sender.send(number, delta)
    back, values = sender.rule.returned(lost, CHUNKS), sent.pop(lost)
    sender.error_C4096 += values * back.to_error[:, None]
    if name == "dgc":
        assert bool((back.to_error == 1).all())
        return
    beta = 192 / 256 if sender.rule.memory else 0
    assert torch.allclose(applied(sent, 4, beta) + sender.error_C4096, trained, atol=1e-7)
    if sender.rule.memory:
        sender.memory_C4096.sub_(values * back.from_memory[:, None])
        h = torch.zeros((CHUNKS, 4096))
        for number in range(4):
            h = h * beta + sent.get(number, 0)
        assert torch.allclose(sender.memory_C4096, h, atol=1e-8)


def test_what_was_dropped_has_nothing_of_an_older_payload():
    sender = Sender(spec_of("econtrol and slowmo"))
    sender.send(0, noise(0))
    sender.rule.memory.drop()
    back = sender.rule.returned(0, CHUNKS)
    assert bool((back.to_error == 1).all())
    assert not back.from_memory.any()
    assert not sender.memory_C4096.any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.pop("memory/rounds"), "half"),
        (lambda found: found.update({"memory/rounds": torch.zeros(CHUNKS)}), "half"),
        (lambda found: found.update({"memory/values": torch.zeros((1, 4096))}), "another shape"),
        (lambda found: found.update({"memory/values": torch.full((CHUNKS, 4096), math.nan)}), "not finite"),
    ],
)
def test_a_memory_that_nobody_saved_is_refused(change, said):
    memory = Memory(CHUNKS, HOST)
    found = memory.tensors()
    memory.check(found)
    memory.check({})
    change(found)
    with pytest.raises(CorruptFault, match=said):
        memory.check(found)


def test_a_memory_is_loaded_as_it_was_saved():
    one, other = Memory(CHUNKS, HOST), Memory(CHUNKS, HOST)
    one.values_C4096[1], one.round_C[1] = 3.0, 7
    other.values_C4096[0] = 5.0
    other.load(one.tensors())
    assert torch.equal(other.values_C4096, one.values_C4096)
    assert torch.equal(other.round_C, one.round_C)
    other.load({})
    assert not other.values_C4096.any()
    assert int(other.round_C.max()) == -1
