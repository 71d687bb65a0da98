"""Runs are signed files: made once, found by name, id or path, refused when they do not verify."""

import json
import os

import msgspec
import pytest

from atoll.cli.runs import draft
from atoll.cli.runs.changes import with_changes
from atoll.node.config.home import Home
from atoll.node.learning.data.dataset import GivenTokenizer, open_dataset
from atoll.node.learning.data.given import vocab_of
from atoll.node.runs.capacity.machine_fit import Machine
from atoll.node.runs.presets import continuation_of, preset
from atoll.node.runs.run_files import read_run
from atoll.p2p.blobs.store import BLOBS, BlobStore
from atoll.protocols.ids import peer_id_of
from atoll.protocols.local.control_messages import Room
from atoll.protocols.run.run_spec import open_run
from tests.node.daemon.published import qwen_like

MARKOV = ("--data", "synthetic:markov", "--seed", "1")
TEN = preset("10m", peer_id_of(bytes(32)), 1)
MIXTURE = preset("moe-12m", peer_id_of(bytes(32)), 1)


def made(atoll, name="tiny", *args):
    ran = atoll("run", "new", name, *MARKOV, *args, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_new_writes_a_signed_run_of_ours(atoll, tmp_path):
    about = made(atoll)
    spec = open_run((tmp_path / "home/runs/tiny.run").read_bytes())
    assert spec.id.hex() == about["run"]
    assert spec.name == "tiny"
    assert spec.owner == json.loads(atoll("id", "show", "--json").out)["peer"]
    assert len(spec.data.digest) == 32
    assert about["parameters"] == spec.model.parameters == 549_760
    assert about["parameters"] * 4 / about["payload_bytes"] > 100


def test_set_reaches_every_depth(atoll):
    spec = made(atoll, "t", "--set", "outer.rounds=7", "--set", "outer.stages=[[0,3]]", "--set", "inner.lr=0.001")[
        "spec"
    ]
    assert (spec["outer"]["rounds"], spec["outer"]["stages"], spec["inner"]["lr"]) == (7, [[0, 3]], 0.001)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ((), ("muon", 2.0)),
        (("inner.optimizer=adamw",), ("adamw", None)),
        (("inner.optimizer=muon",), ("muon", 2.0)),
        (("inner.muon_lr=4", "inner.optimizer=muon"), ("muon", 4.0)),
    ],
)
def test_the_presets_numbers_of_muon_go_with_it(atoll, changes, found):
    words = [word for change in changes for word in ("--set", change)]
    inner = made(atoll, "t", *words)["spec"]["inner"]
    assert (inner.get("optimizer", "adamw"), inner.get("muon_lr")) == found


def test_a_number_of_muon_that_the_user_gave_is_not_dropped(atoll):
    ran = atoll("run", "new", "t", *MARKOV, "--set", "inner.muon_lr=2", "--set", "inner.optimizer=adamw")
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "inner.muon_lr is for runs with inner.optimizer muon" in ran.err


@pytest.mark.parametrize("rounds", ["54", "100"])
def test_a_decay_is_in_the_runs_last_steps_however_many_there_are(atoll, rounds):
    inner = made(atoll, "t", "--set", f"outer.rounds={rounds}")["spec"]["inner"]
    assert (inner["total_steps"], inner["decay_256"]) == (16 + 8 * (int(rounds) - 8), 54)


def test_a_rates_end_that_the_user_gave_stays(atoll):
    words = ("--set", "inner.total_steps=300", "--set", "outer.rounds=60")
    assert made(atoll, "t", *words)["spec"]["inner"]["total_steps"] == 300


@pytest.mark.parametrize(
    ("change", "total_steps", "said"),
    [
        ("outer.rounds=1000", 14800, "at step 14800"),
        ("outer.stages=[[0,30]]", 12000, "at step 12000"),
        ("outer.holders=0", 5800, "at step 5800"),
    ],
)
def test_a_cosine_ends_with_the_run(atoll, change, total_steps, said):
    inner = made(atoll, "t", "--preset", "10m", "--set", change)["spec"]["inner"]
    assert (inner["total_steps"], "decay_256" in inner) == (total_steps, False)
    assert said in atoll("run", "show", "t").out


@pytest.mark.parametrize(
    ("changes", "warmup_steps"),
    [
        (("outer.rounds=27",), 8),  # 168 of 384 steps
        (("outer.rounds=1",), 1),
        (("outer.rounds=108",), 20),
        (("outer.rounds=27", "inner.warmup_steps=20"), 20),
        (("outer.rounds=27", "inner.total_steps=384"), 20),
        (("outer.rounds=27", "inner.warmup_steps=0"), 0),
    ],
)
def test_a_shorter_run_warms_up_for_the_same_share_of_its_steps(atoll, changes, warmup_steps):
    words = [word for change in changes for word in ("--set", change)]
    assert made(atoll, "t", *words)["spec"]["inner"]["warmup_steps"] == warmup_steps


def test_a_run_that_continues_another_has_its_warm_up():
    rest = continuation_of(TEN, 100)
    assert with_changes(rest, ("outer.rounds=20",)).inner.warmup_steps == rest.inner.warmup_steps


@pytest.mark.parametrize(
    ("changes", "expert_lr"),
    [
        (("outer.holders=1",), 2.0),
        (("outer.holders=2",), None),
        (("outer.holders=0",), None),
        (("outer.holders=1", "inner.expert_lr=1.5"), 1.5),
        (("outer.holders=1", "inner.expert_lr=1"), None),
        (("outer.holders=1", "inner.optimizer=muon"), None),
    ],
)
def test_experts_with_one_holder_have_the_rate_that_helped(changes, expert_lr):
    inner = with_changes(MIXTURE, changes).inner
    assert inner.expert_lr == (expert_lr or 1.0)


def test_a_run_that_continues_another_has_its_rate_of_experts():
    rest = continuation_of(MIXTURE, 100)
    assert with_changes(rest, ("outer.holders=1",)).inner.expert_lr == 1.0


def test_a_cosine_that_is_given_or_continued_stays_as_it_is():
    given = with_changes(TEN, ("outer.rounds=1000", "inner.total_steps=300"))
    assert given.inner.total_steps == 300
    rest = continuation_of(TEN, 100)
    longer = with_changes(rest, ("outer.rounds=1000",))
    assert longer.inner == rest.inner


@pytest.mark.parametrize(
    ("decay", "said"),
    [
        ("inner.optimizer=adamw", "0.003 after 20 steps, on a cosine down to 0.0003 at step 384"),
        ("inner.decay_256=45", "0.003 after 20 steps, until step 321 (round 46); then down to 0.0003 at step 384"),
        ("inner.decay_256=0", "0.003 after 20 steps, until the end"),
    ],
)
def test_a_run_says_how_its_learning_rate_goes(atoll, decay, said):
    made(atoll, "t", "--set", decay)
    assert said in atoll("run", "show", "t").out


def test_what_goes_with_steps_without_gradients_is_set_with_them(atoll):
    spec = made(atoll, "t", "--set", "inner.optimizer=spsa", "--set", "inner.lr=0.0001")["spec"]
    assert spec["compress"] == {"codec": "scalar", "k": 8, "feedback": 0.0}
    assert (spec["reduce"], spec["outer"]["overlap_steps"], spec["inner"]["weight_decay"]) == (None, 0, 0.0)
    assert "muon_lr" not in spec["inner"]
    ran = atoll("run", "new", "u", *MARKOV, "--set", "inner.optimizer=spsa", "--set", "compress.codec=int8")
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "inner.optimizer spsa and compress.codec scalar go together" in ran.err
    ran = atoll("run", "new", "u", *MARKOV, "--set", "inner.optimizer=spsa", "--set", "outer.overlap_steps=2")
    assert "inner.optimizer spsa and outer.overlap_steps cannot go together" in ran.err


@pytest.mark.parametrize(
    "words", [("inner=5",), ("outer=5", "inner.optimizer=spsa"), ("outer.stages=3", "inner.optimizer=spsa")]
)
def test_a_value_of_another_type_is_refused_in_one_line_whatever_goes_with_it(atoll, words):
    ran = atoll("run", "new", "t", *MARKOV, *(word for change in words for word in ("--set", change)))
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "Expected" in ran.err


def test_set_turns_audits_on(atoll):
    spec = made(atoll, "t", "--set", "audit={}", "--set", "reduce=null", "--set", "audit.windows=32")["spec"]
    assert spec["audit"] == {"windows": 32, "lag": 2, "memory": 32}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("audit={}", "reduce and audit cannot go together"),
        ("outer.roundz=3", "unknown key outer.roundz; did you mean rounds?"),
        ("outr.rounds=3", "there is no outr.rounds"),
        ("outer.rounds=0", "Expected int >= 1 (key outer.rounds)"),
        ("outer.rounds=many", "key outer.rounds"),
        ("owner=me", "cannot be set"),
        ("rounds", "not a KEY=VALUE"),
        ("name=other", "cannot be set"),
        ('outer.merge={"every":4,"until":9,"alpha_4096":205}', "outer.merge is for runs whose model has experts"),
        ('outer.merge={"every":4}', "outer.merge"),
    ],
)
def test_set_refuses_what_no_run_has(atoll, tmp_path, change, said):
    ran = atoll("run", "new", "t", *MARKOV, "--set", change)
    assert ran.code == 78
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "home/runs/t.run").exists()


def test_fragments_lower_the_peak_and_leave_the_bytes(atoll):
    whole, parts = made(atoll, "whole"), made(atoll, "parts", "--fragments", "4")
    assert (parts["spec"]["outer"]["fragments"], parts["spec"]["reduce"]) == (4, None)
    assert parts["spec"]["outer"]["stages"] == [[0, 1], [16, 2]]
    assert parts["payload_bytes"] < 0.4 * whole["payload_bytes"]
    assert whole["payload_bytes"] == whole["exchange_bytes"]
    assert 0 <= parts["exchange_bytes"] - whole["exchange_bytes"] < 100
    assert "in 4 rounds, one for each fragment" in atoll("run", "show", "parts").out
    assert "a round and copy, 1" in atoll("run", "show", "whole").out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--fragments", "5"), "outer.fragments = 5 is outside 1 … 4"),
        (("--fragments", "2", "--set", "outer.fragments=2", "--set", "reduce=null"), "2 fragments already"),
    ],
)
def test_fragments_that_no_run_has_are_refused(atoll, args, said):
    ran = atoll("run", "new", "t", *MARKOV, *args)
    assert ran.code == 78
    assert said in ran.err


def test_a_name_is_taken_once(atoll, tmp_path):
    first = made(atoll)
    ran = atoll("run", "new", "tiny", *MARKOV)
    assert ran.code == 78
    assert "there is a run called 'tiny' here; choose another name" in ran.err
    assert json.loads(atoll("run", "show", "--json").out)["run"] == first["run"]


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x" * 65])
def test_names_that_cannot_be(atoll, name):
    assert atoll("run", "new", name, *MARKOV).code == 78


def test_show_finds_by_name_id_and_file(atoll, tmp_path):
    about = made(atoll)
    for wanted in ("tiny", about["run"], about["run"][:6], str(tmp_path / "home/runs/tiny.run")):
        assert json.loads(atoll("run", "show", wanted, "--json").out)["run"] == about["run"]
    assert "112 times less than fp32" in atoll("run", "show").out


def test_show_says_what_there_is(atoll, tmp_path):
    assert "make one with `atoll run new NAME`" in atoll("run", "show").err
    made(atoll, "one")
    made(atoll, "two")
    assert "known runs: one, two" in atoll("run", "show", "three").err
    assert "more than one run here; say which one" in atoll("run", "show").err
    assert [run["name"] for run in json.loads(atoll("run", "list", "--json").out)["runs"]] == ["one", "two"]
    assert atoll("run", "list").out.count("\n") == 3


def test_a_run_that_cannot_be_read_does_not_hide_the_others(atoll, tmp_path):
    made(atoll)
    about = json.loads(atoll("run", "show", "--json").out)
    (tmp_path / "home/runs/old.run").write_bytes(b"of another time")
    listed = atoll("run", "list", "--json")
    assert [run["name"] for run in json.loads(listed.out)["runs"]] == ["tiny"]
    assert listed.err.startswith("left out: ")
    assert listed.err.count("\n") == 1
    assert json.loads(atoll("run", "show", about["run"][:6], "--json").out) == about


def test_a_tampered_run_is_refused(atoll, tmp_path):
    made(atoll)
    path = tmp_path / "home/runs/tiny.run"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for command in (("run", "show", "tiny"), ("start", "--run", str(path))):
        ran = atoll(*command)
        assert ran.code == 78
        assert "is not a run that this node can train" in ran.err
        assert ran.err.count("\n") == 1


def text_file(folder):
    path = folder / "book.txt"
    path.write_text("It was a dark and stormy night. " * 2000)
    return path


def test_a_run_over_a_file_names_only_the_file(atoll, tmp_path):
    text = text_file(tmp_path)
    ran = atoll("run", "new", "t", "--data", f"file:{text}", "--seed", "1")
    assert ran.code == 0, ran.err
    said = "next       atoll start --run t; it prints an invite for others; each gives the path of its own copy"
    assert said in ran.out
    about = json.loads(atoll("run", "show", "--json").out)
    assert about["source"] == "file:book.txt"
    (kept,) = (tmp_path / "home/runs").glob("*.data")
    assert (kept.stem, kept.read_text()) == (about["run"], str(text)), "start asks for it no more"


def test_a_run_over_a_folder_of_rows_says_which_column_and_which_rows(atoll, tmp_path, monkeypatch):
    folder = tmp_path / "web"
    folder.mkdir()
    rows = [{"body": f"It was a dark and stormy night, no. {at}. ", "lang": "en"} for at in range(999)]
    (folder / "1.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    monkeypatch.chdir(tmp_path)
    ran = atoll("run", "new", "t", "--data", "web", "--column", "body", "--where", "lang=en", "--seed", "1")
    assert ran.code == 0, ran.err
    assert json.loads(atoll("run", "show", "--json").out)["source"] == "file:web?column=body&where=lang%3Den"
    (kept,) = (tmp_path / "home/runs").glob("*.data")
    assert kept.read_text() == str(folder)


@pytest.mark.parametrize(
    ("name", "preset", "vocab"), [("bytes", "50m", 256), ("bpe8k", "tiny", 8192), ("bytes", "moe-smoke", 256)]
)
def test_a_built_in_tokenizer_may_be_chosen(atoll, tmp_path, name, preset, vocab):
    ran = atoll("run", "new", "t", *MARKOV, "--preset", preset, "--tokenizer", name, "--even-if-too-large")
    assert ran.code == 0, ran.err
    spec = read_run(tmp_path / "home/runs/t.run").spec
    assert (spec.data.tokenizer, spec.model.vocab, spec.data.tokenizer_blob) == (name, vocab, b"")


def test_a_tokenizer_of_ones_own_travels_with_the_run(atoll, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(qwen_like().to_str())
    ran = atoll("run", "new", "t", "--seed", "1", "--tokenizer", str(path), "--data", str(text_file(tmp_path)))
    assert ran.code == 0, ran.err
    spec = read_run(tmp_path / "home/runs/t.run").spec
    assert spec.data.tokenizer == "file"
    assert spec.model.vocab == vocab_of(path.read_bytes())
    blob = BlobStore(Home(tmp_path / "home").run(spec.id) / BLOBS).path(spec.data.tokenizer_blob)
    assert blob.read_bytes() == path.read_bytes()
    data = open_dataset(
        spec.data, spec.model.context, str(tmp_path / "book.txt"), tmp_path, GivenTokenizer(blob, spec.model.vocab)
    )
    assert data.digest == spec.data.digest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokenizer", "no.json"), "no tokenizer at no.json"),
        (("--tokenizer", "."), "no tokenizer at ."),
        (("--tokenizer", "odd.json"), "tokenizer.json is not JSON"),
        (("--tokenizer", "bytes", "--from-hf", "x"), "drop --tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_one_line(atoll, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.json").write_text("odd")
    ran = atoll("run", "new", "t", *MARKOV, *words)
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert said in ran.err
    assert not (tmp_path / "home").exists()


def test_a_tokenizer_that_is_a_pipe_is_to_be_saved_first(atoll, tmp_path):
    os.mkfifo(tmp_path / "piped.json")
    ran = atoll("run", "new", "t", *MARKOV, "--tokenizer", str(tmp_path / "piped.json"))
    assert ran.code == 78
    assert ran.err.endswith("piped.json is not a file; save the tokenizer as a file, and give its path\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "builtin:shakespeare", "--column", "body"), "has no columns"),
        (("--where", "lang=en"), "has no columns"),
        (("--data", "x.jsonl", "--where", "lang"), "not COLUMN=VALUE"),
        (("--data", "x.jsonl", "--where", "text=en"), "not COLUMN=VALUE of another column"),
        (("--data", "x.jsonl", "--where", "a=1", "--where", "a=2"), "--where is given 2 times"),
        (("--data", "hf:org/name"), "atoll data pack hf:org/name --out DIR"),
    ],
)
def test_what_says_nothing_of_a_text_is_one_line(atoll, tmp_path, words, said):
    ran = atoll("run", "new", "t", *words)
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert said in ran.err
    assert not (tmp_path / "home").exists()


def test_show_says_what_slices_of_a_dense_model_cost(atoll):
    sliced = ("--preset", "tiny", "--set", "model.ffn_slices=5", "--set", "outer.holders=1")
    about = made(atoll, "sliced", *sliced, "--set", "reduce=null")["costs"]
    assert (about["experts"], about["room"]["of"]) == (1, 5)
    assert about["payload_bytes"] < 0.6 * about["whole_payload_bytes"]
    assert "slices     your share is 1 of 5 in each layer" in atoll("run", "show").out
    refused = atoll("run", "new", "other", "--preset", "tiny", "--set", "model.ffn_slices=4", *MARKOV)
    assert (refused.code, refused.err.count("\n")) == (78, 1)
    assert "model.ffn_slices = 4" in refused.err


def test_show_says_what_a_share_costs_and_what_all_experts_would(atoll, tmp_path):
    shared = ("--preset", "moe-smoke", "--set", "outer.holders=1")
    about = made(atoll, "moe", *shared)["costs"]
    assert (about["experts"], about["members"]) == (1, 8)
    assert about["payload_bytes"] < about["whole_payload_bytes"] / 3
    assert about["needs"]["host"] < about["whole"]["host"]
    assert about["room"]["of"] == 8
    shown = atoll("run", "show").out
    assert "your share is 1 of 8 in each layer: 8 members assumed, 1 holder each" in shown
    assert "(all experts: 67.9 kB)" in shown
    (tmp_path / "home/config.toml").write_text('experts = 5\ndevice = "cpu"\n')
    shown = atoll("run", "show").out
    assert "your share is 5 of 8 in each layer: at most, as `experts` in config.toml allows" in shown
    (tmp_path / "home/config.toml").write_text("expert = 5\n")
    assert atoll("run", "new", "other", *MARKOV).code == 78, "before anything is written"
    assert not (tmp_path / "home/runs/other.run").exists()


def test_show_counts_the_members_that_the_node_knows(atoll, daemon):
    about = made(atoll, "moe", "--preset", "moe-smoke", "--set", "outer.holders=1")
    room = Room(experts=3, of=8, free_bytes=1, place="memory")
    daemon.operator.state = msgspec.structs.replace(daemon.operator.state, run=about["run"], members=4, room=room)
    assert json.loads(atoll("run", "show", "--json").out)["costs"]["experts"] == 2
    shown = atoll("run", "show").out
    assert "2 of 8 in each layer: 4 members, 1 holder each" in shown
    assert "TOO LITTLE" not in shown, "its worker has some of what is free"


def test_a_run_whose_members_train_all_says_nothing_of_shares(atoll):
    about = made(atoll)["costs"]
    assert (about["experts"], about["room"], about["needs"]) == (None, None, about["whole"])
    assert "experts" not in atoll("run", "show").out


def test_missing_data_is_one_line(atoll, tmp_path):
    ran = atoll("run", "new", "t", "--data", f"file:{tmp_path}/no.txt")
    assert ran.code == 78
    assert "no.txt" in ran.err
    assert ran.err.count("\n") == 1
    assert atoll("run", "new", "t", "--data", "nonsense:x").code == 78


def test_id_is_made_once(atoll, tmp_path):
    first = atoll("id", "show").out
    assert first.startswith("12D3KooW")
    assert atoll("id", "show").out == first
    assert (tmp_path / "home/identity.key").stat().st_mode & 0o777 == 0o600


HUGE = ("--set", "model.layers=512", "--set", "model.dim=4096", "--set", "model.ffn=16384")
"""No machine has so much memory."""


def test_a_run_that_this_machine_can_never_train_is_refused_before_anything_is_written(atoll, tmp_path):
    ran = atoll("run", "new", "big", *MARKOV, *HUGE)
    assert ran.code == 78
    (line,) = ran.err.splitlines()
    assert line.startswith("error: this machine cannot train 'big': it needs ")
    best = json.loads(atoll("doctor", "--fit", "--json").out)["largest"]
    assert f"; choose --preset {best}, the largest that fits, or give --even-if-too-large" in line
    assert list(tmp_path.iterdir()) == [], "neither home nor key"


def test_who_says_so_may_make_it_for_others(atoll):
    ran = atoll("run", "new", "big", *MARKOV, *HUGE, "--even-if-too-large")
    assert ran.code == 0
    assert ran.err.startswith("warning: this machine cannot train this run: it needs ")
    assert "TOO LITTLE" in ran.out


def test_memory_that_others_use_is_a_warning(atoll, monkeypatch):
    whole = Machine(1 << 50, 1 << 50, "cpu")
    for machine, said in (
        (whole, ""),
        (
            msgspec.structs.replace(whole, memory_free_bytes=1 << 20),
            "warning: this machine cannot train this run while other programs use its memory: it needs ",
        ),
    ):
        monkeypatch.setattr(draft, "measure_machine", lambda *_, machine=machine: machine)
        ran = atoll("run", "new", f"small{len(said)}", *MARKOV)
        assert ran.code == 0
        assert ran.err.startswith(said)
        assert bool(ran.err) == bool(said)
