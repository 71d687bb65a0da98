"""Loggers of other projects, as extras. Each package is imported where it is used, in the logger's own process.

A value's name is `EVENT/VALUE`, and the round is the step.
"""

import os
from pathlib import Path
from typing import Any

from atoll.node.daemon.loggers.events import LoggedEvent


class TensorBoardFolder:
    """Writes scalars as TensorBoard's event files."""

    def __init__(self, folder: Path, run_name: str) -> None:
        """A start of the node makes a file of its own; TensorBoard shows those of a folder as one run."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, event: LoggedEvent) -> None:
        """One record with a scalar for each value."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in named(event).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=event.time, step=event.round, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class TrackioProject:
    """Logs to a trackio project in the folder."""

    def __init__(self, folder: Path, run_name: str) -> None:
        """Each start of the node is a run of the project."""
        forget_settings("TRACKIO_")
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio

        self._trackio: Any = trackio
        trackio.init(project=run_name, embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, event: LoggedEvent) -> None:
        """Hand the values over; trackio writes them in a thread of its own."""
        self._trackio.log(named(event), step=event.round)

    def close(self) -> None:
        """Wait until all is written."""
        self._trackio.finish()


class WandbFolder:
    """Logs to an offline run of Weights & Biases."""

    def __init__(self, folder: Path, run_name: str) -> None:
        """Each start of the node is a run; `wandb sync` uploads it if its user wants that."""
        forget_settings("WANDB_")
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        self._run: Any = wandb.init(
            project="atoll", name=run_name, dir=str(folder), mode="offline", settings=settings
        )
        # Events of several rounds mix, and W&B's own step may only rise.
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def write(self, event: LoggedEvent) -> None:
        """Hand the values over; W&B writes them in a process of its own."""
        self._run.log({"round": event.round, **named(event)})

    def close(self) -> None:
        """Wait until all is written."""
        self._run.finish()


def forget_settings(prefix: str) -> None:
    """Remove variables that could send what is logged elsewhere: a logger writes to its folder only."""
    for key in [key for key in os.environ if key.startswith(prefix)]:
        del os.environ[key]


def named(event: LoggedEvent) -> dict[str, float]:
    """The values by `EVENT/VALUE`."""
    return {f"{event.event}/{name}": value for name, value in event.values.items()}
