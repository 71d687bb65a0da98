"""`generate`, `chat` and `eval --sample`: text from what a home or a folder holds; every refusal is one line."""

import io
import json
import subprocess
import sys

import pytest
import torch

from atoll.cli.model_source import printable
from atoll.node.checkpoint.local import LocalBody, begin_local
from atoll.node.config.home import Home
from atoll.node.learning.model import bridge
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.local.control_messages import EvaluationResult
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import open_run
from tests.later import GROUP

pytestmark = GROUP

LIKELIEST = ("--max-tokens", "8", "--temperature", "0")


@pytest.fixture
def run(atoll, tmp_path):
    """A run of a home whose worker saved round 7."""
    made = atoll("run", "new", "tiny", "--data", "synthetic:markov", "--seed", "1")
    assert made.code == 0, made.err
    spec = open_run((tmp_path / "home/runs/tiny.run").read_bytes())
    theta = {name: torch.from_numpy(value) * 8 for name, value in genesis(spec.model, 5).items()}
    arena_C4096 = bridge.gather(theta, arena_of(spec.model))
    folder = Home(tmp_path / "home").run(spec.id)
    body = LocalBody(spec.id, 7, state_digest(arena_C4096), 1, ())
    begin_local(folder / "state", body, {"final": arena_C4096}).finish()
    return spec


def test_a_home_and_its_export_write_the_same_text(atoll, tmp_path, run):
    here = atoll("generate", "To be", "--json", *LIKELIEST)
    assert here.code == 0, here.err
    said = json.loads(here.out)
    assert (said["type"], said["prompt_tokens"], said["tokens"], said["finish"]) == ("text", 5, 8, "length")
    assert said["model"].startswith("tiny: final round 7, digest ")
    assert atoll("generate", "To be", *LIKELIEST).out == said["text"] + "\n"
    assert atoll("export", "hf", str(tmp_path / "out")).code == 0
    there = atoll("generate", "To be", "--from-hf", str(tmp_path / "out"), *LIKELIEST)
    assert there.out == said["text"] + "\n"
    assert there.err == f"{tmp_path / 'out'}: 549,760 parameters\n"


def test_a_prompt_from_standard_input(atoll, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be"))
    assert atoll("generate", "-", *LIKELIEST).out == atoll("generate", "To be", *LIKELIEST).out


def test_a_conversation_without_a_template_says_so(atoll, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n" + "x" * 200 + "\nagain\n"))
    ran = atoll("chat", "--json", *LIKELIEST)
    assert ran.code == 0
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert len(answers) == 2
    assert answers[0]["prompt_tokens"] == len("User: hello\nAssistant:")
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"], "the first turn is still there"
    assert "this model has no chat template: it continues lines of `User:` and `Assistant:`\n" in ran.err
    assert "error: the message is longer than 120 tokens, which is what the model reads; shorten it\n" in ran.err


def test_the_oldest_turns_of_a_long_conversation_go(atoll, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 60 + "\n" + "b" * 60 + "\n"))
    ran = atoll("chat", *LIKELIEST)
    assert ran.code == 0
    assert "the model forgets the oldest 2 messages\n" in ran.err


def test_a_sample_of_the_run_that_was_trained_last(atoll, tmp_path, run, monkeypatch):
    loss = EvaluationResult(7, 3.25, 2.25)
    monkeypatch.setattr("atoll.node.import_export.evaluate_saved.evaluate_saved", lambda *_: loss)
    (Home(tmp_path / "home").run(run.id) / "rounds.jsonl").touch()
    line, text = atoll("eval", "--sample").out.split("\n", 1)
    assert "after round 7" in line
    assert text.strip()
    assert json.loads(atoll("eval", "--sample", "--json").out)["sample"]
    assert "sample" not in json.loads(atoll("eval", "--json").out)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_interrupt_ends_in_good_order(atoll, run, monkeypatch, command):
    from atoll.node.generation.language_model import LanguageModel

    def interrupted(_model, _prompt, _options, emit):
        emit("To b")
        raise KeyboardInterrupt

    monkeypatch.setattr(LanguageModel, "generate", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    ran = atoll(*([command, "To be"] if command == "generate" else [command]))
    assert (ran.code, ran.out) == (130, "To b\n")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "args", [["generate", "x"], ["generate", "x", "--run", "tiny"], ["chat"], ["eval", "--sample"]]
)
def test_without_weights_it_is_one_line(atoll, args):
    ran = atoll(*args)
    assert ran.code in (3, 78)
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(atoll, tmp_path, run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("atoll.node.generation.l")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("atoll.node.generation.loading", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    ran = atoll("generate", "x")
    assert (ran.code, ran.out) == (78, "")
    assert ran.err == "error: text needs the package transformers; pip install 'atoll[generate]'\n"


@pytest.mark.parametrize(
    "args", [["--max-tokens", "0"], ["--temperature", "-1"], ["--top-p", "0"], ["--top-k", "-1"], ["--seed", "x"]]
)
def test_wrong_options_are_usage(atoll, args):
    ran = atoll("generate", "x", *args)
    assert ran.code == 2
    assert args[0] in ran.err


@pytest.mark.parametrize(
    "args",
    [
        *(
            ["generate", "--help"],
            ["chat", "--help"],
            ["generate", "x", "--top-p", "2"],
            ["export", "hf", "--fource"],
        ),
        *(["export", kind, "x"] for kind in ("hf", "gguf", "peft")),
        *(["checkpoint", verb, "none"] for verb in ("join", "show", "restore")),
    ],
)
def test_help_and_usage_load_no_torch(tmp_path, args):
    """Nor does an export of a run that is not there, or a checkpoint that is not: torch takes seconds."""
    code = "import sys; from atoll.cli.command_group import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    line = [sys.executable, "-c", code, "--home", str(tmp_path / "home"), *args]
    ran = subprocess.run(line, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ran.stdout.splitlines()[-1] == "False"


def test_a_model_cannot_write_to_the_terminal():
    assert printable("a\x1b[2J\n\tb\x9b\x07c\r\x00") == "a\ufffd[2J\n\tb\ufffd\ufffdc\ufffd\ufffd"


def test_a_terminal_gets_no_escape_sequences(atoll, run, monkeypatch):
    """The byte model of the test writes them sooner or later; a pipe gets them as they are."""
    args = ("generate", "a", "--temperature", "100", "--seed", "1", "--max-tokens", "64")
    piped = atoll(*args).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert atoll(*args).out == printable(piped) != piped
