"""Reads columns of Parquet and Arrow files. Needs pyarrow, which comes with the extra `data`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

from atoll.protocols.data.file_source import OTHER_COLUMN, no_text_at
from atoll.protocols.errors import ConfigError


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    """Values of these columns, row by row; the first one holds texts. Raises ConfigError."""
    try:
        for batch in _parquet(path, columns) if path.suffix == ".parquet" else _arrow(path, columns):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
    except FileNotFoundError as error:
        raise no_text_at(path) from error
    except (arrow.ArrowException, OSError, UnicodeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot read data file {path}: {why}", hint="get the file again") from error


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    with parquet.ParquetFile(path) as file:
        _check(path, file.schema_arrow, columns)
        yield from file.iter_batches(columns=list(columns))


def _arrow(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Of a file (also Feather), or of a stream, as the library datasets writes it."""
    with arrow.memory_map(str(path)) as raw:
        try:
            file = arrow.ipc.open_file(raw)
            batches = (file.get_batch(at) for at in range(file.num_record_batches))
        except arrow.ArrowInvalid:
            raw.seek(0)
            file = batches = arrow.ipc.open_stream(raw)
        _check(path, file.schema, columns)
        for batch in batches:
            batch.validate(full=True)  # places beyond the file would be read: Arrow trusts what it maps
            yield batch


def _check(path: Path, schema: Any, columns: Sequence[str]) -> None:
    for name in columns:
        if name not in schema.names:
            known = ", ".join(schema.names[:12])
            raise ConfigError(f"{path} has no column {name!r}; it has {known}", hint=OTHER_COLUMN)
    kind = schema.field(columns[0]).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise ConfigError(f"{path}: column {columns[0]!r} holds {kind}, no text", hint=OTHER_COLUMN)
