"""How a run names the text that each member has a copy of: `file:NAME?column=body&where=lang%3Den`.

The name does not say where a copy is. What is read of it is agreed: the column of rows, and which rows count.
"""

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode

from atoll.protocols.errors import ConfigError

FILE = "file:"
COLUMN = "text"
"""The column of rows that is read unless a run names another one."""
OTHER_COLUMN = "name the column with --column when the run is made"
"""What the user can do where rows have no such column, or other values in it."""
MAX_FILTERS = 8


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Only rows count whose `column` says `value`; numbers and truth values as JSON writes them."""

    column: str
    value: str


@dataclass(frozen=True, slots=True)
class FileSource:
    """What is read of a file, a folder or the files of a pattern."""

    name: str
    column: str = COLUMN
    filters: tuple[RowFilter, ...] = ()

    def __str__(self) -> str:
        asked = [("column", self.column)] if self.column != COLUMN else []
        asked += [("where", f"{each.column}={each.value}") for each in self.filters]
        # A pattern may have a question mark, which is where the rest begins.
        return FILE + quote(self.name, safe="/*[]!,()&=+@:;~ ") + ("?" + urlencode(asked) if asked else "")


def no_text_at(path: object) -> ConfigError:
    """What is said where this machine has no copy of the text."""
    return ConfigError(f"no data file at {path}", hint="give the path of your copy with --data")


def parse_file_source(source: str) -> FileSource:
    """Read `file:…`. Raises ConfigError."""
    name, mark, query = source.removeprefix(FILE).partition("?")
    try:
        asked = parse_qsl(query, strict_parsing=bool(mark), errors="strict", max_num_fields=MAX_FILTERS + 1)
    except (ValueError, UnicodeError) as error:
        raise ConfigError(f"unreadable data source {source!r}", hint=f"use {FILE}NAME?column=COLUMN") from error
    columns = [value for key, value in asked if key == "column"]
    if len(columns) > 1 or {key for key, _ in asked} - {"column", "where"}:
        raise ConfigError(
            f"{source!r} says more than this version knows", hint="install the version that the run was made with"
        )
    column = columns[0] if columns else COLUMN
    return FileSource(unquote(name), column, read_filters([v for k, v in asked if k == "where"], column))


def read_filters(texts: list[str], column: str) -> tuple[RowFilter, ...]:
    """Filters from `COLUMN=VALUE`, of rows whose text is in `column`. Raises ConfigError."""
    found = []
    for text in texts:
        named, equals, value = text.partition("=")
        if not (named and equals) or named == column:
            raise ConfigError(
                f"--where {text}: not COLUMN=VALUE of another column", hint="for example --where lang=en"
            )
        found.append(RowFilter(named, value))
    if len(found) > MAX_FILTERS or len({each.column for each in found}) < len(found):
        raise ConfigError(
            f"--where is given {len(found)} times",
            hint=f"at most {MAX_FILTERS} times, once a column: all must hold",
        )
    return tuple(found)
