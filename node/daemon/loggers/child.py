"""The process of one logger: reads events from stdin, one JSON object a line, and confirms each with a byte.

Whatever its package raises ends it, with the traceback in its log: the node starts it again.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from atoll.node.daemon.loggers.event_files import CsvFile, JsonLinesFile
from atoll.node.daemon.loggers.events import LoggedEvent
from atoll.node.daemon.loggers.packages import TensorBoardFolder, TrackioProject, WandbFolder
from atoll.node.daemon.loggers.sink import EventSink
from atoll.p2p.system.atomic_files import make_folder

SINKS: dict[str, Callable[[Path, str], EventSink]] = {
    "jsonl": JsonLinesFile,
    "csv": CsvFile,
    "tensorboard": TensorBoardFolder,
    "trackio": TrackioProject,
    "wandb": WandbFolder,
}
READY = WRITTEN = b"."


def main(name: str, folder: str, run_name: str) -> None:
    """Write events until stdin ends."""
    # Packages print: what they print is for the log, and stdout is for confirmations.
    confirmations = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    make_folder(Path(folder))
    sink = SINKS[name](Path(folder), run_name)
    os.write(confirmations, READY)
    for line in sys.stdin.buffer:
        sink.write(msgspec.json.decode(line, type=LoggedEvent))
        os.write(confirmations, WRITTEN)
    sink.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])
