"""What leaves a home that trained a LoRA run: merged folders and texts, an adapter, no damaged base."""

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from atoll.node.checkpoint.base_weights import open_base
from atoll.node.generation.options import TextOptions
from atoll.node.import_export.export_adapter import export_adapter
from atoll.node.import_export.export_gguf import export_gguf
from atoll.node.import_export.export_run import export_run, saved_weights
from atoll.node.import_export.huggingface.lora import ADAPTER_WEIGHTS
from atoll.node.import_export.save_shard import save_shard
from atoll.node.learning.model.bridge import named_atoms
from atoll.p2p.blobs.store import BLOBS
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.identity import Identity
from atoll.protocols.run.run_spec import sign_run
from tests.later import GROUP, loading
from tests.node.worker.lora_home import LoraHome
from tests.node.worker.session_home import ME
from tests.node.worker.test_lora import round_of

pytestmark = GROUP

torch.set_num_threads(1)


@pytest.fixture
def home(tmp_path):
    """A home whose node was stopped after two rounds; B is not zero any more."""
    node = LoraHome(tmp_path / "run", ME, keys={"lora_alpha": 400.0})
    for number in range(2):
        round_of([node], number)
    learner = node.session._learner
    with learner.weights.replaced_by(node.session._fold.view_C4096):
        node.adapter = {name: value.clone() for name, value in named_atoms(learner.module).items()}
    node.session.close()
    (node.path / BLOBS).mkdir()
    node.base = node.base.rename(node.path / BLOBS / f"{node.spec.base.hex()}.blob")
    return node


def test_an_export_is_the_base_with_the_adapter_in_it(home, tmp_path):
    done = export_run(home.spec, home.path, tmp_path / "hf", None, "")
    assert (done.class_name, done.round) == ("LlamaForCausalLM", 1)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    base = open_base(home.spec, home.base)
    moved = {name for name, value in found.items() if not torch.equal(value, base(name).float() * 2.0**-24)}
    assert moved == {name for name in found if name.endswith("_proj.weight")}
    export_gguf(home.spec, home.path, tmp_path / "model.gguf", None, "")
    head = next(one for one in GGUFReader(tmp_path / "model.gguf").tensors if one.name == "blk.0.ffn_down.weight")
    assert torch.equal(torch.tensor(head.data), found["model.layers.0.mlp.down_proj.weight"])
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"adapters of rank 4 were trained: {home.spec.model.parameters:,}" in card


def test_a_run_speaks_as_its_export_does(home, tmp_path):
    export_run(home.spec, home.path, tmp_path / "hf", None, "")
    ours = loading.load_run(home.spec, saved_weights(home.spec, home.path), home.path / BLOBS, "", "cpu")
    options = TextOptions(max_tokens=8, temperature=0)
    assert ours.generate(list(b"To be"), options) == loading.load_model_folder(tmp_path / "hf", "cpu").generate(
        list(b"To be"), options
    )


def test_the_adapter_has_the_values_that_were_trained(home, tmp_path):
    done = export_adapter(home.spec, home.path, tmp_path / "adapter", None, "", base="org/name")
    assert done.class_name == "PeftModel"
    found = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert len(found) == len(home.adapter)
    for name, value in home.adapter.items():
        assert torch.equal(found[f"base_model.model.{name}"].view(-1), value), name


def test_a_damaged_or_missing_base_is_one_line(home, tmp_path):
    data = bytearray(home.base.read_bytes())
    data[len(data) // 2] ^= 1
    home.base.write_bytes(data)
    with pytest.raises(CorruptFault, match="is not the base of this run"):
        export_run(home.spec, home.path, tmp_path / "hf", None, "")
    home.base.unlink()
    with pytest.raises(ConfigError, match="the base of this run is not in this home"):
        export_run(home.spec, home.path, tmp_path / "hf", None, "")
    assert not (tmp_path / "hf").exists()


def test_a_lora_run_is_not_saved_as_shards(home, tmp_path):
    owner = Identity(bytes([1]) * 32)
    with pytest.raises(ConfigError, match="no place for the base of a LoRA run"):
        save_shard(sign_run(home.spec, owner), home.path, owner, tmp_path / "to")
