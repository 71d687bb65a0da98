"""A swarm of real nodes on this machine, for notebooks and scripts (docs/start/researcher.md).

from atoll.cli.sim.notebook import Swarm
Swarm(4, preset="tiny").run(rounds=20).frame()
"""

import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from atoll.cli.sim.progress import Progress
from atoll.cli.sim.swarm import Swarm as SimulatedSwarm
from atoll.cli.sim.swarm import all_rows, play, prepare, set_up, stop_all
from atoll.protocols.errors import ConfigError

if TYPE_CHECKING:
    import pandas

PATIENCE_S = 300.0


class Swarm:
    """Real processes with homes of their own, as `atoll sim` starts them; a context that ends all of them."""

    def __init__(
        self,
        nodes: int = 4,
        *,
        preset: str = "tiny",
        data: str = "builtin:shakespeare",
        seed: int = 1,
        settings: tuple[str, ...] = (),
        folder: Path | str | None = None,
    ) -> None:
        """`settings`: `KEY=VALUE` as of `run new --set`; `folder` keeps homes and logs, else they are deleted."""
        self._options: dict[str, Any] = {
            "nodes": nodes,
            "preset_name": preset,
            "data": data,
            "seed": seed,
            "changes": settings,
        }
        self._temporary = tempfile.TemporaryDirectory(prefix="atoll-swarm-") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else str(folder))
        """Homes `node-0`, `node-1`, … and the run's file."""
        self._swarm: SimulatedSwarm | None = None
        self._rows: dict[int, list[dict[str, Any]]] = {}

    def run(self, rounds: int = 20, *, steps: int | None = None, patience_s: float = PATIENCE_S) -> "Swarm":
        """Train so many rounds, of so many inner steps, and end all processes; returns itself.

        Raises ConfigError, and LocalFault when a node ends by itself, or none gets further within `patience_s`.
        """
        if self._swarm is not None:
            raise ConfigError("this swarm has run", hint="make another one")
        self._swarm = swarm = prepare(self.folder, rounds=rounds, steps=steps, **self._options)
        progress = Progress(sys.stderr)
        try:
            with progress.phase("set-up"):
                set_up(swarm, patience_s, progress)
            with progress.phase("rounds"):
                play(swarm, patience_s, progress)
            self._rows = all_rows(swarm, patience_s)
        finally:
            stop_all(swarm.nodes.values())
        return self

    @property
    def pids(self) -> list[int]:
        """Processes of the swarm that live now; none before and after `run`."""
        nodes = self._swarm.nodes.values() if self._swarm else ()
        return [process.pid for node in nodes for process in node.processes()]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each node and round, the fields of `atoll run rounds --json` and `node`, its number."""
        return [{"node": number, **row} for number, found in self._rows.items() for row in found]

    def frame(self) -> "pandas.DataFrame":
        """The rows as a frame of pandas. Raises ConfigError where that is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            hint = "pip install 'atoll[notebook]', or use .rows()"
            raise ConfigError("frames need the package pandas", hint=hint) from error
        return pandas.DataFrame(self.rows())

    def close(self) -> None:
        """End all processes, and delete their folder unless it was given."""
        if self._swarm is not None:
            stop_all(self._swarm.nodes.values())
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
