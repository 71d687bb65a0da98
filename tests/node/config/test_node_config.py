"""NodeConfig: file, then flags; unknown keys and impossible values are errors that name the key."""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.config import node_config
from atoll.node.config.guest import GuestConfig
from atoll.node.config.node_config import NodeConfig, load_config, to_struct
from atoll.protocols.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    path = tmp_path / "config.toml"

    def call(text: str) -> Path:
        path.write_text(text)
        return path

    return call


def test_no_file_is_all_defaults(tmp_path):
    config = load_config(tmp_path / "config.toml")
    assert config.listen == ()
    assert config.seeds == ()
    assert config.device in ("cpu", "cuda"), "auto is decided"
    assert config.threads >= 1, "0 is replaced by the cores"


def test_flags_win_over_the_file_and_absent_flags_do_not(write):
    path = write('name = "otter"\nthreads = 3\neval_every = 5\n')
    config = load_config(path, {"threads": 2, "name": None})
    assert (config.name, config.threads, config.eval_every) == ("otter", 2, 5)


def test_a_name_is_composed_and_none_is_the_default(tmp_path):
    """It is announced: nothing of the machine is taken for it, and its form is the one that peers accept."""
    path = tmp_path / "config.toml"
    assert load_config(path).name == ""
    assert load_config(path, {"name": "Zoe\u0308"}).name == "Zo\u00eb"


def test_flags_of_a_table_win_over_its_keys_and_leave_the_others(write):
    path = write('[guest]\nhours = "22:00-07:00"\nnice = 5\n[limits]\nup = "1mbit"\n')
    config = load_config(path, {"nice": 19, "battery": "pause", "idle_after": None, "down": "2mbit"})
    assert config.guest == GuestConfig(hours="22:00-07:00", battery="pause", nice=19)
    assert (config.limits.up, config.limits.down) == ("1mbit", "2mbit")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('lisen = "/ip4/1.2.3.4/tcp/1"', "unknown key lisen; did you mean listen?"),
        ('[limits]\nup = "fast"', "write it like 20mbit"),
        ('[guest]\nhours = "22-7"', "guest.hours: '22-7' is no range of hours; write it like 22:00-07:00"),
        ('[guest]\nhour = "22:00-07:00"', "unknown key guest.hour; did you mean hours?"),
        ('[guest]\nbattery = "off"', "(key guest.battery)"),
        ('[guest]\ngpu_most_c = "80C"', "(key guest.gpu_most_c)"),
        ("[guest]\nnice = 50", "guest.nice = 50 is outside 0 … 19"),
        ('guest = "night"', "(key guest)"),
        ('[limits]\nupp = "1mbit"', "unknown key limits.upp; did you mean up?"),
        (f'name = "{"x" * 33}"', "name: it has 33 characters; at most 32 are legal"),
        ('name = "\\u202eretto"', "name: U+202E is not legal"),
        ("relay_only = true\nrelay = true", "cannot go with relay"),
        ('relay_only = true\nroles = ["relay"]', "cannot go with relay"),
        ('roles = ["train", "train"]', "named twice"),
        ('roles = ["miner"]', "(key roles"),
        ("port = 70000", "outside 0 … 65535"),
        ("wibble = 1", "unknown key wibble; known keys: name, roles"),
        ('threads = "two"', "(key threads)"),
        ("threads = -1", "threads = -1 is outside 0"),
        ("eval_every = -1", "eval_every = -1 is outside 0"),
        ("sample_every_s = 59", "sample_every_s = 59 is outside 60"),
        ("sample_every_s = 700000", "sample_every_s = 700000 is outside 60"),
        ('listen = ["0.0.0.0:4710"]', "is not a multiaddr"),
        ('listen = ["/ip4/1.2.3.4/tcp/1/p2p/12D3KooW"]', "is not a multiaddr"),
        ('seeds = ["/ip4/1.2.3.4/tcp/1"]', "does not end in an address and /p2p/PEERID"),
        ('device = "tpu"', "device 'tpu' is not one of"),
        ('log = "loud"', "(key log)"),
        ("threads = ", "is not TOML"),
        ("name = 'a\\tb'\nname = 'c'", "is not TOML"),
        ("[limmits]\nup = 1", "unknown key limmits"),
    ],
)
def test_what_cannot_work_is_one_line_with_the_file(write, text, said):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in caught.value.line()
    assert str(path) in caught.value.line()
    assert "\n" not in caught.value.line()
    assert "`" not in caught.value.line()


def test_a_config_that_is_a_socket_is_to_be_moved_away(tmp_path):
    with socket.socket(socket.AF_UNIX) as link:
        link.bind(str(tmp_path / "config.toml"))
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load_config(tmp_path / "config.toml")
    assert caught.value.hint == "a pipe or a socket is in the place of a file; move it away"


def test_a_config_that_is_a_folder_or_too_long(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "folder")
    (tmp_path / "long").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match="more than"):
        load_config(tmp_path / "long")


def test_the_environment_changes_nothing(write, monkeypatch):
    before = load_config(write("threads = 2"))
    for name in NodeConfig.__struct_fields__:
        monkeypatch.setenv(f"ATOLL_{name.upper()}", "1")
    assert load_config(write("threads = 2")) == before


@given(st.binary(max_size=300))
def test_any_bytes_are_a_config_or_a_config_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "config.toml"
    path.write_bytes(data)
    try:
        said = load_config(path).name
    except ConfigError as error:
        said = error.line()
    assert "\n" not in said


@pytest.mark.parametrize(
    ("roles", "trains", "evaluates", "has_model", "reads_text", "relays"),
    [
        ((), True, False, True, True, False),
        (("train", "relay"), True, False, True, True, True),
        (("evaluate", "seed"), False, True, True, True, False),
        (("seed",), False, False, True, False, False),
        (("seed", "relay"), False, False, True, False, True),
        (("relay",), False, False, False, False, True),
    ],
)
def test_what_a_node_needs_follows_from_its_roles(roles, trains, evaluates, has_model, reads_text, relays):
    work = load_config(Path("/nowhere/config.toml"), {"roles": roles}).work
    found = work.trains, work.evaluates, work.has_model, work.reads_text, work.relays
    assert found == (trains, evaluates, has_model, reads_text, relays)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"transport": "carrier pigeon"}, "(key transport); one of: p2pd, pylibp2p"),
        ({"guest": {"battery": "run"}}, "(key guest.battery); one of: train, pause"),
        ({"roles": ["boss"]}, "(key roles[0])"),
    ],
)
def test_a_word_that_is_none_of_the_legal_ones_is_answered_with_these(values, line):
    with pytest.raises(ConfigError) as found:
        to_struct(values, NodeConfig)
    assert found.value.line().endswith(line)


@pytest.mark.parametrize(
    ("build", "shown", "device"),
    [
        ("2.13.0+cu130", None, "cuda"), ("2.13.0+cu130", "1", "cuda"), ("2.13.0+cpu", None, "cpu"),
        ("2.13.0+cu130", "", "cpu"), ("2.13.0+cu130", "-1", "cpu"),
        ("2.13.0+cu130", "-1,0", "cpu"), ("2.13.0+cu130", "NoDevFiles", "cpu"),
        ("2.13.0+cu130", "GPU-8f2a", "cuda"), ("2.13.0+cu130", " 1,0", "cuda"),
    ],
)  # fmt: skip
def test_auto_is_the_cpu_where_torch_would_see_no_gpu(tmp_path, monkeypatch, build, shown, device):
    monkeypatch.setattr(node_config, "_DRIVER", tmp_path)
    monkeypatch.setattr(node_config.importlib.metadata, "version", lambda name: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert load_config(tmp_path / "config.toml", {}).device == device
