"""Changes one key of `config.toml`. The file is replaced whole; comments and the order of its lines stay."""

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from atoll.node.config.config_keys import ConfigKey
from atoll.node.config.node_config import check_changed, read_values
from atoll.p2p.system.atomic_files import make_folder, read_whole, write_whole
from atoll.protocols.errors import ConfigError, LocalFault

MAX_BYTES = 1 << 20


def value_in(values: dict[str, Any], key: ConfigKey) -> Any:
    """The value that a file gives to `key`; its default where the file has none."""
    table, _, name = key.name.rpartition(".")
    found = values.get(table, {}) if table else values
    return found.get(name, key.default)


def is_set(values: dict[str, Any], key: ConfigKey) -> bool:
    """Whether a file gives `key` a value, be it the default."""
    table, _, name = key.name.rpartition(".")
    return name in (values.get(table, {}) if table else values)


def value_of(key: ConfigKey, texts: Sequence[str]) -> Any:
    """What the words of a command line mean for `key`. Raises ConfigError for more than one where one is legal."""
    if key.takes_list and not (len(texts) == 1 and texts[0].lstrip().startswith("[")):
        return list(texts)
    if len(texts) != 1:
        raise ConfigError(f"{key.name} takes one value, not {len(texts)}", hint="quote a value that has blanks")
    if key.takes_text_only:
        return texts[0]
    try:
        found = tomllib.loads(f"value = {texts[0]}")
    except tomllib.TOMLDecodeError:
        return texts[0]
    return found["value"] if set(found) == {"value"} else texts[0]


def set_key(path: Path, key: ConfigKey, value: Any) -> None:
    """Give `key` a value in the file at `path`, or with None take it out.

    The file stays as it was if the new one would not be legal: ConfigError. Raises DiskFault.
    """
    values, before = read_values(path), (read_whole(path, max_bytes=MAX_BYTES) or b"").decode()
    wanted = deepcopy(values)
    change(wanted, key, value)
    check_changed(path, wanted)
    after = _changed_text(path, before, key, value)
    if tomllib.loads(after) != wanted:  # whatever the library made of an unusual file, nothing wrong is written
        raise LocalFault(f"cannot change {key.name} in {path}", hint="change the line by hand")
    make_folder(path.parent)
    write_whole(path.resolve(), after.encode())  # a link stays a link


def change(values: Any, key: ConfigKey, value: Any) -> None:
    """Set `key` in a TOML document or in plain values; with None take it out. Makes the table that it lacks.

    Raises ConfigError if something else has the table's name.
    """
    table, _, name = key.name.rpartition(".")
    if table:
        values = values.setdefault(table, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{table} is a table, [{table}], and has a value", hint="remove that line from the file")
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value


def _changed_text(path: Path, before: str, key: ConfigKey, value: Any) -> str:
    try:
        document = tomlkit.parse(before)
        change(document, key, value)
        return tomlkit.dumps(document)
    except TOMLKitError as error:
        raise LocalFault(f"cannot change {key.name} in {path}: {error}", hint="change the line by hand") from error


def toml_text(value: Any) -> str:
    """A value as one line of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_text(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return str(tomlkit.item(value).as_string())
