"""`atoll config`: reads and writes config.toml of the home; every failure is one line."""

import json
import tomllib

import pytest

from atoll.node.config.config_keys import config_keys


def test_list_is_a_config_file_with_every_key(atoll, tmp_path):
    path = tmp_path / "home" / "config.toml"
    path.parent.mkdir()
    path.write_text('port = 4710\nroles = ["seed"]\npublic = true\n[limits]\nup = "20mbit"\n')
    ran = atoll("config", "list")
    assert ran.code == 0
    assert tomllib.loads(ran.out) == tomllib.loads(path.read_text()) | {"guest": {}}, (
        "a table of defaults is empty"
    )
    for key in config_keys():
        assert f"{key.name.rpartition('.')[2]} " in ran.out
    assert "port = 4710  # default: 0\n" in ran.out
    assert '# log = "info"\n' in ran.out
    assert "# port_map is absent\n" in ran.out


def test_list_as_json_has_every_key(atoll, tmp_path):
    atoll("config", "set", "threads", "2")
    found = json.loads(atoll("config", "list", "--json").out)
    assert found["path"] == str(tmp_path / "home" / "config.toml")
    rows = {row["key"]: row for row in found["keys"]}
    assert list(rows) == [key.name for key in config_keys()]
    assert rows["threads"]["value"] == 2
    assert rows["threads"]["set"]
    assert rows["threads"]["default"] == 0
    assert not rows["port"]["set"]
    assert rows["log"]["kind"] == '`"debug"`, `"info"`, `"warning"`, `"error"`'


def test_set_get_and_unset(atoll, tmp_path):
    path = tmp_path / "home" / "config.toml"
    assert atoll("config", "get", "port").out == "0\n"
    assert not path.exists(), "looking makes nothing"
    ran = atoll("config", "set", "port", "4711")
    assert (ran.code, ran.out) == (0, f"port = 4711 in {path}; a node that runs reads it at its next start\n")
    assert atoll("config", "get", "port").out == "4711\n"
    assert json.loads(atoll("config", "set", "name", "otter", "--json").out)["value"] == "otter"
    assert atoll("config", "get", "name").out == "otter\n"
    atoll("config", "set", "roles", "seed", "relay")
    assert atoll("config", "get", "roles").out == "seed\nrelay\n"
    assert atoll("config", "get", "public").out == "absent\n"
    assert atoll("config", "unset", "port").code == 0
    assert json.loads(atoll("config", "get", "port", "--json").out)["set"] is False
    assert path.read_text() == 'name = "otter"\nroles = ["seed", "relay"]\n'


def test_failures_are_one_line(atoll, tmp_path):
    path = tmp_path / "home" / "config.toml"
    for args, said in (
        (("set", "prot", "1"), "there is no key 'prot'; did you mean port?"),
        (("get", "prot"), "did you mean port?"),
        (("unset", "prot"), "did you mean port?"),
        (("set", "port", "70000"), "port = 70000 is outside 0 … 65535"),
    ):
        ran = atoll("config", *args)
        assert (ran.code, ran.out) == (78, "")
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1
        assert said in ran.err
        assert not path.exists()
    assert atoll("config", "set", "port").code == 2
    path.parent.mkdir()
    path.write_text("port = \n")
    ran = atoll("config", "list")
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "is not TOML" in ran.err


@pytest.mark.parametrize("line", ["guest = 1", "guest = []", 'guest = "22:00-07:00"'])
def test_a_value_with_the_name_of_a_table_is_one_line(atoll, tmp_path, line):
    path = tmp_path / "home" / "config.toml"
    path.parent.mkdir()
    path.write_text(f"{line}\n")
    for args in (("get", "guest.hours"), ("set", "guest.hours", "22:00-07:00"), ("unset", "guest.hours")):
        ran = atoll("config", *args)
        assert (ran.code, ran.err.count("\n")) == (78, 1)
        assert "guest" in ran.err
    assert path.read_text() == f"{line}\n"


def test_what_start_refuses_no_verb_of_config_shows_and_all_name_the_file(atoll, tmp_path):
    path = tmp_path / "home" / "config.toml"
    path.parent.mkdir()
    path.write_text("port = 99999999\n")
    for args in (("get", "port"), ("list",), ("set", "threads", "2")):
        ran = atoll("config", *args)
        assert (ran.code, ran.out) == (78, "")
        assert ran.err == f"error: {path}: port = 99999999 is outside 0 … 65535\n"


def test_a_wrong_value_of_the_command_line_is_in_no_file(atoll, tmp_path):
    path = tmp_path / "home" / "config.toml"
    path.parent.mkdir()
    path.write_text("threads = 2\n")
    for args in (("config", "set", "port", "99999999"), ("start", "--port", "99999999")):
        assert atoll(*args).err == "error: port = 99999999 is outside 0 … 65535\n"


def test_a_number_below_zero_is_a_value(atoll, tmp_path):
    for words in (("-5",), ("-5", "--json"), ("--", "-5")):
        ran = atoll("config", "set", "guest.nice", *words)
        assert (ran.code, ran.out) == (78, "")
        assert "nice = -5 is outside 0 … 19" in ran.err
    assert atoll("config", "set", "guest.nice", "--jsno", "5").code == 2, "a misspelt option is none"
