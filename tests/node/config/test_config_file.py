"""Keys are described by the source; a change of one key leaves the rest of the file as it is."""

import os
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.config.config_file import set_key, toml_text, value_in, value_of
from atoll.node.config.config_keys import config_keys, key_named
from atoll.node.config.guest import GuestConfig
from atoll.node.config.node_config import NodeConfig, check_values
from atoll.p2p.limits.config import LimitsConfig
from atoll.protocols.errors import ConfigError, DiskFault
from tests.config_page import PAGE, page

COMMENTED = """\
# my node
port = 4710  # as the router has it

[limits]
# at night only
up = "1mbit"
"""


def test_the_page_is_what_the_source_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.config_page"


def test_every_key_is_described():
    keys = {key.name: key for key in config_keys()}
    tables = {"limits": LimitsConfig, "guest": GuestConfig}
    fields = set(NodeConfig.__struct_fields__) - tables.keys()
    assert set(keys) == fields | {
        f"{table}.{name}" for table in tables for name in tables[table].__struct_fields__
    }
    assert [key.name for key in keys.values() if not key.meaning.endswith((".", "`"))] == []
    assert keys["port"].default == 0
    assert keys["public"].default is None
    assert keys["limits.schedule"].default == []


def test_the_defaults_that_are_shown_are_the_defaults():
    values: dict[str, object] = {}
    for key in config_keys():
        table, _, name = key.name.rpartition(".")
        if key.default is not None:
            target = values.setdefault(table, {}) if table else values
            target[name] = tomllib.loads(f"value = {toml_text(key.default)}")["value"]
    assert check_values(values) == NodeConfig()


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("port", ["4711"], 4711),
        ("name", ["otter"], "otter"),
        ("name", ["4711"], "4711"),
        ("name", ["[x]"], "[x]"),
        ("relay", ["true"], True),
        ("dht", ["auto"], "auto"),
        ("dht", ["false"], False),
        ("public", ["true"], True),
        ("log", ["debug"], "debug"),
        ("relay_rate_bytes_s", ["1000"], 1000),
        ("roles", ["evaluate", "relay"], ["evaluate", "relay"]),
        ("roles", ['["evaluate", "relay"]'], ["evaluate", "relay"]),
        ("roles", ["seed"], ["seed"]),
        ("limits.up", ["20mbit"], "20mbit"),
        ("limits.monthly_start_day", ["5"], 5),
        ("limits.schedule", ['[{from = "22:00", to = "08:00", up = "off"}]'],
         [{"from": "22:00", "to": "08:00", "up": "off"}]),
    ],
)  # fmt: skip
def test_words_become_values_and_are_read_back(tmp_path, name, texts, value):
    path, key = tmp_path / "config.toml", key_named(name)
    path.write_text(COMMENTED)
    set_key(path, key, value_of(key, texts))
    values = tomllib.loads(path.read_text())
    assert value_in(values, key) == value
    others = [other for other in config_keys() if other != key]
    before = tomllib.loads(COMMENTED)
    assert [value_in(values, other) for other in others] == [value_in(before, other) for other in others]
    for comment in ("# my node", "# as the router has it", "# at night only"):
        assert comment in path.read_text()


def test_a_key_that_is_taken_out_has_its_default(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(COMMENTED)
    set_key(path, key_named("port"), None)
    set_key(path, key_named("limits.up"), None)
    set_key(path, key_named("name"), None)
    assert tomllib.loads(path.read_text()) == {"limits": {}}
    assert "# my node" in path.read_text()


@pytest.mark.parametrize(
    ("name", "texts", "said"),
    [
        ("port", ["70000"], "port = 70000 is outside"),
        ("port", ["many"], "(key port)"),
        ("port", ["1\nname = 2"], "(key port)"),
        ("port", ["1", "2"], "port takes one value, not 2"),
        ("log", ["loud"], "(key log)"),
        ("limits.up", ["fast"], "write it like 20mbit"),
        ("roles", ["miner"], "(key roles"),
        ("relay_only", ["true"], ""),
    ],
)
def test_a_bad_value_changes_nothing(tmp_path, name, texts, said):
    path = tmp_path / "config.toml"
    path.write_text(COMMENTED + "\n[wrong")
    with pytest.raises(ConfigError, match="is not TOML"):
        set_key(path, key_named("port"), 1)
    path.write_text("relay = true\n" + COMMENTED)
    before = path.read_bytes(), os.stat(path).st_ino
    key = key_named(name)
    with pytest.raises(ConfigError) as caught:
        set_key(path, key, value_of(key, texts))
    assert said in caught.value.line()
    assert (path.read_bytes(), os.stat(path).st_ino) == before


def test_an_unknown_key_has_a_suggestion():
    with pytest.raises(ConfigError) as caught:
        key_named("prot")
    assert caught.value.line() == "there is no key 'prot'; did you mean port?"
    with pytest.raises(ConfigError, match="there is no key 'wibble'"):
        key_named("wibble")


def test_the_file_is_made_private_and_a_link_stays_a_link(tmp_path):
    path = tmp_path / "home" / "config.toml"
    set_key(path, key_named("name"), "otter")
    assert path.read_text() == 'name = "otter"\n'
    assert path.stat().st_mode & 0o777 == 0o600
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    set_key(link, key_named("name"), "seal")
    assert link.is_symlink()
    assert path.read_text() == 'name = "seal"\n'


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text(COMMENTED)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFault, match="No space left"):
        set_key(path, key_named("port"), 1)
    assert path.read_text() == COMMENTED


# Each example waits for the disk.
@settings(max_examples=40)
@given(st.text(max_size=80))
def test_any_text_survives_the_file(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("home") / "config.toml"
    path.write_text(COMMENTED)
    try:
        set_key(path, key_named("data"), text)
    except (ConfigError, UnicodeError):
        return
    assert value_in(tomllib.loads(path.read_text()), key_named("data")) == text
