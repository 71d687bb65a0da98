"""A worker's account of how often its data were used: never behind, never less; and where training ends."""

import inspect
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.config.node_config import NodeConfig
from atoll.node.learning.data.dataset import Dataset, place_of
from atoll.node.learning.inner.private_passes import PrivatePasses
from atoll.node.learning.plugged.loading import with_model
from atoll.node.runs.capacity.memory_model import needs_of
from atoll.node.worker.multi_device.modes import check_devices
from atoll.node.worker.multi_device.replica import Replica
from atoll.node.worker.privacy.uses import FILE, SavedUses, WindowUses, encode_uses, read_uses
from atoll.node.worker.session import Session
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import ConfigError, CorruptFault, PrivacySpent
from atoll.protocols.ids import Round, digest
from atoll.protocols.local.contribution_forms import contribution_of
from atoll.protocols.local.worker_messages import FinalizeRequest, TrainReply
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.privacy import PrivacySpec, epsilon
from tests.node.learning.plugged.lane_package import install_lanes
from tests.node.worker.session_home import OTHER, SPEC, Home, member

PLAIN = PrivacySpec(clip=1.0, noise=1.0)
PRIVATE = replace(SPEC, privacy=PLAIN)
EVERY = 4
"""Windows of a text of which a round of two steps uses all, two at a time."""
TEXT = digest(b"text")


class Small(Home):
    """A home whose text has four windows: each round uses each of them once."""

    def restart(self):
        started = super().restart()
        account = self.session._rounds.privacy
        data = self.session._data
        short = replace(data, train_N=data.train_N[: EVERY * data.context + 1])
        self.session._rounds.data = self.session._data = short
        account.uses = WindowUses(self.path / FILE, TEXT, EVERY)
        return replace(started, uses=account.uses.most)


def on_disk(home: Home) -> list[int]:
    found = read_uses(home.path / FILE)
    assert found is not None
    return np.frombuffer(found.uses, "<u8").tolist()


def finalize(home: Home, trained: TrainReply) -> None:
    home.ask(FinalizeRequest(trained.pending.round, (member(trained.pending),)))


# --- the count -------------------------------------------------------------------------------------


def test_each_round_counts_and_a_restart_goes_on_from_there(tmp_path: Path):
    home = Small(tmp_path, spec=PRIVATE)
    for number in range(3):
        trained = home.train(number)
        assert trained.uses == number + 1
        assert on_disk(home) == [number + 1] * EVERY
        finalize(home, trained)
    assert home.restart().uses == 3
    assert home.train(3).uses == 4


def test_each_step_says_what_was_used_so_far_and_the_disk_has_as_much(tmp_path: Path):
    """So a round that is given up has been said too."""
    home = Small(tmp_path, spec=PRIVATE)
    short = home.session._rounds.data.train_N[: EVERY // 2 * home.session._data.context + 1]
    home.session._rounds.data = home.session._data = replace(home.session._data, train_N=short)
    home.session._rounds.privacy.uses = WindowUses(home.path / FILE, TEXT, EVERY // 2)
    seen = []
    for event in home.session.train(home.train_ask(0)):
        seen.append(event.uses)
        assert event.uses <= max(on_disk(home))
    assert seen == [1, 2, 2], "two steps that use the same two windows, and the reply"


def test_a_round_that_a_kill_cut_off_counts_and_counts_again(tmp_path: Path):
    """Its uses are on the disk before its first step, and its second time has other noise."""
    home = Small(tmp_path, spec=PRIVATE)
    finalize(home, home.train(0))
    steps = home.session.train(home.train_ask(1))
    next(steps)
    assert on_disk(home) == [2] * EVERY, "the whole round, after its first step"
    assert home.restart().uses == 2
    assert home.train(1).uses == 3


def test_the_account_is_written_before_the_first_step(tmp_path: Path, monkeypatch):
    home = Small(tmp_path, spec=PRIVATE)
    seen = []
    monkeypatch.setattr(home.session._learner, "step", lambda *_: seen.append(on_disk(home)) or 1.0)
    home.train(0)
    assert seen == [[1] * EVERY] * 2


def test_what_was_not_used_of_a_round_that_was_cut_short_is_not_counted(tmp_path: Path):
    home = Small(tmp_path, spec=PRIVATE)
    ask = replace(home.train_ask(0), limit_s=1e-9, least_steps=1, least_sequences=2)
    *_, trained = home.session.train(ask)
    assert trained.pending.steps == 1
    assert sorted(home.session._rounds.privacy.uses._uses_W.tolist()) == [0, 0, 1, 1]
    home.keep(0)
    finalize(home, trained)
    home.train(1)
    assert sum(on_disk(home)) == 6, "two of the first round, four of the second"


def test_a_missing_count_is_no_new_beginning(tmp_path: Path):
    home = Home(tmp_path, spec=PRIVATE)
    finalize(home, home.train(0))
    (tmp_path / FILE).unlink()
    with pytest.raises(CorruptFault, match="is gone") as caught:
        home.restart()
    assert "restore it from a copy of this home" in caught.value.hint


def test_a_damaged_count_is_refused_in_one_line(tmp_path: Path):
    good = encode_uses(SavedUses(1, TEXT, bytes(32)))
    path = tmp_path / FILE
    for bad in (b"", good[:-1], good[:40] + b"\1" + good[41:], bytes(32) + good[32:], good[:-8] + b"\0" * 7):
        path.write_bytes(bad)
        with pytest.raises(CorruptFault, match="does not verify"):
            WindowUses(path, TEXT, 4)


def test_the_file_is_what_it_was():
    """Golden: a node of a later version must go on from this one's count."""
    data = encode_uses(SavedUses(1, TEXT, np.array([1, 300], "<u8").tobytes()))
    assert digest(data).hex()[:16] == GOLDEN


GOLDEN = "519d99a7ea6a5355"


def test_another_text_begins_with_the_most_uses_of_the_old_one(tmp_path: Path):
    """It may have the same sequences, in another order."""
    path = tmp_path / FILE
    old = WindowUses(path, TEXT, 3)
    old.write(np.array([1, 7, 2], np.uint64))
    assert WindowUses(path, TEXT, 3)._uses_W.tolist() == [1, 7, 2]
    assert WindowUses(path, digest(b"other"), 5)._uses_W.tolist() == [7] * 5
    assert WindowUses(path, TEXT, 2)._uses_W.tolist() == [7] * 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), max_size=8),
    st.integers(0, 8),
)
def test_the_count_is_the_square_of_what_the_sum_can_move_by(tmp_path_factory, steps, taken):
    """In units of the clip: a window that is m times in a step moves it by m, and steps compose as squares."""
    uses = WindowUses(tmp_path_factory.mktemp("uses") / FILE, TEXT, 10)
    planned = uses.planned(map(np.array, steps))
    wanted = [sum(step.count(window) ** 2 for step in steps) for window in range(10)]
    assert planned.tolist() == wanted
    assert uses.most == 0, "a plan uses nothing"
    for step in steps[:taken]:
        uses.use(np.array(step))
    assert (uses._uses_W <= planned).all()


def test_a_text_shorter_than_a_step_counts_what_comes_twice(tmp_path: Path):
    home = Small(tmp_path, spec=replace(PRIVATE, inner=replace(SPEC.inner, batch=8)))
    assert home.train(0).uses == 8, "two steps, twice in each: 2 · 2²"


# --- the end ---------------------------------------------------------------------------------------


def test_no_round_goes_beyond_the_largest_epsilon(tmp_path: Path):
    most = epsilon(2, 1.0, 1e-5) * 1.001
    home = Small(tmp_path, spec=replace(PRIVATE, privacy=replace(PLAIN, most=most)))
    for number in range(2):
        finalize(home, home.train(number))
    for _ in range(2):
        with pytest.raises(PrivacySpent, match=r"would take ε to 8\.\d*, beyond the 6\.\d* of the run") as caught:
            home.train(2)
        assert "trains no more" in caught.value.hint
        assert on_disk(home) == [2] * EVERY
        assert home.restart().uses == 2


# --- what leaves the node --------------------------------------------------------------------------


def test_no_contribution_tells_the_loss_of_private_steps(tmp_path: Path):
    pending = Home(tmp_path, spec=PRIVATE).train(0).pending
    assert pending.loss > 0, "for the node's own user"
    assert contribution_of(pending, tells_loss=False).loss == 0


def test_noise_comes_from_the_operating_system_and_no_two_runs_of_a_step_are_alike(tmp_path: Path):
    assert inspect.signature(Session).parameters["random"].default is os.urandom
    homes = [Home(tmp_path / name, spec=PRIVATE) for name in "ab"]
    assert isinstance(homes[0].session._learner.inner.passes, PrivatePasses)
    assert len({home.train(0).pending.payload for home in homes}) == 2
    plain = [Home(tmp_path / name, spec=SPEC) for name in "cd"]
    assert len({home.train(0).pending.payload for home in plain}) == 1


def test_given_noise_repeats_a_round(tmp_path: Path):
    payloads = set()
    for name in "ab":
        home = Home(tmp_path / name, spec=PRIVATE)
        home.session = Session(home.start, random=np.random.default_rng(4).bytes)
        payloads.add(home.train(0).pending.payload)
    assert len(payloads) == 1


# --- what trains -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_decoder_learns_with_little_noise(tmp_path: Path, optimizer):
    spec = replace(
        PRIVATE, privacy=replace(PLAIN, noise=0.05), outer=replace(SPEC.outer, stages=(Stage(0, 20),)),
        inner=replace(SPEC.inner, optimizer=optimizer, batch=8),
    )  # fmt: skip
    home = Home(tmp_path, spec=spec)
    losses = []
    for number in range(4):
        trained = home.train(number)
        losses.append(trained.pending.loss)
        finalize(home, trained)
    assert losses[-1] < losses[0] - 0.4, "0.49 to 0.6 less, by the noise that the run's id draws"


@pytest.mark.parametrize(
    "more", [{"ffn_slices": 4}, {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": "attention"}]
)
def test_of_a_model_of_which_a_part_is_trained_that_part_is_clipped_and_gets_noise(more):
    spec = replace(PRIVATE, model=replace(PRIVATE.model, **more))
    replica = Replica(spec, b"\x03" if spec.model.ffn_slices else b"", "cpu", (torch.float32, False))
    for value in replica.values():
        torch.nn.init.constant_(value, 0.01)
    trained = [each for each in replica.module.parameters() if each.requires_grad]
    before = [each.detach().clone() for each in trained]
    replica.inner.step(np.arange(34).reshape(2, 17), 0)
    assert all(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    assert isinstance(replica.inner.passes, PrivatePasses)


def test_a_model_of_a_package_trains_with_privacy(tmp_path: Path, monkeypatch):
    install_lanes(tmp_path, monkeypatch)
    spec = with_model(PRIVATE, "lanes.1")
    spec.check()
    assert Home(tmp_path / "home", spec=spec).train(0).uses == 1


def test_a_member_with_data_of_its_own_shares_its_order_with_nobody():
    """Else it would use one part of its windows as often as the others use the rest."""
    own = replace(PRIVATE, privacy=replace(PLAIN, own_data=True))
    tokens_N = np.zeros(64 * 16 + 1, np.int32)
    data = Dataset(tokens_N, tokens_N, tokens_N, TEXT, 16)
    used = [data.windows_of(own, Turn(Round(number), OTHER, 3, 8), np.arange(4)).tolist() for number in range(16)]
    assert sorted(window for each in used for window in each) == list(range(64))
    assert place_of(PRIVATE, Turn(Round(1), OTHER, 3, 8)).slots == 8


def test_several_devices_are_refused():
    check_devices(PRIVATE, 1)
    with pytest.raises(ConfigError, match="a run with privacy takes each step on one device"):
        check_devices(PRIVATE, 2)


def test_memory_counts_the_sum_beside_the_gradient_and_one_sequence_at_once():
    config = NodeConfig(device="cpu", micro_batch=1)
    more = needs_of(PRIVATE, config).host - needs_of(SPEC, config).host
    assert more == 4 * SPEC.model.parameters
    wide = replace(config, micro_batch=2)
    assert needs_of(PRIVATE, wide) == needs_of(PRIVATE, config)
