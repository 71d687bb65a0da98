"""Writes docs/config.md from the sources of the configuration: `python -m tests.config_page`."""

from pathlib import Path

from atoll.node.config.config_file import toml_text
from atoll.node.config.config_keys import ConfigKey, config_keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
HEAD = """\
# Settings of a node

Every key of `HOME/config.toml`, with its default. For operators. The page is written from the
docstrings of `node/config/node_config.py` by `python -m tests.config_page`; a test compares them.

    atoll config list                     every key, its value and its meaning
    atoll config get port
    atoll config set limits.up 20mbit     [limits] up = "20mbit"
    atoll config set roles evaluate relay
    atoll config unset port

The file may be absent: every key has a default. Most keys of the first table have a flag of
`atoll start`, which wins over the file. An unknown key, or a value that cannot work, is an error of
one line with exit code 78, and then nothing is written. `set` and `unset` replace the file whole or
not at all, and leave its comments and the order of its lines. A running node reads the file at its
next start.

What all members of a run must agree on is in the RunSpec and never here.

"""


def page() -> str:
    """The page as the sources have it now."""
    tables: dict[str, list[ConfigKey]] = {}
    for key in config_keys():
        tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = [HEAD + "## Keys\n\n" + _table(tables.pop(""))]
    parts += [f"## Keys of `[{name}]`\n\n" + _table(keys) for name, keys in tables.items()]
    return "\n".join(parts)


def _table(keys: list[ConfigKey]) -> str:
    rows = [f"| `{key.name}` | {key.kind} | {_default(key)} | {key.meaning} |" for key in keys]
    return "\n".join(["| key | legal | default | meaning |", "|---|---|---|---|", *rows, ""])


def _default(key: ConfigKey) -> str:
    return "absent" if key.default is None else f"`{toml_text(key.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
