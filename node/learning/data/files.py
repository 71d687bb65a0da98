"""`file:PATH`: plain text, or JSON lines with a `text` key. The last 5 % is validation."""

from pathlib import Path

import msgspec

from atoll.protocols.errors import ConfigError

MIN_BYTES = 4096
"""Below this neither part holds a few windows."""
MAX_BYTES = 8 << 30
VAL_SHARE = 20


class _Line(msgspec.Struct, frozen=True):
    text: str


def texts(path: str) -> tuple[bytes, bytes]:
    """Train and validation text of a file. Raises ConfigError when it cannot be used."""
    data = read(Path(path).expanduser())
    if len(data) < MIN_BYTES:
        raise ConfigError(
            f"data file {path} holds {len(data)} bytes of text", hint=f"give at least {MIN_BYTES} bytes"
        )
    cut = _line_end(data, len(data) - len(data) // VAL_SHARE)
    return data[:cut], data[cut:]


def read(path: Path) -> bytes:
    """All text of a file. JSON lines (`.jsonl`) give their `text` values, a blank line between."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"data file {path} is above {MAX_BYTES >> 30} GiB", hint="split it")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"no data file at {path}", hint="give the path of your copy with --data") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read data file {path}: {error.strerror}", hint="give a readable file"
        ) from error
    return b"\n\n".join(_jsonl(path, data)) if path.suffix == ".jsonl" else data


def _jsonl(path: Path, data: bytes) -> list[bytes]:
    decoder = msgspec.json.Decoder(_Line)
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line).text.encode())
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(
                f"{path} line {number}: {error}", hint='each line must be like {"text": "…"}'
            ) from error
    return found


def _line_end(data: bytes, near: int) -> int:
    """A cut just after a line break near `near`, so that no character is split; `near` if there is none."""
    at = data.find(b"\n", near, near + 1024)
    return near if at < 0 else at + 1
