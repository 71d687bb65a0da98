"""A GGUF file read back: by gguf's own reader, and by transformers, which gives the decoder's logits."""

import json

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers

from atoll.node.import_export import gguf_file
from atoll.node.import_export.gguf_file import gguf_tokenizer, save_gguf
from atoll.node.import_export.huggingface.ffn_slices import dense_of, joined
from atoll.node.import_export.huggingface.serving import byte_tokenizer_json
from atoll.node.learning.data.tokens import train_bpe
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.model_spec import atoms
from atoll.protocols.run.sections.serving import ServingSpec
from tests.later import GROUP, modeling_gguf, transformers
from tests.node.import_export.huggingface.test_transformers import DENSE, MIXED, SPECS, TOKENS, logits_of, theta_of

pytestmark = GROUP

DENSE_SPECS = [name for name, spec in SPECS.items() if spec.experts is None]
ABOUT = {"general.name": "tiny", "atoll.state_digest": "ab" * 32}
SERVING = ServingSpec(bos=1, eos=(2, 3), pad=0, chat_template="{{ messages }}")


def written(path, spec, serving=None, **options):
    theta = theta_of(spec)
    save_gguf(path, spec, theta.__getitem__, byte_tokenizer_json(), serving, ABOUT, **options)
    return theta


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", DENSE_SPECS)
def test_every_tensor_is_there_with_its_values(tmp_path, name):
    spec = SPECS[name]
    theta = written(tmp_path / "out.gguf", spec)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    kind = name.split("ForCausalLM")[0]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], spec.layers)
    read = joined(spec, theta.__getitem__)
    for atom in (one.name for one in atoms(dense_of(spec))):
        ours = read(atom).float().numpy() * np.float32(2.0**-24)
        theirs = found.pop(names.get_name(atom, try_suffixes=(".weight", ".bias")))
        if kind == "Llama" and atom.endswith(("q_proj.weight", "k_proj.weight")):
            # ggml's pairs (2i, 2i + 1) of a head are our (i, i + E/2)
            heads = theirs.reshape(-1, spec.head_dim, spec.dim)
            theirs = np.concatenate((heads[:, 0::2], heads[:, 1::2]), axis=1).reshape(ours.shape)
        assert np.array_equal(theirs, ours), atom
    assert set(found) == ({"rope_freqs.weight"} if spec.rope_stretch else set())


@pytest.mark.parametrize("name", [name for name in DENSE_SPECS if "stretched" not in name and "Gemma" not in name])
def test_transformers_reads_it_and_gives_the_same_logits(tmp_path, name):
    """Its reader is not ours. (It knows no `rope_freqs` and no Gemma 1, so these are left out.)"""
    spec = SPECS[name]
    theta = written(tmp_path / "out.gguf", spec)
    path = str(tmp_path / "out.gguf")
    # It reads no key_length.
    config = modeling_gguf.load_gguf_checkpoint(path)["config"] | {"head_dim": spec.head_dim}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    tensors = modeling_gguf.load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if spec.tied else set(), [])
    assert type(model).__name__ == name.split()[0]
    with torch.no_grad():
        difference = model(input_ids=TOKENS).logits - logits_of(spec, theta)
    assert float(difference.abs().max()) <= 1e-5


def test_a_stretch_is_written_as_factors_of_each_pair(tmp_path):
    written(tmp_path / "out.gguf", SPECS["LlamaForCausalLM stretched"])
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    factors = found["rope_freqs.weight"]
    assert factors.shape == (8,)
    assert factors[0] == pytest.approx(1.73594), "one radian a token: 2.5 rounds in 16 tokens, slowed in part"
    assert factors[-1] == pytest.approx(8.0), "slow ones by the factor"
    assert list(factors) == sorted(factors)


def test_what_it_says_of_the_model(tmp_path):
    written(tmp_path / "out.gguf", DENSE, SERVING)
    found = fields_of(tmp_path / "out.gguf")
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "tiny"
    assert found["atoll.state_digest"] == "ab" * 32
    sizes = ("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size")
    assert [found[f"llama.{key}"] for key in sizes] == [32, 64, 3, 96, 256]
    assert [found[f"llama.attention.{key}"] for key in ("head_count", "head_count_kv", "key_length")] == [4, 2, 16]
    assert found["llama.rope.freq_base"] == 5e4
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert [found[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "padding")] == [1, 2, 0]
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert fields_of_qwen(tmp_path)["general.architecture"] == "qwen3"


def fields_of_qwen(folder):
    written(folder / "qwen.gguf", SPECS["Qwen3ForCausalLM wide heads"])
    return fields_of(folder / "qwen.gguf")


def test_bytes_are_tokens_without_a_merge():
    found = gguf_tokenizer(byte_tokenizer_json(), 258)
    assert found.tokens[ord("a")] == "a"
    assert found.tokens[256:] == ["[PAD256]", "[PAD257]"]
    assert found.kinds[255:] == [gguf.TokenType.NORMAL, gguf.TokenType.UNUSED, gguf.TokenType.UNUSED]
    assert (found.merges, found.split) == (["Ā Ā"], "gpt-2")


def test_tokens_and_merges_of_a_trained_tokenizer():
    ours = train_bpe(b"the theme of the thesis, there and then" * 50)
    whole = json.loads(ours.identity)
    found = gguf_tokenizer(ours.identity.decode(), 300)
    assert found.split == "gpt-2"
    assert {text: number for number, text in enumerate(found.tokens)}.items() >= whole["model"]["vocab"].items()
    assert found.merges[0] == "h e"
    assert len(found.merges) == len(whole["model"]["merges"])


def changed(change):
    ours = Tokenizer.from_str(train_bpe(b"the theme of the thesis" * 50).identity.decode())
    change(ours)
    return ours.to_str()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "adds a space",
        ),
        (lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Digits()), "has no name for how"),
        (
            lambda one: setattr(
                one,
                "pre_tokenizer",
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(Regex("e"), "isolated"),
                        pre_tokenizers.ByteLevel(False, use_regex=False),
                    ]
                ),
            ),
            "has no name for how",
        ),
        (
            lambda one: setattr(
                one,
                "pre_tokenizer",
                pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)]),
            ),
            "has no name for how",
        ),
    ],
)
def test_what_llama_cpp_would_cut_otherwise_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        gguf_tokenizer(changed(change), 8192)


def test_special_tokens_are_control_tokens():
    found = gguf_tokenizer(changed(lambda one: one.add_special_tokens(["<end>"])), 8192)
    assert found.kinds[found.tokens.index("<end>")] == gguf.TokenType.CONTROL


def test_mixtures_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="a mixture of experts is not written as GGUF"):
        written(tmp_path / "out.gguf", MIXED)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_but_a_gguf_file_by_force(tmp_path):
    path = tmp_path / "out.gguf"
    path.write_text("mine")
    for replace in (False, True):
        with pytest.raises(ConfigError, match="is already there"):
            written(path, DENSE, replace=replace)
    assert path.read_text() == "mine"
    path.write_bytes(gguf_file.MAGIC)
    written(path, DENSE, replace=True)
    assert [one.name for one in tmp_path.iterdir()] == ["out.gguf"]
    assert fields_of(path)["general.name"] == "tiny"


def test_a_failure_leaves_nothing(tmp_path):
    def broken(name):
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskFault, match="No space left on device"):
        save_gguf(tmp_path / "out.gguf", DENSE, broken, byte_tokenizer_json(), None, ABOUT)
    assert list(tmp_path.iterdir()) == []
