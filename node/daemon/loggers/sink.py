"""What every logger is: something that events are written to."""

from typing import Protocol

from atoll.node.daemon.loggers.events import LoggedEvent


class EventSink(Protocol):
    """Made from a folder of its own and the run's name. It has a process of its own: it may block and raise."""

    def write(self, event: LoggedEvent) -> None:
        """Write one event; when this returns, the event survives the end of the process."""

    def close(self) -> None:
        """Finish: no event follows."""
