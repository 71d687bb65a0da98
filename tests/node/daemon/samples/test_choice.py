"""Whether a node writes sample texts is decided by what it has, and the answer is one line."""

import importlib.util
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.rounds.state import Phase
from atoll.node.daemon.samples.choice import obstacle_of, shortage_now, why_never
from atoll.node.runs.capacity.free_resources import SPARE
from atoll.node.runs.capacity.memory_model import Free, needs_of
from atoll.node.runs.capacity.sample_memory import sample_bytes
from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.run.model_spec import plugged
from atoll.protocols.run.sections.plugin import PluginSpec, TensorSpec

OWNER = Identity(bytes(32)).peer_id
SPEC = preset("tiny", OWNER, 1)
CONFIG = NodeConfig(device="cpu", web="localhost:0", sample_every_s=600)
PLENTY = Free(memory_bytes=64 << 30, disk_bytes=1 << 40)


def never(spec=SPEC, config=CONFIG, free=PLENTY) -> str:
    return why_never(spec, config, free=free, room=None)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Names that are not installed here."""
    missing: set[str] = set()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else real(name))
    return missing


def test_a_node_with_a_page_a_model_and_memory_writes_them():
    assert never() == ""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"web": ""}, "nobody would see them: this node serves no page (start --web)"),
        ({"roles": ("relay",)}, "this node holds no model: its role is relay"),
    ],
)
def test_the_configuration_says_why_there_is_none(changes, line):
    assert never(config=replace(CONFIG, **changes)) == line


def test_a_package_that_is_missing_is_named_with_its_extra(installed):
    installed.add("transformers")
    assert never() == "they need the package transformers: pip install 'atoll[generate]'"


def test_a_tokenizer_that_would_be_made_from_a_whole_file_each_time_is_none():
    data = replace(SPEC.data, source="file:book.txt", tokenizer="bpe8k")
    assert "from its whole text each time" in never(replace(SPEC, data=data))
    assert never(replace(SPEC, data=replace(data, source="builtin:shakespeare"))) == ""


def test_a_model_that_writes_no_text_is_named():
    plugin = PluginSpec(name="lanes.1", package="lanes", tensors=(TensorSpec("weight", (64, 64), 0),), saved=1)
    assert never(replace(SPEC, model=plugged(plugin, 8))).endswith("no language model")


def test_the_training_comes_first_where_memory_is_short():
    """The texts get what is left of the memory that the training may take, and never make it smaller."""
    config = replace(CONFIG, micro_batch=1, recompute="on")
    training = needs_of(SPEC, config).host
    both = int((training + sample_bytes(SPEC)) / (1 - SPARE)) + 16
    assert never(config=config, free=Free(both, 1 << 40)) == ""
    line = never(config=config, free=Free(both - (1 << 20), 1 << 40))
    assert line.startswith("a text needs 0.6 GB of memory beside 0.5 GB of the node, and 1.1 GB"), line


def test_what_is_free_is_looked_at_before_each_text():
    need = int(sample_bytes(SPEC) / (1 - SPARE)) + 16
    assert shortage_now(SPEC, Free(need, 0)) == ""
    assert shortage_now(SPEC, Free(need - (1 << 20), 0)).startswith("a text needs 0.6 GB of memory, and 0.6 GB")


@pytest.mark.parametrize(
    ("is_ready", "phase", "line"),
    [
        (False, Phase.TRAIN, "the worker is starting"),
        (True, Phase.PAUSED, "the node is paused"),
        (True, Phase.TRAIN, ""),
        (True, Phase.FINISHED, ""),
    ],
)
def test_the_node_s_own_work_stands_in_the_way(is_ready, phase, line):
    assert obstacle_of(SimpleNamespace(is_worker_ready=is_ready, round=SimpleNamespace(phase=phase))) == line


@pytest.mark.parametrize(("name", "measured_mib"), [("10m", 613), ("50m", 934), ("moe-12m", 705)])
def test_it_is_at_most_a_tenth_above_what_was_measured_and_never_below(name, measured_mib):
    assert 1.0 <= sample_bytes(preset(name, OWNER, 1)) / (measured_mib << 20) <= 1.1


def test_an_outer_momentum_is_read_with_the_weights():
    rule = replace(SPEC.outer, rule="nesterov")
    assert rule.momenta == 1
    assert sample_bytes(replace(SPEC, outer=rule)) - sample_bytes(SPEC) == 4 * SPEC.model.parameters
