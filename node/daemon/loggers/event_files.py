"""Loggers that need no package: events as JSON lines, and as a table with one column for each value."""

import csv
from pathlib import Path

import msgspec

from atoll.node.daemon.loggers.events import COLUMNS, LoggedEvent

HEAD = ("time", "event", "round")


class JsonLinesFile:
    """Appends each event as one JSON object to `events.jsonl`."""

    def __init__(self, folder: Path, run_name: str) -> None:
        """The run's name is not written: the folder is the run's."""
        path = folder / "events.jsonl"
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab")
        if is_torn:  # a power loss cut its last line
            self._file.write(b"\n")

    def write(self, event: LoggedEvent) -> None:
        """One line."""
        self._file.write(msgspec.json.encode(event) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvFile:
    """Appends each event as one row to `events.csv`; cells of values that the event does not have are empty."""

    def __init__(self, folder: Path, run_name: str) -> None:
        """The first row names the columns. A table with other columns becomes `events.1.csv`."""
        path = folder / "events.csv"
        head = ",".join([*HEAD, *COLUMNS])
        known = path.read_text(encoding="utf-8").partition("\n")[0].strip() if path.exists() else ""
        if known not in ("", head):
            path.replace(folder / "events.1.csv")
        self._file = path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if known != head:
            self._file.write(head + "\n")

    def write(self, event: LoggedEvent) -> None:
        """One row."""
        values = (event.values.get(name, "") for name in COLUMNS)
        self._rows.writerow([event.time, event.event, event.round, *values])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
