"""A model of an installed package in the decoder's place: it trains, folds and is saved; others are refused."""

import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from atoll.node.config.node_config import NodeConfig
from atoll.node.config.roles import Work
from atoll.node.import_export.evaluate_saved import evaluate_saved
from atoll.node.learning.model.bridge import named_atoms
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.plugged.loading import examples_of, model_of, with_model
from atoll.node.learning.plugged.module import plugged_module
from atoll.node.runs.capacity.memory_model import FOLD_BYTES, activation_bytes, needs_of
from atoll.node.runs.installed_parts import check_installed
from atoll.node.worker.multi_device.modes import check_devices
from atoll.node.worker.multi_device.replica import ALL_STORED, Replica, StepMemory
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    EvaluateRequest,
    FinalizeRequest,
    SnapshotRequest,
    TrainRequest,
)
from atoll.protocols.run.model_spec import atoms
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.plugin import TensorSpec
from tests.node.learning.plugged.lane_package import LANES, install_lanes
from tests.node.learning.plugged.lanes import VAL, Lanes, iou, pictures
from tests.node.worker.session_home import SPEC, Home, member

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 5)]
FLOAT = (torch.float32, False)


@pytest.fixture
def spec(tmp_path, monkeypatch):
    install_lanes(tmp_path, monkeypatch)
    return with_model(replace(SPEC), "lanes.1")


class Picture(Home):
    """A member of four."""

    def train_ask(self, number: int, after: int = -1) -> TrainRequest:
        return TrainRequest(Round(number), PEERS.index(self.start.peer), 4, self.spec.steps(number), after)

    def seen(self) -> tuple[float, float]:
        """Loss and intersection over union of the final state on pictures that nobody trains on."""
        learner, example_BX = self.session._learner, windows_of(pictures(VAL, 2))
        with learner.weights.replaced_by(self.session._fold.final_C4096):
            found = iou(learner.module, example_BX)
        return self.ask(EvaluateRequest()).val_loss, found


def windows_of(examples: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(examples), dtype=torch.uint8).view(-1, Lanes.context).long()


def train(homes, number):
    members = tuple(member(home.train(number).pending, home.start.peer) for home in homes)
    (state,) = {home.ask(FinalizeRequest(Round(number), members)).state for home in homes}
    return state


# --- the model in a worker -----------------------------------------------------------------------


def test_a_run_says_what_every_node_must_know_of_the_model(spec):
    spec.check()
    assert spec.model.plugin.package == "atoll-lanes"
    assert spec.model.parameters == sum(p.numel() for p in Lanes().build().parameters()) == 29_617
    assert spec.model.plugin.tensors[0].shape == (8, 9), "of a convolution, 8 by 1·3·3"
    assert spec.data.source == "plugin:lanes.1"


def test_values_begin_as_the_run_says(spec):
    found = genesis(spec.model, 1)
    unit = 1 << 24
    assert not found["down1.0.bias"].any()
    assert found["up2.0.weight"].std() / unit == pytest.approx(math.sqrt(2 / 432), rel=0.05)
    assert digest(found["down1.0.weight"].astype("<i4").tobytes()).hex()[:16] == "cf9194d50d6067cb", (
        "the same on every machine"
    )
    tensors = (replace(spec.model.plugin.tensors[0], start=-1),)
    ones = replace(spec.model, plugin=replace(spec.model.plugin, tensors=tensors))
    assert (genesis(ones, 1)[tensors[0].name] == unit).all()


def test_members_learn_the_lanes_and_have_one_state(spec, tmp_path: Path):
    """One is killed, one comes late with a snapshot."""
    spec = replace(
        spec,
        inner=replace(spec.inner, lr=3e-3, warmup_steps=10, total_steps=450, batch=8),
        outer=replace(spec.outer, stages=(Stage(0, 15),), floor_256=64),
        compress=replace(spec.compress, k=128),
    )
    homes = [Picture(tmp_path / str(at), peer, spec) for at, peer in enumerate(PEERS[:2])]
    loss, marked = homes[0].seen()
    for number in range(3):
        state = train(homes, number)
    assert homes[1].restart().state == state
    reply = homes[0].ask(SnapshotRequest(str(tmp_path / "snapshot")))
    late = Picture(tmp_path / "late", PEERS[3], spec)
    late.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    for number in range(3, 5):
        train([*homes, late], number)
    assert marked < 0.2
    after = late.seen()
    assert after == homes[0].seen()
    assert after[0] < loss / 2
    assert evaluate_saved(spec, tmp_path / "late", NodeConfig(device="cpu", threads=1)).val_loss == pytest.approx(
        after[0]
    )
    assert after[1] > 0.5


RULES = [
    ({"aggregate": "edit"}, {}),
    ({"spectrum": "isotropic", "alpha_256": 538}, {}),
    ({"rule": "nesterov", "alpha_256": 179, "overlap_steps": 1}, {"codec": "int8", "k": 4096}),
    ({"rule": "co2"}, {}),
]


@pytest.mark.parametrize(("outer", "compress"), RULES)
def test_rules_and_codecs_know_the_arena_alone(spec, tmp_path: Path, outer, compress):
    outer = replace(spec.outer, **{"floor_256": 64} | outer)
    spec = replace(spec, outer=outer, compress=replace(spec.compress, **compress))
    spec.check()
    homes = [Picture(tmp_path / str(at), peer, spec) for at, peer in enumerate(PEERS[:2])]
    states = [train(homes, number) for number in range(2)]
    assert states[0] != states[1]


def test_the_values_of_convolutions_are_matrices_of_the_arena_and_views(spec):
    module = plugged_module(spec.model).module
    named = named_atoms(module)
    assert {name: tuple(value.shape) for name, value in named.items()} == {
        a.name: a.shape for a in atoms(spec.model)
    }
    named["up1.2.weight"].fill_(0.5)
    assert (module.up1[2].weight == 0.5).all()


def test_a_step_in_parts_is_the_step(spec):
    """The loss is a mean over examples, so a micro-batch changes nothing but the order of sums."""
    window_BT1 = torch.cat((windows_of(pictures(5, 3)), torch.zeros(5, 1, dtype=torch.int64)), 1).numpy()
    moved = []
    for memory in (ALL_STORED, StepMemory(micro_batch=2)):
        replica = Replica(spec, b"", "cpu", FLOAT, memory=memory)
        for name, value in named_atoms(replica.module).items():
            value.copy_(torch.from_numpy(genesis(spec.model, 1)[name]) / (1 << 24))
        loss = replica.inner.step(window_BT1, 0)
        moved.append((loss, torch.cat([p.detach().flatten() for p in replica.module.parameters()])))
    assert moved[0][0] == pytest.approx(moved[1][0], rel=1e-5)
    assert torch.allclose(moved[0][1], moved[1][1], atol=1e-4)


def test_memory_follows_what_the_model_says_and_it_says_enough(spec):
    held = 0
    made, plugin = plugged_module(spec.model), spec.model.plugin

    def pack(value: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held += value.nbytes
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        made.loss_of(made.module, torch.cat((windows_of(pictures(1, 3)), torch.zeros(1, 1, dtype=torch.int64)), 1))
    assert held - 4 * spec.model.parameters < 4 * plugin.saved
    assert activation_bytes(spec.model, 3) == 3 * 4 * plugin.saved
    config = NodeConfig(device="cpu")
    more = replace(spec, model=replace(spec.model, plugin=replace(plugin, saved=plugin.saved + 1_000_000)))
    # One example in a step, and the two that a validation passes at once.
    assert needs_of(more, config).host - needs_of(spec, config).host == 3 * 4_000_000


def test_memory_counts_the_padding_of_narrow_matrices(spec):
    def host(*shape: int) -> int:
        tensors = (TensorSpec("a", shape, 1),)
        model = replace(spec.model, plugin=replace(spec.model.plugin, tensors=tensors))
        return needs_of(replace(spec, model=model), NodeConfig(device="cpu")).host

    assert host(4096, 1) - host(64, 64) == FOLD_BYTES * 63 * 4096


# --- what is refused -----------------------------------------------------------------------------


def test_a_node_without_the_package_is_told_so(spec, monkeypatch):
    check_installed(spec, Work())
    monkeypatch.undo()
    for work in (Work(), Work(trains=False)):
        with pytest.raises(ConfigError, match=r"needs the model lanes\.1, which is not installed here") as caught:
            check_installed(spec, work)
        assert "if you trust the package atoll-lanes, install it" in caught.value.hint
    check_installed(spec, Work(trains=False, has_model=False, relays=True))
    with pytest.raises(ConfigError, match="not installed here"):
        model_of(spec.model)


def test_several_devices_are_refused(spec):
    check_devices(spec, 1)
    with pytest.raises(ConfigError, match="a model of a package takes each step on one device"):
        check_devices(spec, 2)


CHANGED = [
    ("saved = 400_000", "saved = 400_001", "has another lanes.1 here than the run was made with"),
    ("_WIDTHS = (8, 16, 32)", "_WIDTHS = (8, 16, 24)", "has another lanes.1 here than the run was made with"),
    ("return UNet()\n", "return nn.Linear(1, 1)\n", "does not fit the run: tensor down1.0.weight: none"),
    ("return UNet()\n", "return UNet().double()\n", "tensor down1.0.weight: another shape"),
    ("return UNet()\n", "return UNet().requires_grad_(False)\n", "tensor down1.0.weight: another shape"),
    (
        "return UNet()\n",
        "net = UNet()\n        net.register_buffer('mean', torch.zeros(1))\n        return net\n",
        "tensor mean: one that the run does not have",
    ),
    ("return pictures(TRAIN, 1), ", "return pictures(TRAIN, 1)[1:], ", "which are not whole examples of 1024"),
    ("import math\n", "import nowhere_to_be_found\n", "lanes.1 of atoll-lanes does not load: ModuleNotFoundError"),
    ("return functional.binary_cross_entropy_with_logits(logit_BHW, mask_BHW) + dice.mean()", "return dice",
     "model lanes.1 gave a loss of shape (2,), no scalar"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), CHANGED)
def test_another_model_of_that_name_is_refused_in_one_line(spec, tmp_path, monkeypatch, old, new, said):
    assert old in LANES
    monkeypatch.undo()
    install_lanes(tmp_path, monkeypatch, module="changed_lanes", source=LANES.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        Home(tmp_path / "home", spec=spec).train(0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_no_run_can_have_is_refused(tmp_path, monkeypatch):
    many = LANES.replace("self.starts = {", "self.starts = {f't{at}': ((1,), 0) for at in range(999)} | {")
    install_lanes(tmp_path, monkeypatch, source=many)
    with pytest.raises(ConfigError, match=r"model lanes\.1 cannot be a run's: .*length <= 256"):
        with_model(SPEC, "lanes.1")


def test_two_packages_with_one_name_are_refused(spec, tmp_path, monkeypatch):
    install_lanes(tmp_path, monkeypatch, package="atoll-others", module="other_lanes")
    with pytest.raises(ConfigError, match=r"several installed packages bring lanes\.1: atoll-lanes, atoll-others"):
        check_installed(spec, Work())


def test_examples_are_the_same_bytes_everywhere(spec):
    """Golden: the digest in a run binds all members to them."""
    train, val = examples_of("plugin:lanes.1")
    assert len(train) == 512 * 1024 + 1
    assert len(val) == 64 * 1024 + 1
    assert val[:12].hex() == "465e6066343c2c5c836f8354"
