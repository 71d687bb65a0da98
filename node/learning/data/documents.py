"""Reads text as people have it: files, folders and patterns of plain text, JSON lines, Parquet and Arrow.

Every member reads its own copy and must find the same bytes, whose digest is in the run. So files come in the
order of their names, rows in the order of their file, and a blank line stands between two documents.
"""

import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from atoll.protocols.data.file_source import COLUMN, OTHER_COLUMN, FileSource, no_text_at
from atoll.protocols.errors import ConfigError

MAX_BYTES = 8 << 30
"""Largest text of a run."""
MAX_FILES = 100_000
MAX_LINE_BYTES = 1 << 28
"""Largest JSON line."""
SEPARATOR = b"\n\n"
TEXT = (".txt", ".text", ".md")
ROWS = (".jsonl", ".ndjson")
TABLES = (".parquet", ".arrow", ".feather")
PACKED = ".gz"
_LOOK_BYTES = 1 << 24
_NO_TEXT = "give text, .jsonl, .parquet or .arrow files"


def read_documents(path: str, source: FileSource) -> bytes:
    """All documents below `path`, a blank line between two. Raises ConfigError."""
    parts, size = list[bytes](), 0
    for document in documents_at(path, source):
        size += len(document) + len(SEPARATOR)
        if size > MAX_BYTES:
            raise ConfigError(
                f"the text of {path} is above {MAX_BYTES >> 30} GiB",
                hint="pack it with `atoll data pack`, or take a part of it",
            )
        parts.append(document)
    return SEPARATOR.join(parts)


def documents_at(path: str, source: FileSource) -> Iterator[bytes]:
    """All documents below `path`, one after the other; rows are read as they are asked for. Raises ConfigError."""
    for file in files_at(path):
        yield from _documents(file, source)


def files_at(path: str) -> list[Path]:
    """The file, the files of known kinds in the folder, or those of the pattern. Raises ConfigError."""
    here = Path(path).expanduser()
    try:
        if here.is_dir():
            found = sorted(
                each for each in here.rglob("*") if _is_document(each.relative_to(here)) and each.is_file()
            )
            if not found:
                raise ConfigError(f"the folder {path} holds no text", hint=_NO_TEXT)
        elif glob.has_magic(path) and not here.exists():
            names = glob.iglob(str(here), recursive=True)
            found = sorted(each for each in map(Path, names) if each.is_file())
            if not found:
                raise ConfigError(f"no file is called {path}", hint="put quotes around a pattern")
        else:
            found = [here]
    except OSError as error:
        raise _unreadable(here, error) from error
    if len(found) > MAX_FILES:
        raise ConfigError(f"{path} has more than {MAX_FILES} files", hint="join them")
    return found


def plain_bytes(path: str) -> int:
    """Bytes of the text below `path`, where all of it is plain text; 0 where only reading it would tell."""
    files = files_at(path)
    if any(file.suffix in (*ROWS, *TABLES, PACKED) for file in files):
        return 0
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:  # who reads it will say so
        return 0


def _is_document(name: Path) -> bool:
    if any(part.startswith(".") for part in name.parts):
        return False
    plain = Path(name.stem) if name.suffix == PACKED else name
    return plain.suffix in (*TEXT, *ROWS) or name.suffix in TABLES


def _documents(path: Path, source: FileSource) -> Iterable[bytes]:
    kind = Path(path.stem).suffix if path.suffix == PACKED else path.suffix
    if kind in TABLES:
        columns = (source.column, *(each.column for each in source.filters))
        return (text.encode() for text in chosen_texts(_table_rows(path, columns), source))
    if kind in ROWS:
        return (text.encode() for text in chosen_texts(_json_rows(path, source), source))
    data = _read(path)
    if source.filters or source.column != COLUMN:
        raise ConfigError(f"{path} is plain text: it has no columns", hint="drop --column and --where")
    _check_text(path, data)
    return (data,)


def _table_rows(path: Path, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    try:
        from atoll.node.learning.data.tables import table_rows
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ConfigError(f"{path.name} is read by pyarrow", hint="pip install 'atoll[data]'") from error
    return table_rows(path, columns)


def chosen_texts(rows: Iterator[Sequence[Any]], source: FileSource) -> Iterator[str]:
    """The texts of the rows that all filters let pass. A row without a text is passed over."""
    wanted = [each.value for each in source.filters]
    for text, *said in rows:
        if text is not None and [_written(value) for value in said] == wanted:
            yield text


def _written(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, unpacked. Raises ConfigError where it cannot be opened, or read to its end."""
    try:
        with gzip.open(path) if path.suffix == PACKED else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except FileNotFoundError as error:
        raise no_text_at(path) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}", hint="get the file again") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> bytes:
    with _opened(path) as file:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"data file {path} is above {MAX_BYTES >> 30} GiB", hint="take a part of it")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"data file {path} unpacks to more than {MAX_BYTES >> 30} GiB", hint="take a part of it")
    return bytes(data)


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read data file {path}: {error.strerror or error}", hint="give a readable file")


def _check_text(path: Path, data: bytes) -> None:
    """Raise ConfigError for what is no text in UTF-8: a picture, an archive, a program, another encoding."""
    at = data.find(b"\0")
    if at >= 0:
        raise ConfigError(f"{path} is no text: it has a zero byte at {at}", hint=_NO_TEXT)
    begin = 0
    while begin < len(data):
        part = data[begin : begin + _LOOK_BYTES]
        try:
            part.decode()
        except UnicodeDecodeError as error:
            # The last character of a part may go on in the next one.
            if error.start < len(part) - 3 or begin + len(part) == len(data):
                raise ConfigError(
                    f"{path} is no text in UTF-8: byte {begin + error.start} is {part[error.start]:#04x}",
                    hint="convert it, for example with iconv",
                ) from error
            part = part[: error.start]
        begin += len(part)


def _json_rows(path: Path, source: FileSource) -> Iterator[tuple[Any, ...]]:
    """Of each line its text and what the filters ask for."""
    names = (source.column, *(each.column for each in source.filters))
    fields = [(f"column_{at}", Any, None) if at else ("column_0", str) for at in range(len(names))]
    row = msgspec.defstruct("row", fields, rename={f"column_{at}": name for at, name in enumerate(names)})
    decoder = msgspec.json.Decoder(row)
    with _opened(path) as file:
        for number, line in enumerate(_lines(path, file), 1):
            if not line.strip():
                continue
            try:
                found = msgspec.structs.astuple(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeError) as error:
                example = json.dumps({source.column: "…"}, ensure_ascii=False)
                raise ConfigError(
                    f"{path} line {number}: {error}", hint=f"each line must be like {example}; {OTHER_COLUMN}"
                ) from error
            yield found


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Lines of at most MAX_LINE_BYTES: a file without line ends would be read into memory whole."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(
                f"{path} has a line above {MAX_LINE_BYTES >> 20} MiB", hint="each line must be one JSON object"
            )
        yield line
