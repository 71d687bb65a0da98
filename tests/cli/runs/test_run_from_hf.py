"""`atoll run new --from-hf`: what cannot be used is one line and an exit code, and leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, open_run
from tests.later import GROUP
from tests.node.daemon.published import TEXT, publish, qwen_like, size, teach, trained

pytestmark = GROUP

MARKOV = ("--data", "synthetic:markov", "--seed", "1")
WEIGHTS = "model.safetensors"
ATOM = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def hf(tmp_path):
    publish(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def new(atoll, tmp_path, hf):
    """Weights that were never trained know nothing of any text."""
    return lambda *args: atoll("run", "new", "given", *MARKOV, "--from-hf", str(hf), "--without-fit", *args)


def left(tmp_path):
    """Everything of the home but the key."""
    return {path.name for path in (tmp_path / "home").rglob("*")} - {"runs", "identity.key"}


def config(hf, **changes):
    path = hf / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(hf, change):
    tensors = load_file(hf / WEIGHTS)
    change(tensors)
    save_file(tensors, hf / WEIGHTS)


def test_a_run_and_its_two_files_are_there(new, atoll, tmp_path):
    ran = new("--json")
    assert ran.code == 0, ran.err
    spec = open_run((tmp_path / "home/runs/given.run").read_bytes())
    said = json.loads(ran.out)
    assert said["run"] == spec.id.hex()
    assert said["start"] == spec.start.state.hex()
    assert left(tmp_path) == {
        "given.run", spec.id.hex(), "blobs",
        *(f"{blob.hex()}.{ending}" for blob in spec.given for ending in ("blob", "manifest")),
    }  # fmt: skip
    assert spec.data.tokenizer == "file"
    assert (spec.model.head_dim, spec.model.context) == (24, 48)
    shown = atoll("run", "show", "given")
    assert f"weights    given: blob {spec.start.weights.hex()[:16]}" in shown.out


def test_experts_are_made_and_the_context_is_set(new, tmp_path):
    ran = new("--upcycle", "experts=4,per_token=2,noise_shift=6", "--set", "model.context=16")
    assert ran.code == 0, ran.err
    model = open_run((tmp_path / "home/runs/given.run").read_bytes()).model
    assert (model.experts.count, model.experts.per_token, model.context) == (4, 2, 16)


@pytest.mark.parametrize(("layers", "more"), [(128, ()), (32, ("--upcycle", "experts=4,per_token=2"))])
def test_a_run_that_this_machine_can_never_train_is_refused_before_weights_are_read(
    new, hf, tmp_path, layers, more
):
    config(hf, hidden_size=8192, intermediate_size=32768, num_hidden_layers=layers)
    (hf / WEIGHTS).unlink()
    ran = new(*more)
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert ran.err.startswith("error: this machine cannot train 'given': it needs ")
    assert not (tmp_path / "home").exists(), "neither home nor key"


def test_experts_may_be_shared_among_members(new, tmp_path):
    """The preset `tiny` reduces its large rounds, which goes with whole payloads only."""
    ran = new("--preset", "tiny", "--upcycle", "experts=4,per_token=2", "--set", "outer.holders=1")
    assert ran.code == 0, ran.err
    spec = open_run((tmp_path / "home/runs/given.run").read_bytes())
    assert (spec.outer.holders, spec.reduce) == (1, None)


def test_a_dense_folder_keeps_the_recipe(new, tmp_path):
    assert new("--preset", "tiny").code == 0
    assert open_run((tmp_path / "home/runs/given.run").read_bytes()).reduce is not None


def test_special_tokens_stay_when_the_recipe_is_changed(new, hf, tmp_path):
    told = {"eos_token_id": [3, 1], "temperature": 1, "do_sample": True}
    (hf / "generation_config.json").write_text(json.dumps(told))
    assert new("--set", "model.context=16").code == 0
    found = open_run((tmp_path / "home/runs/given.run").read_bytes()).serving
    assert (found.eos, found.sampling.temperature, found.sampling.do_sample) == ((3, 1), 1.0, True)


BAD = {
    "a config": (lambda hf: config(hf, model_type="mamba"), "model_type 'mamba'"),
    "a scaled rope": (lambda hf: config(hf, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "'yarn'"),
    "a missing config": (lambda hf: (hf / "config.json").unlink(), "config.json: No such file"),
    "a missing atom": (lambda hf: weights(hf, lambda t: t.pop(ATOM)), f"lacks {ATOM}"),
    "an extra atom": (lambda hf: weights(hf, lambda t: t.update(more=t[ATOM].clone())), "more is no part"),
    "a turned atom": (lambda hf: weights(hf, lambda t: t.update({ATOM: t[ATOM].T.contiguous()})), "has the shape"),
    "an integer atom": (lambda hf: weights(hf, lambda t: t.update({ATOM: t[ATOM].int()})), "is I32"),
    "NaN": (lambda hf: weights(hf, lambda t: t[ATOM].fill_(float("nan"))), "NaN or outside"),
    "cut off": (lambda hf: (hf / WEIGHTS).write_bytes((hf / WEIGHTS).read_bytes()[:-9]), "safetensors file"),
    "no weights": (lambda hf: (hf / WEIGHTS).unlink(), "No such file"),
    "an index outside": (
        lambda hf: (hf / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        "not the name of a shard",
    ),
    "no tokenizer": (lambda hf: (hf / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "a tokenizer that is none": (lambda hf: (hf / "tokenizer.json").write_text("{}"), "byte-pair"),
    "an end that is no token": (
        lambda hf: (hf / "generation_config.json").write_text('{"eos_token_id": 99999}'), "99999 is no token",
    ),
    "a large template": (
        lambda hf: (hf / "chat_template.jinja").write_text("x" * (16 << 10) + "x"), "more than 16 KiB",
    ),
    "a large tokenizer": (
        lambda hf: os.truncate(hf / "tokenizer.json", TOKENIZER_MAX_BYTES + 1), "more than 32 MiB",
    ),
    "a folder as tokenizer": (
        lambda hf: ((hf / "tokenizer.json").unlink(), (hf / "tokenizer.json").mkdir()), "is not a file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_cannot_be_used_leaves_nothing(new, hf, tmp_path, name):
    damage, said = BAD[name]
    damage(hf)
    ran = new()
    assert ran.code in (1, 78)
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--set", "model.layers=1"), "only model.context can be set"),
        (("--set", "model.context=49"), "only model.context can be set; to at most 48"),
        (("--set", "start.state=1"), "cannot be set"),
        (("--set", "serving.bos=1"), "cannot be set"),
        (("--upcycle", "experts=4"), "experts=E,per_token=K"),
        (("--upcycle", "experts=4,per_token=x"), "'per_token=x'"),
        (("--upcycle", "experts=4,per_token=9"), "per_token = 9"),
        (("--upcycle", "experts=4,per_token=2,colour=3"), "'colour=3'"),
    ],
)
def test_options_that_cannot_be_leave_nothing(new, tmp_path, args, said):
    ran = new(*args)
    assert ran.code == 78
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert left(tmp_path) == set()


def test_experts_need_given_weights(atoll, tmp_path):
    ran = atoll("run", "new", "t", *MARKOV, "--upcycle", "experts=4,per_token=2")
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "--from-hf" in ran.err


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught") / "hf"
    publish(folder)
    assert teach(folder) < 1
    return folder


@pytest.fixture
def known(atoll, tmp_path, hf, taught):
    """A run of weights that know its text."""
    shutil.copytree(taught, hf, dirs_exist_ok=True)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    return lambda *args: atoll("run", "new", "given", "--data", f"file:{text}", "--from-hf", str(hf), *args)


def test_weights_and_their_own_tokenizer_are_taken_without_a_word(known):
    ran = known()
    assert (ran.code, ran.err) == (0, "")


def test_experts_made_of_them_too(known):
    ran = known("--upcycle", "experts=4,per_token=2,noise_shift=6")
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("damage", ["a foreign tokenizer", "another text", "damaged weights"])
def test_what_does_not_fit_is_refused_unless_it_is_wanted(known, hf, tmp_path, damage):
    if damage == "a foreign tokenizer":
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
        foreign = trained(cut, text=Path(__file__).read_text(), vocab=size(qwen_like()))
        foreign.save(str(hf / "tokenizer.json"))
    elif damage == "another text":
        (tmp_path / "text.txt").write_text("zyx wvu " * 9999)
    else:
        weights(hf, lambda t: t[ATOM].fill_(127.0))
    ran = known()
    assert ran.code == 78
    assert "weights and tokenizer do not fit: on the run's text they need" in ran.err
    assert "--without-fit" in ran.err
    assert ran.err.count("\n") == 1
    assert left(tmp_path) == set()
    ran = known("--without-fit")
    assert ran.code == 0
    assert ran.err.startswith("warning: weights and tokenizer do not fit")
    assert ran.err.count("\n") == 1


def test_a_fit_is_one_of_given_weights(atoll):
    ran = atoll("run", "new", "t", *MARKOV, "--without-fit")
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "--from-hf" in ran.err


def test_a_text_of_nothing_is_refused(known, tmp_path):
    (tmp_path / "text.txt").write_text("a")
    ran = known()
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert left(tmp_path) == set()


LIMITED = """
import resource, sys
from atoll.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_is_full_half_way_leaves_nothing(hf, tmp_path):
    """The weights have 220 kB. The limit is a child's own."""
    args = ("--home", str(tmp_path / "home"), "run", "new", "given", *MARKOV, "--from-hf", str(hf))
    ran = subprocess.run([sys.executable, "-c", LIMITED, *args], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert "file size limit" in ran.stderr
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        (
            "Qwen/Qwen3-0.6B",
            "Qwen/Qwen3-0.6B is no folder here, and atoll downloads no models",
            "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B --include '*.json' '*.jinja' '*.safetensors'`, "
            "then Qwen3-0.6B",
        ),
        (
            "no/such/folder",
            "no/such/folder is no folder",
            "give a folder with config.json, safetensors, tokenizer.json",
        ),
        ("../a/b", "../a/b is no folder", "give a folder with config.json, safetensors, tokenizer.json"),
    ],
)
def test_a_name_of_the_hub_is_said_with_what_to_download(atoll, tmp_path, name, said, hint):
    for command in (("run", "new", "given"), ("generate", "x")):
        ran = atoll(*command, "--from-hf", name)
        assert (ran.code, ran.err) == (78, f"error: {said}; {hint}\n")
    assert not (tmp_path / "home").exists()
