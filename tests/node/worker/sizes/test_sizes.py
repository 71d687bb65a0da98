"""A k for each tensor: payloads of parts against the definition, a table that follows from sets, a quadratic."""

from itertools import permutations
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from msgspec.structs import replace

from atoll.node.learning.compress.codecs import OnHost, codec_of
from atoll.node.learning.compress.folding import OuterStep, decode
from atoll.node.learning.outer.fold import round_set
from atoll.node.learning.outer.mean import outer_update
from atoll.node.worker.folding.fold_requests import fold_of
from atoll.node.worker.folding.set_update import SetUpdate
from atoll.node.worker.sizes.codec import SizedCodec
from atoll.node.worker.sizes.payload import SizedPayload, error_of, log_of
from atoll.node.worker.sizes.table import k_in_state
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.local.worker_messages import AdoptRequest, FinalizeRequest, Member, SnapshotRequest
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.sections.variants.sizes import SizesSpec
from atoll.protocols.run.sized_payload import part_bytes, part_layout, read_head, sized_layout, tensors_of
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member

torch.set_num_threads(1)
SIZES = SizesSpec(goal="bytes", every=2, ks=(16, 64, 256))
CHUNKS = arena_of(SPEC.model).chunks
TENSORS = tensors_of(SPEC.model)
GOLDEN = {
    "payload": "b8e99afb29d0d6601ea31b6cffcc95ef",
    "state": "d2b8863489368ded13d74a7964dc4c7cdad4567c93d46237d2e4f938bce8194c",
}
"""BLAKE3 of a measured payload; the state digest after four rounds. They change only with a new name."""


def spec_of(goal="bytes", k=64, feedback=1.0, **sizes):
    compress = replace(SPEC.compress, k=k, feedback=feedback, sizes=replace(SIZES, goal=goal, **sizes))
    outer = replace(SPEC.outer, floor_256=64)
    found = replace(SPEC, compress=compress, outer=outer)
    found.check()
    return found


def noise(seed, chunks=CHUNKS):
    """Tensors whose values are spread in another way each: some have all their length in few values."""
    values = torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(seed)) * 1e-3
    for tensor, span in enumerate(TENSORS if chunks == CHUNKS else ()):
        rows = values[span.start : span.stop]
        square = 1e6 * rows * rows
        for _ in range(tensor % 3):
            rows *= square
    return values.clamp(-0.1, 0.1)


class Sender:
    """One member: its e, and its payloads in files."""

    def __init__(self, spec, folder):
        self.spec, self.folder, self.error_C4096 = spec, folder, torch.zeros((CHUNKS, 4096))

    def send(self, number, delta_C4096, k_T=()):
        layout = replace(sized_layout(self.spec, number), chosen_T=k_T)
        made = SizedPayload(OnHost(), layout)
        nothing = torch.zeros_like(delta_C4096)
        for start in range(0, CHUNKS, 5):  # slabs end within tensors
            rows = slice(start, min(start + 5, CHUNKS))
            made.fill(start, self.error_C4096[rows], delta_C4096[rows], nothing[rows], self.spec.compress.feedback)
        return bytes(made.whole())

    def member(self, data, author="a", weight=64):
        blob = digest(data)
        path = self.folder / blob.hex()
        path.write_bytes(data)
        return Member(digest(author.encode(), data), PeerId(author), weight, blob, str(path))


def fold_for(spec):
    return fold_of(spec, SetUpdate(spec, None, 1))


def folded(codec, payloads, weights):
    theta = torch.arange((CHUNKS + 1) * 4096, dtype=torch.int32).view(-1, 4096)
    return theta, codec.apply_update(theta, weights, payloads, OuterStep(256, 64))


def test_the_fold_of_payloads_of_other_k_is_the_definition_tensor_by_tensor(tmp_path):
    spec = spec_of()
    layout, some = sized_layout(spec, 0), tuple(SIZES.ks[at % 3] for at in range(len(TENSORS)))
    choices = [(), some, tuple(min(k, 64) for k in some)]
    payloads = [
        Sender(spec, tmp_path).send(1, noise(at), k_T if at != 1 else ())
        for at, k_T in enumerate((choices[0], choices[0], choices[2]))
    ]
    codec, weights = SizedCodec(sized_layout(spec, 1)), [64, 128, 7]
    theta, out = folded(codec, payloads, weights)
    for tensor, span in enumerate(TENSORS):
        named = []
        for weight, data in zip(weights, payloads, strict=True):
            head = read_head(data, codec.sizes)
            part = data[head.offsets_T[tensor] : head.offsets_T[tensor + 1]]
            named.append((weight, *decode(part, part_layout(span.chunks, head.k_T[tensor]))))
        rows = slice(span.start, span.stop)
        assert torch.equal(out[rows], theta[rows] + outer_update(named, span.chunks, 256, 64))
    assert torch.equal(out[CHUNKS:], theta[CHUNKS:]), "the table is not theirs"
    assert layout.head_bytes - codec.sizes.head_bytes == 2 * len(TENSORS) * len(SIZES.ks)


def test_with_one_k_the_fold_has_the_bits_of_sparse2(tmp_path):
    spec, plain = spec_of(), codec_of("sparse2", 64)
    nothing = torch.zeros((CHUNKS, 4096))
    payloads = [Sender(spec, tmp_path).send(1, noise(at)) for at in range(3)]
    theta, out = folded(SizedCodec(sized_layout(spec, 1)), payloads, [64, 1, 9])
    wanted = [plain.encode(nothing.clone(), noise(at), nothing, 1.0) for at in range(3)]
    assert torch.equal(out[:CHUNKS], plain.apply_update(theta[:CHUNKS], [64, 1, 9], wanted, OuterStep(256, 64)))


def test_what_is_sent_and_what_is_left_add_up_and_a_missed_payload_returns_whole(tmp_path):
    spec, delta = spec_of(), noise(4)
    sender, k_T = Sender(spec, tmp_path), tuple(16 if at % 2 else 64 for at in range(len(TENSORS)))
    data = sender.send(1, delta, k_T)
    SizedCodec(sized_layout(spec, 1)).give_back(sender.error_C4096, data)
    assert torch.allclose(sender.error_C4096, delta, rtol=1e-5, atol=1e-9)
    assert read_head(data, sized_layout(spec, 1)).k_T == k_T


def test_a_fault_in_the_last_tensor_leaves_the_residual_as_it_was(tmp_path):
    spec = spec_of()
    data = bytearray(Sender(spec, tmp_path).send(1, noise(1)))
    head = read_head(data, sized_layout(spec, 1))
    data[head.offsets_T[-2] + 13] |= 0x40  # a scale above 1
    data[head.offsets_T[-2] + 12] |= 0xFF
    residual = torch.ones((CHUNKS, 4096))
    for call in (
        lambda codec: codec.check(bytes(data), CHUNKS),
        lambda codec: codec.give_back(residual, bytes(data)),
    ):
        with pytest.raises(DecodeError):
            call(SizedCodec(sized_layout(spec, 1)))
    assert bool((residual == 1).all())


def test_the_errors_are_what_the_codec_would_leave(tmp_path):
    spec, delta = spec_of(), noise(2)
    head = read_head(Sender(spec, tmp_path).send(0, delta), sized_layout(spec, 0))
    for span, errors_K in zip(TENSORS, head.errors_TK, strict=True):
        wanted = [error_of(delta[span.start : span.stop], k) for k in SIZES.ks]
        assert all(abs(said - log_of(error)) <= 1 for said, error in zip(errors_K, wanted, strict=True))


def rounds_of(spec, folder, count, size=2):
    """Members of `count` rounds, as they come from a run in which each trained alike."""
    fold, senders, sets = fold_for(spec), [Sender(spec, folder) for _ in range(size)], []
    for number in range(count):
        k_T = k_in_state(spec, fold.final_state_S4096)
        members = [
            each.member(each.send(number, noise(size * number + at), k_T), str(at))
            for at, each in enumerate(senders)
        ]
        sets.append(members)
        fold.prepare_final(round_set(number, members))()
    return fold, sets


@pytest.mark.parametrize("goal", ["bytes", "error"])
def test_the_table_is_in_the_state_and_a_payload_has_no_more_bytes(tmp_path, goal):
    spec = spec_of(goal)
    fold, sets = rounds_of(spec, tmp_path, 2)
    k_T = k_in_state(spec, fold.final_state_S4096)
    assert len(set(k_T)) > 1, "tensors of another spread have another k"
    uniform = sum(part_bytes(span.chunks, 64) for span in TENSORS)
    chosen = sum(part_bytes(span.chunks, k) for span, k in zip(TENSORS, k_T, strict=True))
    assert chosen < uniform if goal == "bytes" else chosen <= uniform
    assert {read_head(Path(one.path).read_bytes(), sized_layout(spec, 1)).k_T for one in sets[1]} == {k_T}


def test_the_golden_payload_and_trajectory(tmp_path):
    spec = spec_of(goal="error")
    fold, sets = rounds_of(spec, tmp_path, 4)
    found = {
        "payload": blake3(Path(sets[2][0].path).read_bytes()).hexdigest()[:32],
        "state": fold.state_digest().hex(),
    }
    assert found == GOLDEN


def test_state_and_table_depend_on_the_sets_and_not_on_when_they_came(tmp_path):
    """Sets grow, rounds come in any order and become final early or late; every second one makes a table."""
    spec = spec_of()
    wanted, sets = rounds_of(spec, tmp_path, 4)
    for order in permutations(range(3)):
        fold = fold_for(spec)
        for number in order:
            fold.prepare_round(round_set(number, sets[number][:1]))()
        for number in order[::-1]:
            fold.prepare_round(round_set(number, sets[number][::-1]))()
        for number in range(4):
            digest_of = fold.check(round_set(number, sets[number]))
            assert fold.prepare_final(round_set(number, sets[number]))() == digest_of
        assert fold.state_digest() == wanted.state_digest()


def table_of(spec, members):
    """What a set of round 0 makes of no table."""
    fold = fold_for(spec)
    fold.prepare_final(round_set(0, members))()
    return k_in_state(spec, fold.final_state_S4096)


@pytest.mark.parametrize("lie", [b"\xff", b"\x00"])
def test_one_member_that_lies_does_not_move_the_table(tmp_path, lie):
    spec, layout = spec_of(), sized_layout(spec_of(), 0)
    sender = Sender(spec, tmp_path)
    data = bytearray(sender.send(0, noise(0)))
    honest = [sender.member(bytes(data), author) for author in ("a", "b")]
    start = 8 + len(TENSORS)
    data[start : layout.head_bytes] = lie * (layout.head_bytes - start)
    wanted = table_of(spec, honest)
    assert len(set(wanted)) > 1
    assert table_of(spec, [*honest, sender.member(bytes(data), "liar")]) == wanted


def test_a_late_joiner_has_the_table_from_a_snapshot_and_sends_by_it(tmp_path):
    spec = spec_of(every=4)
    home, late = (Home(tmp_path / name, peer, spec) for name, peer in (("home", ME), ("late", OTHER)))
    home.ask(FinalizeRequest(Round(0), (member(home.train(0).pending),)))
    k_T = k_in_state(spec, home.session._fold.final_state_S4096)
    assert len(set(k_T)) > 1
    reply = home.ask(SnapshotRequest(str(tmp_path / "snapshot")))
    late.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    sent = Path(late.train(1).pending.path).read_bytes()
    assert read_head(sent, sized_layout(spec, 1)).k_T == k_T
    home.restart()
    assert k_in_state(spec, home.session._fold.final_state_S4096) == k_T


@pytest.mark.parametrize("goal", ["bytes", "error"])
def test_on_a_quadratic_theta_comes_to_the_mean_of_the_targets(tmp_path, goal):
    """Each member sends a fifth of the way to its own target; what is not sent stays in its e."""
    spec = spec_of(goal, k=1024, ks=(256, 1024, 4096), every=3)
    targets = [noise(at) for at in (1, 2)]
    senders = [Sender(spec, tmp_path) for _ in targets]
    fold, mean = fold_for(spec), sum(targets) / 2
    start = fold.view_C4096.float() * 2.0**-24
    for number in range(60):
        at = fold.view_C4096.float() * 2.0**-24
        k_T = k_in_state(spec, fold.final_state_S4096)
        sent = [each.send(number, (at - target) / 5, k_T) for each, target in zip(senders, targets, strict=True)]
        members = [senders[0].member(data, str(author)) for author, data in enumerate(sent)]
        fold.prepare_final(round_set(number, members))()
    arena_rows = slice(0, CHUNKS - 1)  # the last chunk has padding, which stays 0
    left = (fold.final_C4096.float() * 2.0**-24 - mean)[arena_rows].norm() / (start - mean)[arena_rows].norm()
    print(f"{goal}: {left:.4f} of the distance is left")
    assert left < 0.2
