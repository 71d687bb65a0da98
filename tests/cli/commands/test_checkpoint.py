"""`atoll checkpoint` and `run new --from-checkpoint`: what a user sees, and that failures are one line."""

import json
from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from atoll.cli.runs.draft import must_have_text
from atoll.node.checkpoint.local import load_local
from atoll.node.config.home import Home, hold_lock
from atoll.node.daemon.assets.feed_recovery import read_mark
from atoll.node.import_export.restore_node import restore_node
from atoll.node.import_export.save_shard import save_shard
from atoll.node.learning.data.dataset import measured
from atoll.node.runs.run_files import find_run
from atoll.p2p.system.atomic_files import write_whole
from atoll.p2p.system.key_file import load
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.run_spec import open_run, sign_run
from atoll_bench.experts.experts_members import identity_of, seed_of
from tests.node.import_export.test_join_shards import RUN, SIGNED, saved, trained
from tests.node.worker.session_home import SPEC


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("two") / "homes", count=2, rounds=1)


@pytest.fixture
def home(tmp_path, two):
    """The home of member 0."""
    root = tmp_path / "home"
    (root / "runs").mkdir(parents=True)
    write_whole(root / "identity.key", seed_of(0))
    write_whole(root / "runs/session.run", SIGNED)
    (root / "runs" / RUN.id.hex()).symlink_to(two.home(0))
    return root


def test_save_join_show_and_go_on(atoll, home, two, tmp_path):
    to = str(tmp_path / "saved")
    done = atoll("checkpoint", "save", to)
    assert done.code == 0, done.err
    assert "round 0" in done.out
    refused = atoll("checkpoint", "join", to)
    assert (refused.code, refused.err.count("\n")) == (78, 1)
    assert "nobody's shard has expert" in refused.err
    (tmp_path / "saved" / f"{identity_of(0).peer_id}.json").unlink()
    (tmp_path / "saved" / f"{identity_of(0).peer_id}.safetensors").unlink()
    saved(two, tmp_path / "saved")
    done = atoll("checkpoint", "join", to)
    assert "of 2 nodes" in done.out
    assert "signed by 2 of the 2 members" in done.out
    shown = json.loads(atoll("checkpoint", "show", to, "--json").out)
    assert shown["manifest"]["run"] == RUN.id.hex()
    made = atoll("run", "new", "on", "--from-checkpoint", to, "--set", "outer.holders=2", "--json")
    assert made.code == 0, made.err
    spec = open_run((home / "runs/on.run").read_bytes())
    assert spec.start.state.hex() == shown["manifest"]["state"]
    assert (spec.outer.holders, spec.data, spec.outer.rounds) == (2, spec.data, RUN.outer.rounds - 1)
    blobs = {path.name for path in (home / "runs" / spec.id.hex() / "blobs").glob("*.blob")}
    assert blobs == {f"{blob.hex()}.blob" for blob in spec.given}
    assert f"moments {spec.start.moments.hex()[:16]}" in atoll("run", "show", "on").out
    longer = ("--set", "outer.rounds=90", "--set", "inner.decay_256=5", "--set", "outer.holders=2")
    made = atoll("run", "new", "longer", "--from-checkpoint", to, *longer)
    assert made.code == 0, made.err
    longer = open_run((home / "runs/longer.run").read_bytes())
    done, steps = RUN.steps_before(1), longer.steps_before(90)
    assert (longer.inner.first_step, longer.inner.total_steps) == (done, done + steps)
    assert f"until step {steps - longer.inner.decay_steps} (round" in made.out
    assert longer.inner.decay_steps
    shorter = ("--set", "outer.rounds=1", "--set", "inner.decay_256=256", "--set", "outer.holders=2")
    made = atoll("run", "new", "shorter", "--from-checkpoint", to, *shorter)
    assert "within its fall from" in made.out, made.err


def test_who_goes_on_gives_the_text_that_the_checkpoint_lacks(atoll, tmp_path, monkeypatch):
    book = tmp_path / "books" / "book.txt"
    book.parent.mkdir()
    book.write_text("the sea and the ship. " * 3000)
    data = measured(replace(SPEC.data, source="file:book.txt"), str(book), tmp_path)
    spec, to = replace(SPEC, owner=identity_of(0).peer_id, data=data), tmp_path / "saved"
    with monkeypatch.context() as here:
        here.chdir(book.parent)
        saved(trained(tmp_path / "homes", spec, count=2, rounds=1), to, sign_run(spec, identity_of(0)))
    assert atoll("checkpoint", "join", str(to)).code == 0
    refused = atoll("run", "new", "on", "--from-checkpoint", str(to))
    assert (refused.code, refused.err.count("\n")) == (78, 1)
    assert "the text is file:book.txt, which the checkpoint does not contain; give the path" in refused.err
    made = atoll("run", "new", "on", "--from-checkpoint", str(to), "--data", str(book), "--json")
    assert made.code == 0, made.err
    assert json.loads(made.out)["source"] == "file:book.txt"


@pytest.mark.parametrize(("source", "is_lacking"), [("packed:books", True), ("builtin:shakespeare", False)])
def test_a_packed_text_is_lacking_too(source, is_lacking):
    """The current folder was taken for it: `. is no packed text`."""
    spec = replace(SPEC, data=replace(SPEC.data, source=source))
    must_have_text(spec, "books")
    with pytest.raises(ConfigError, match="does not contain") if is_lacking else nullcontext():
        must_have_text(spec, "")


def test_restore_fills_an_empty_home_once(atoll, home, two, tmp_path):
    to = str(tmp_path / "saved")
    saved(two, tmp_path / "saved")
    assert atoll("checkpoint", "join", to).code == 0
    refused = atoll("checkpoint", "restore", to)
    assert (refused.code, refused.err.count("\n")) == (78, 1)
    assert "has the state of round 0" in refused.err
    empty = tmp_path / "empty"
    empty.mkdir()
    write_whole(empty / "identity.key", seed_of(1))
    done = atoll("checkpoint", "restore", to, "--home", str(empty))
    assert done.code == 0, done.err
    assert "its own moments" in done.out
    assert "it takes its feed from the others first" in done.out
    assert "signed by" not in done.out
    assert (empty / "runs/session.run").read_bytes() == SIGNED
    assert (empty / "runs" / RUN.id.hex() / "state").is_dir()
    other = tmp_path / "other"
    assert atoll("run", "new", RUN.name, "--home", str(other), "--data", "synthetic:markov").code == 0
    refused = atoll("checkpoint", "restore", to, "--home", str(other))
    assert (refused.code, refused.err.count("\n")) == (78, 1)
    assert "another run is called" in refused.err
    assert len(list((other / "runs").iterdir())) == 1
    (other / "runs" / f"{RUN.name}.run").unlink()
    found = json.loads(atoll("checkpoint", "restore", to, "--home", str(other), "--json").out)
    assert found["restored"]["own"] is False


def test_a_crash_while_it_restores_leaves_a_home_that_knows_its_run(atoll, home, two, tmp_path, monkeypatch):
    to = str(tmp_path / "saved")
    saved(two, tmp_path / "saved")
    assert atoll("checkpoint", "join", to).code == 0
    empty = Home(tmp_path / "empty")

    def killed(*given):
        restore_node(*given)
        raise DiskFault("the power fails")

    monkeypatch.setattr("atoll.node.import_export.restore_node.restore_node", killed)
    assert "the power fails" in atoll("checkpoint", "restore", to, "--home", str(empty.root)).err
    assert load_local(empty.run(RUN.id) / "state", RUN.id) is not None
    assert read_mark(empty.run(RUN.id), load(empty.identity).peer_id) is not None
    assert find_run(empty, None).data == SIGNED


def test_who_restores_without_a_quorum_is_told(atoll, tmp_path):
    spec, to = replace(SPEC, owner=identity_of(0).peer_id), tmp_path / "saved"
    members = trained(tmp_path / "homes", spec, count=2, rounds=1)
    save_shard(sign_run(spec, identity_of(0)), members.home(0), identity_of(0), to)
    assert atoll("checkpoint", "join", str(to), "--without-quorum").code == 0
    for home in ("one", "two"):
        (tmp_path / home).mkdir()
        write_whole(Home(tmp_path / home).identity, seed_of(0))
    done = atoll("checkpoint", "restore", str(to), "--home", str(tmp_path / "one"))
    assert "signed by 1 of the 2 members of its newest rounds, less than a quorum" in done.out
    done = atoll("checkpoint", "restore", str(to), "--home", str(tmp_path / "two"), "--json")
    assert json.loads(done.out)["quorum"] is False


def test_a_node_that_runs_is_neither_saved_nor_restored(atoll, home, two, tmp_path):
    saved(two, tmp_path / "saved")
    assert atoll("checkpoint", "join", str(tmp_path / "saved")).code == 0
    with hold_lock(Home(home)):
        for order, folder in (("save", "new"), ("restore", "saved")):
            refused = atoll("checkpoint", order, str(tmp_path / folder))
            assert (refused.code, refused.err.count("\n")) == (78, 1)
            assert "a node already runs" in refused.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("checkpoint", "save", "{}", "--run", "nowhere"), "no run is called"),
        (("checkpoint", "join", "{}/none"), "there is no folder"),
        (("checkpoint", "show", "{}/none"), "there is no folder"),
        (("checkpoint", "restore", "{}/none"), "there is no folder"),
        (("checkpoint", "join", "{}"), "is no checkpoint"),
        (("checkpoint", "show", "{}"), "no manifest"),
        (("checkpoint", "restore", "{}"), "no manifest"),
        (("run", "new", "on", "--from-checkpoint", "{}/none"), "no manifest"),
        (("run", "new", "on", "--from-checkpoint", "{}", "--preset", "tiny"), "brings model and recipe"),
        (("run", "new", "on", "--from-checkpoint", "{}", "--upcycle", "experts=4,per_token=2"), "brings model"),
    ],
)
def test_what_cannot_be_done_is_one_line(atoll, home, tmp_path, args, said):
    ran = atoll(*(arg.replace("{}", str(tmp_path)) for arg in args))
    assert ran.code == 78
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert {path.name for path in (home / "runs").iterdir()} == {"session.run", RUN.id.hex()}


def test_a_home_that_never_was_a_node_has_nothing_to_save(atoll, home, tmp_path):
    (home / "identity.key").unlink()
    ran = atoll("checkpoint", "save", str(tmp_path / "to"))
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert not (tmp_path / "to").exists()
