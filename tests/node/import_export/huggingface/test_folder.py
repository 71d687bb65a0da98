"""Folders of strangers are refused with one clear line, and ours are there whole or not at all."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from atoll.node.import_export.huggingface import weights
from atoll.node.import_export.huggingface.config import config_from_model, model_from_config
from atoll.node.import_export.huggingface.folder import load_folder, save_folder
from atoll.node.import_export.huggingface.serving import byte_tokenizer_json, tokenizer_files
from atoll.node.import_export.huggingface.upcycle import upcycle
from atoll.protocols.errors import AtollError, ConfigError, DiskFault, Divergence
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, atoms

EXPERTS = ExpertsSpec(count=3, per_token=2, ffn=8)
SPEC = ModelSpec(
    dim=16, layers=2, heads=2, kv_heads=1, ffn=16, vocab=256, context=8, tied=True, rope_theta=1e4, norm_eps=1e-5,
    qk_norm=True, experts=EXPERTS,
)  # fmt: skip
OUR = "model.layers.1.mlp.experts.2.up_proj.weight"


def theta_of(spec):
    found, at = {}, 1
    for atom in atoms(spec):
        size = int(torch.tensor(atom.shape).prod())
        found[atom.name] = torch.arange(at, at + size, dtype=torch.int32).reshape(atom.shape)
        at += size
    return found


@pytest.fixture
def folder(tmp_path):
    to = tmp_path / "out"
    save_folder(to, SPEC, theta_of(SPEC).__getitem__, tokenizer_files(byte_tokenizer_json(), SPEC.context))
    return to


def read(folder):
    return load_folder(folder)


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


def change_weights(folder, change):
    tensors = load_file(folder / weights.SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / weights.SINGLE_FILE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": ["llama"]}, "model_type ['llama']"),
        ({"layer_types": 5}, "layer_types = 5"),
        ({"layer_types": [{}]}, "layer_types = [{}]"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"model_type": "olmoe", "head_dim": 32, "intermediate_size": 8}, "head_dim = 32 is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"quantization_config": {"bits": 4}}, "key 'quantization_config'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_type 'linear'"),
        ({"rope_parameters": None, "rope_theta": "wide"}, "rope_theta = 'wide' is not a number"),
        ({"rope_parameters": {"rope_theta": 0}}, "model.rope_theta = 0.0: Expected float > 1.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": {}}}, "rope_type {}"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_scaling": [1]}, "rope_scaling = [1]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor = None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "beta": 1}}, "rope_scaling"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"head_dim": 3}, "model.head_size must be even"),
        ({"head_dim": "wide"}, "head_dim = 'wide' is not a whole number"),
        ({"head_dim": 0}, "model.head_size = 0"),
        ({"hidden_size": "many"}, "hidden_size = 'many'"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' is not true or false"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1 is not true or false"),
        ({"num_attention_heads": 0}, "model.heads = 0"),
        ({"vocab_size": 1 << 40}, "model.vocab"),
        ({"num_experts_per_tok": 9}, "model.experts.per_token = 9"),
        ({"max_position_embeddings": "gone"}, "max_position_embeddings = None"),
        ({"num_hidden_layers": "gone"}, "num_hidden_layers = None"),
        ({"rms_norm_eps": 0}, "model.norm_eps"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(folder, changes, said):
    change_config(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert said in caught.value.line()
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(OUR), f"lacks {OUR}"),
        (lambda t: t.update(more=torch.zeros(3)), "more is no part of the model"),
        (lambda t: t.update({OUR: t[OUR].T.contiguous()}), f"{OUR} has the shape (16, 8), not (8, 16)"),
        (lambda t: t.update({OUR: t[OUR].double()}), f"{OUR} is F64"),
        (lambda t: t.update({OUR: t[OUR].long()}), f"{OUR} is I64"),
        (lambda t: t.update({"lm_head.weight": torch.ones(256, 16)}), "lm_head.weight is not the embedding"),
        (lambda t: t.update({"lm_head.weight": torch.ones(1, 16)}), "lm_head.weight has the shape"),
    ],
)
def test_atoms_that_do_not_fit_are_named(folder, change, said):
    change_weights(folder, change)
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert said in caught.value.line()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 128.0, -128.001])
def test_a_value_outside_the_range_is_a_divergence(folder, value):
    change_weights(folder, lambda t: t[OUR].view(-1).__setitem__(3, value))
    with pytest.raises(Divergence, match="up_proj"):
        read(folder)


def test_the_ends_of_the_range_fit():
    ends = torch.tensor([-128.0, 127.99999, 2.0**-25, 3 * 2.0**-25])
    assert weights.to_fixed(ends, "x").tolist() == [-(2**31), 2147483520, 0, 2]


def test_a_tied_head_that_is_the_embedding_is_fine(folder):
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert all(torch.equal(value, theta_of(SPEC)[name]) for name, value in read(folder).theta.items())


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, (1 << 62).to_bytes(8, "little") + b"{}", b"[]"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_and_missing_files_are_one_line(folder, name, damage):
    (folder / name).write_bytes(damage)
    with pytest.raises(AtollError) as caught:
        read(folder)
    assert name in caught.value.line()
    (folder / name).unlink()
    with pytest.raises(AtollError) as caught:
        read(folder)
    assert name in caught.value.line()


def test_a_cut_off_weight_file_is_refused(folder):
    path = folder / weights.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError):
        read(folder)


def test_shards_with_an_index_are_the_same_weights(tmp_path):
    theta = theta_of(SPEC)
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    weights.save_weights(tmp_path / "one", SPEC, theta.__getitem__)
    weights.save_weights(tmp_path / "many", SPEC, theta.__getitem__, shard_bytes=5000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    for name in ("one", "many"):
        assert all(torch.equal(v, theta[n]) for n, v in weights.load_weights(tmp_path / name, SPEC).theta.items())
    biggest = max(path.stat().st_size for path in (tmp_path / "many").glob("*.safetensors"))
    assert biggest < 20000, "the embedding is the largest atom"


def test_an_atom_in_two_files_is_refused(folder):
    (folder / "copy.safetensors").write_bytes((folder / weights.SINGLE_FILE).read_bytes())
    table = {"weight_map": {OUR: weights.SINGLE_FILE, "x": "copy.safetensors"}}
    (folder / weights.INDEX).write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="is in another file too"):
        read(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3, [], "x\\y.safetensors", "config.json"])
def test_an_index_names_files_of_its_folder_only(folder, name):
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": {OUR: name}}))
    with pytest.raises(ConfigError, match="is not the name of a shard"):
        read(folder)


@pytest.mark.parametrize("table", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_of_nothing_lacks_atoms(folder, table):
    (folder / weights.INDEX).write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="lacks"):
        read(folder)


def test_nothing_is_overwritten(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="already there"):
        save_folder(folder, SPEC, theta_of(SPEC).__getitem__, {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    save_folder(tmp_path / "out", SPEC, theta_of(SPEC).__getitem__, {})
    assert (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("fault", [DiskFault("full"), Divergence("x"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(tmp_path, fault):
    def read_atom(name):
        if name == OUR:
            raise fault
        return theta_of(SPEC)[name]

    with pytest.raises(type(fault)):
        save_folder(tmp_path / "out", SPEC, read_atom, {})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_a_disk_fault(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskFault) as caught:
        save_folder(tmp_path / "file/out", SPEC, theta_of(SPEC).__getitem__, {})
    assert "nothing was exported" in caught.value.line()


@pytest.mark.parametrize(
    "model",
    [
        replace(SPEC, qk_norm=False, experts=replace(EXPERTS, normalise=False)),
        replace(SPEC, qk_norm=False, experts=replace(EXPERTS, bias_rate=0.1)),
        replace(SPEC, qk_norm_across=True, head_size=4),
        replace(SPEC, qk_norm_across=True, experts=None),
        replace(SPEC, experts=replace(EXPERTS, bias_rate=0.1)),
        replace(SPEC, experts=replace(EXPERTS, zero=1, computed=1.0, bias_rate=0.1)),
    ],
)
def test_a_model_without_a_class_is_refused_before_anything_is_written(tmp_path, model):
    with pytest.raises(ConfigError, match="no class in transformers"):
        save_folder(tmp_path / "out", model, theta_of(model).__getitem__, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_comes_back(qk_norm, tied):
    model = replace(SPEC, experts=None, qk_norm=qk_norm, tied=tied)
    assert model_from_config(config_from_model(model)) == model


def test_a_mixtral_with_a_window_is_refused():
    config = config_from_model(replace(SPEC, qk_norm=False)) | {"sliding_window": 4096}
    with pytest.raises(ConfigError, match="sliding_window = 4096"):
        model_from_config(config)


def test_upcycling_needs_experts_of_the_dense_width():
    dense = replace(SPEC, experts=None)
    with pytest.raises(ConfigError, match="as wide as"):
        upcycle(dense, theta_of(dense), EXPERTS, 1)
    with pytest.raises(ConfigError, match="noise shift"):
        upcycle(dense, theta_of(dense), replace(EXPERTS, ffn=16), 1, 0)


def test_upcycled_noise_stays_within_its_share_of_each_value():
    dense = replace(SPEC, experts=None)
    theta = {name: value * 1000 - 500_000 for name, value in theta_of(dense).items()}
    _, found = upcycle(dense, theta, replace(EXPERTS, ffn=16), 1, 3)
    source = theta["model.layers.1.mlp.up_proj.weight"].long()
    copies = [found[f"model.layers.1.mlp.experts.{e}.up_proj.weight"].long() for e in range(3)]
    for copy in copies:
        assert bool(((copy - source).abs() <= (source.abs() >> 3)).all())
    assert not torch.equal(copies[0], copies[1])
    router = found["model.layers.1.mlp.gate.weight"]
    assert 0 < int(router.abs().max()) <= 1 << 16
    extreme = {name: torch.full_like(value, -(2**31)) for name, value in theta.items()}
    assert int(upcycle(dense, extreme, replace(EXPERTS, ffn=16), 1, 1)[1][OUR].min()) == -(2**31)
