"""Reads data sets by the library `datasets`, as a stream: of the Hugging Face Hub, or in a local folder.

`hf:NAME[?config=CONFIG&split=SPLIT&revision=COMMIT]`. Needs `pip install 'atoll[data]'`. No code of a data
set is run.
"""

from collections.abc import Iterator
from urllib.parse import parse_qsl

from atoll.node.learning.data.documents import chosen_texts
from atoll.protocols.data.file_source import OTHER_COLUMN, FileSource
from atoll.protocols.errors import ConfigError

HUB = "hf:"
_KEYS = {"config", "split", "revision"}


def hub_documents(name: str, source: FileSource) -> Iterator[bytes]:
    """The texts of a data set's rows, in its order. Raises ConfigError."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name} is read by the library datasets", hint="pip install 'atoll[data]'") from error
    path, mark, query = name.removeprefix(HUB).partition("?")
    try:
        asked = dict(parse_qsl(query, strict_parsing=bool(mark)))
    except ValueError as error:
        raise ConfigError(f"unreadable data set {name!r}", hint=f"use {HUB}NAME?split=train") from error
    if set(asked) - _KEYS or not path:
        raise ConfigError(f"unreadable data set {name!r}", hint=f"use {HUB}NAME?config=…&split=…&revision=…")
    names = (source.column, *(each.column for each in source.filters))
    try:
        rows = datasets.load_dataset(
            path,
            asked.get("config"),
            split=asked.get("split", "train"),
            revision=asked.get("revision"),
            streaming=True,
        )
        yield from (
            text.encode() for text in chosen_texts((tuple(row[key] for key in names) for row in rows), source)
        )
    except KeyError as error:
        raise ConfigError(f"{name} has no column {error.args[0]!r}", hint=OTHER_COLUMN) from error
    # The library raises errors of its own, of pyarrow, of its HTTP clients and of the file systems that it reads.
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"cannot read {name}: {why}", hint="check its name, and config, split and network"
        ) from error
