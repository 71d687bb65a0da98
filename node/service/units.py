"""The file that a service manager wants for a node: a systemd user unit, a launchd property list. Pure."""

import hashlib
import plistlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WATCHDOG_S = 120
"""A loop that gave no sign for so long hangs. Its longest steps, on a slow and busy machine, take seconds."""
STOPS_S = 300
"""Until the manager kills a node that it stopped: the deadlines in node/daemon/app.py sum up to 45 s, and what
only this node has goes to the others within 240 s (node/daemon/leaving/holders.py)."""
RESTART_S = 10
WRONG_CONFIGURATION = 78
WRONG_USAGE = 2


class Service(NamedTuple):
    """A node as a service."""

    home: Path
    command: tuple[str, ...]
    """With absolute paths."""
    is_default_home: bool

    @property
    def name(self) -> str:
        """`atoll`, or for another home `atoll-FOLDER-HASH`: two homes never have one name."""
        if self.is_default_home:
            return "atoll"
        folder = re.sub(r"[^A-Za-z0-9]+", "-", self.home.name).strip("-") or "home"
        return f"atoll-{folder[:32]}-{hashlib.sha256(str(self.home).encode()).hexdigest()[:6]}"


def systemd_unit(service: Service) -> str:
    """A user unit of Type=notify: up when the node says so, and started again when its loop hangs or it fails."""
    return f"""\
[Unit]
Description=atoll: trains a language model with others ({_one_line(str(service.home))})
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart={" ".join(map(_quoted, service.command))}
# The node fetches its run from whoever is there, and never gives up.
TimeoutStartSec=infinity
TimeoutStopSec={STOPS_S}
WatchdogSec={WATCHDOG_S}
Restart=on-failure
RestartSec={RESTART_S}
# Wrong usage and wrong configuration: trying again does not help.
RestartPreventExitStatus={WRONG_USAGE} {WRONG_CONFIGURATION}
# The daemon ends its worker in good order, so the signal is for the daemon alone.
KillMode=mixed
Nice=10
StandardOutput=null

[Install]
WantedBy=default.target
"""


def launchd_list(service: Service) -> bytes:
    """A property list for ~/Library/LaunchAgents. launchd knows neither readiness nor exit codes."""
    return plistlib.dumps(
        {
            "Label": service.name,
            "ProgramArguments": list(service.command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": STOPS_S,
            "ProcessType": "Background",
            "StandardOutPath": "/dev/null",
            "StandardErrorPath": str(service.home / "service.log"),
        }
    )


def node_command(python: str, home: Path, run: str | None) -> tuple[str, ...]:
    """The command line of a node without a terminal. `python`: the interpreter that has atoll."""
    chosen: Sequence[str] = ("--run", run) if run is not None else ()
    return (python, "-m", "atoll.cli.main", "--home", str(home), "start", "--plain", *chosen)


def _quoted(word: str) -> str:
    """A word of ExecStart (systemd.service(5), systemd.syntax(7)): in quotes, with `%`, `$`, backslashes kept."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"' + escaped.replace("\n", "\\n") + '"'


def _one_line(text: str) -> str:
    return text.replace("%", "%%").replace("\\", "\\\\").replace("\n", " ")
