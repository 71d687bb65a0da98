"""Payloads of earlier rounds are recognised, changed a little or not; those of honest members never are."""

import msgspec
import numpy as np
import pytest
import torch

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.worker.audits import replays
from atoll.node.worker.audits.replays import LEAST, SAMPLED, SentPayloads
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Round, digest
from atoll.protocols.local.worker_messages import Member

CHUNKS = 192


class Rig:
    """What one auditor remembers, and payloads on disk."""

    def __init__(self, folder, codec="sparse2", k=64, chunks=CHUNKS, seed=1):
        self.folder, self.codec = folder, codec_of(codec, k)
        self.seen = SentPayloads(self.codec.layout(chunks), np.random.default_rng(seed))
        self.noise = torch.Generator().manual_seed(seed)
        self.shape = (chunks, 4096)

    def randn(self):
        return torch.randn(self.shape, generator=self.noise) * 1e-3

    def sent(self, values_C4096):
        nothing = torch.zeros(self.shape)
        return self.member(bytes(self.codec.encode(values_C4096.clone(), nothing, nothing, 1.0)))

    def member(self, payload):
        path = self.folder / digest(payload).hex()
        path.write_bytes(payload)
        return Member(b"", "peer", 64, digest(payload), str(path))


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_a_payload_of_an_earlier_round_is_found_at_any_scale_and_with_noise(rig):
    values = rig.randn()
    rig.seen.add(Round(3), rig.sent(values))
    for again in (values, values * 7, values + 0.2 * rig.randn(), values * 0.1 + 0.01 * rig.randn()):
        assert rig.seen.holds_like(rig.sent(again), Round(4))
    assert not rig.seen.holds_like(rig.sent(rig.randn()), Round(4))
    assert not rig.seen.holds_like(rig.sent(-values), Round(4)), "the same values the other way are no copy"
    assert not rig.seen.holds_like(rig.sent(values + rig.randn()), Round(4)), "half of this is noise"


def test_the_twin_of_a_contribution_is_another_of_the_round_that_is_like_it(rig):
    values = rig.randn()
    one, like, other = rig.sent(values), rig.sent(values * 2 + 0.1 * rig.randn()), rig.sent(rig.randn())
    one, like, other = (
        msgspec.structs.replace(each, entry=digest(bytes([at]))) for at, each in enumerate((one, like, other))
    )
    assert rig.seen.twin(one, (one, other, like)) == like
    assert rig.seen.twin(like, (one, other, like)) == one
    assert rig.seen.twin(other, (one, other, like)) is None
    same = msgspec.structs.replace(one, entry=digest(b"same bytes"))
    assert rig.seen.twin(one, (one, same)) == same


def test_only_earlier_rounds_count_and_of_equal_payloads_the_first(rig):
    one = rig.sent(rig.randn())
    rig.seen.add(Round(5), one)
    assert not rig.seen.holds_like(one, Round(5))
    rig.seen.add(Round(9), one)
    assert rig.seen.holds_like(one, Round(6))


@pytest.mark.parametrize("decay", [0.5, 0.95])
@pytest.mark.parametrize("law", ["normal", "equal", "uniform"])
def test_a_member_with_the_same_data_in_each_round_repeats_nothing(tmp_path, law, decay):
    """Nine tenths of the update's length are the same in all rounds; members of one round share a fourth."""
    rig, residual, found = Rig(tmp_path, chunks=16), torch.zeros((16, 4096)), []
    same = {"normal": rig.randn(), "equal": rig.randn().sign() * 1e-3, "uniform": torch.rand(16, 4096) * 1e-3}[law]
    for number in range(12):
        payload = rig.codec.encode(residual, torch.zeros(16, 4096), -same - 0.5 * rig.randn(), decay)
        member = rig.member(bytes(payload))
        found.append(rig.seen.holds_like(member, Round(number)))
        rig.seen.add(Round(number), member)
    assert not any(found)


def test_members_with_much_in_common_are_not_taken_for_each_other(rig):
    common = rig.randn()
    rig.seen.add(Round(0), *(rig.sent(common + rig.randn()) for _ in range(8)))
    assert not any(rig.seen.holds_like(rig.sent(common + rig.randn()), Round(1)) for _ in range(8))


def test_dense_payloads_and_small_models_are_not_compared(tmp_path):
    for codec, k, chunks in (("int8", 4096, 16), ("e3m0", 4096, 16), ("sparse2", 64, LEAST // 64 - 1)):
        rig = Rig(tmp_path, codec, k, chunks)
        one = rig.sent(rig.randn())
        rig.seen.add(Round(0), one)
        assert not rig.seen.holds_like(one, Round(1))


def test_an_empty_payload_is_like_no_other(rig):
    nothing = rig.sent(torch.zeros(rig.shape))
    rig.seen.add(Round(0), nothing)
    assert not rig.seen.holds_like(nothing, Round(1))


def test_who_changes_some_chunks_does_not_know_which_are_compared(tmp_path):
    first, second = (Rig(tmp_path, seed=seed) for seed in (1, 2))
    assert len(first.seen._chunks) == SAMPLED
    assert first.seen._chunks.tolist() != second.seen._chunks.tolist()
    values = first.randn()
    changed = values.clone()
    changed[first.seen._chunks[:18]] = first.randn()[:18]
    for rig in (first, second):
        rig.seen.add(Round(0), rig.sent(values))
    assert not first.seen.holds_like(first.sent(changed), Round(1))
    assert second.seen.holds_like(second.sent(changed), Round(1))


def test_what_is_remembered_is_bounded(rig, monkeypatch):
    monkeypatch.setattr(replays, "MOST", 3)
    sent = [rig.sent(rig.randn()) for _ in range(4)]
    for number, member in enumerate(sent):
        rig.seen.add(Round(number), member)
    assert [rig.seen.holds_like(member, Round(9)) for member in sent] == [False, True, True, True]


def test_a_payload_that_is_none_is_a_fault(rig):
    whole = rig.sent(rig.randn())
    broken = rig.member(b"no payload")
    for call in (rig.seen.holds_like, lambda member, number: rig.seen.add(number, member)):
        with pytest.raises(DecodeError):
            call(broken, Round(1))
        call(whole, Round(1))
