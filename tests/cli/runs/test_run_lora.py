"""`atoll run new --from-hf … --set model.lora_rank=…`: imported weights become the frozen base of a LoRA run."""

import json
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from atoll.protocols.run.run_spec import open_run
from tests.later import GROUP, transformers
from tests.node.daemon.published import publish

pytestmark = GROUP

MARKOV = ("--data", "synthetic:markov", "--seed", "1")
RANK = ("--set", "model.lora_rank=4")


def refused(ran, *said):
    """One line on stderr, and the exit code of bad input."""
    assert ran.code == 78, ran.err
    assert ran.err.count("error: ") == 1
    assert "Traceback" not in ran.err
    assert all(words in ran.err for words in said), ran.err


@pytest.fixture
def new(atoll, tmp_path):
    publish(tmp_path / "hf")
    return lambda *args: atoll(
        "run", "new", "given", *MARKOV, "--from-hf", str(tmp_path / "hf"), "--without-fit", *args
    )


def test_the_weights_become_the_base(new, atoll, tmp_path):
    made = new(*RANK, "--set", "model.lora_alpha=8", "--json")
    assert made.code == 0, made.err
    said = json.loads(made.out)
    spec = open_run((tmp_path / "home" / "runs" / "given.run").read_bytes())
    assert not spec.start
    assert said["base"] == spec.base.hex()
    assert (tmp_path / "home" / "runs" / spec.id.hex() / "blobs" / f"{spec.base.hex()}.blob").is_file()
    assert said["parameters"] == spec.model.parameters < spec.model.base.parameters
    shown = atoll("run", "show").out
    frozen = f"{spec.model.base.parameters:,} frozen"
    assert f"{spec.model.parameters:,} parameters of adapters, {frozen}" in shown
    assert f"frozen base: blob {spec.base.hex()[:16]}" in shown
    refused(atoll("export", "peft", str(tmp_path / "to")), "there are no weights of 'given' in this home yet")


REFUSED = [
    (("--set", "model.lora_rank=33"), "above the smaller side of q_proj.weight, 32"),
    ((*RANK, "--set", "model.lora_targets=embed_tokens"), "embedding and head are frozen"),
    ((*RANK, "--set", "inner.optimizer=muon"), "model.lora_rank and inner.optimizer muon cannot go together"),
    ((*RANK, "--set", "model.layers=1"), "or model.lora_rank, to train adapters"),
    ((*RANK, "--upcycle", "experts=4,per_token=2"), "model.lora_rank and model.experts cannot go together"),
    ((*RANK, "--set", "base=00"), "base cannot be set"),
    (("--set", "model.lora_alpha=8"), "are for runs with model.lora_rank"),
]


@pytest.mark.parametrize(("args", "why"), REFUSED, ids=[args[-1] for args, _ in REFUSED])
def test_bad_settings_are_one_line_and_leave_nothing(new, tmp_path, args, why):
    refused(new(*args), why)
    assert not list((tmp_path / "home" / "runs").glob("*.run"))


def test_adapters_of_keys_that_were_halved_are_refused(atoll, tmp_path):
    """They would not fit the published weights, for which `export peft` writes them."""
    publish(tmp_path / "qwen2", transformers.Qwen2Config, head_dim=16)
    path = tmp_path / "qwen2/model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_proj.bias"][0] = 300.0
    save_file(tensors, path, metadata={"format": "pt"})
    new = partial(atoll, "run", "new", "given", *MARKOV, "--from-hf", str(tmp_path / "qwen2"), "--without-fit")
    refused(new(*RANK), "keys were halved", "set model.lora_targets=ffn")
    assert not list((tmp_path / "home" / "runs").glob("*.run"))
    made = new(*RANK, "--set", "model.lora_targets=ffn")
    assert made.code == 0, made.err


def test_a_run_without_imported_weights_has_no_adapters(atoll):
    ran = atoll("run", "new", "tiny", *MARKOV, *RANK)
    refused(ran, "model.lora_rank needs imported weights", "--from-hf")


def test_a_run_that_trains_all_has_no_adapter_to_export(atoll, tmp_path):
    assert atoll("run", "new", "tiny", *MARKOV).code == 0
    refused(atoll("export", "peft", str(tmp_path / "to")), "'tiny' has no adapter: it trains the whole model")
