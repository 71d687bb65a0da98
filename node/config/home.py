"""A node's home: every path below it, the lock that one daemon holds, and the way to its control socket.

HOME/identity.key      HOME/config.toml      HOME/node.lock      HOME/control.sock      HOME/node.log
HOME/runs/NAME.run     signed RunSpecs       HOME/runs/<run id>/ what the run keeps on disk
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from atoll.p2p.system.atomic_files import disk, make_folder
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.ids import RunId

HOME_VARIABLE = "ATOLL_HOME"
SOCKET_PATH_MAX_BYTES = 100
"""sun_path has 104 bytes on macOS and 108 on Linux, the final zero included."""
_LOCK_MAX_BYTES = 64
_TRIES, _TRY_S = 20, 0.01


@dataclass(frozen=True, slots=True)
class Home:
    """Paths of one node. Nothing here is created by looking at it."""

    root: Path

    @property
    def identity(self) -> Path:
        """File of the node's secret key, mode 0600."""
        return self.root / "identity.key"

    @property
    def config_toml(self) -> Path:
        """File of the NodeConfig; it may be absent."""
        return self.root / "config.toml"

    @property
    def lock(self) -> Path:
        """Lock file of the running daemon, with its pid."""
        return self.root / "node.lock"

    @property
    def control_socket(self) -> Path:
        """Unix socket on which the daemon answers `atoll status` and the like."""
        return self.root / "control.sock"

    @property
    def log(self) -> Path:
        """The daemon's log file, one JSON object a line."""
        return self.root / "node.log"

    @property
    def port(self) -> Path:
        """File of the port that was picked at the first start."""
        return self.root / "port"

    @property
    def month(self) -> Path:
        """File of the bytes that were moved this month."""
        return self.root / "month.json"

    @property
    def runs(self) -> Path:
        """Folder of the `NAME.run` files and of one folder a run."""
        return self.root / "runs"

    def run_file(self, name: str) -> Path:
        """File of the signed RunSpec that has this name here."""
        return self.runs / f"{name}.run"

    def run(self, run: RunId) -> Path:
        """Folder of everything that a run stores on disk."""
        return self.runs / run.hex()

    def data_path(self, run: RunId) -> Path:
        """File with the path of this machine's copy of a run's text; it may be absent."""
        return self.runs / f"{run.hex()}.data"

    def make(self) -> None:
        """Create the home and its `runs`, private to the user. Raises DiskFault."""
        make_folder(self.root)
        make_folder(self.runs)


def home_at(choice: str | None, environ: dict[str, str] | os._Environ[str] = os.environ) -> Home:
    """`--home`, else ATOLL_HOME, else the user's data folder. Raises ConfigError for a path that cannot be one."""
    chosen = choice or environ.get(HOME_VARIABLE, "")
    try:
        root = Path(chosen).expanduser().absolute() if chosen else platformdirs.user_data_path("atoll")
        str(root).encode()  # as the worker, the status and the journal get it
    except (RuntimeError, OSError) as error:  # a user without a home, or a working folder that is gone
        raise ConfigError(f"the node's folder is not known: {error}", hint="name it with --home /DIR") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"the path of the node's folder is no UTF-8: {chosen!a}", hint="take another") from error
    return Home(root)


@contextmanager
def hold_lock(home: Home) -> Iterator[None]:
    """One daemon per home. Raises ConfigError that names the pid of the one that runs.

    The lock is the kernel's (flock): it ends with its process, however that ends.
    """
    home.make()
    with disk(home.lock):
        descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            _take_lock(descriptor)
        except BlockingIOError as error:
            raise ConfigError(
                f"a node already runs in {home.root} (pid {_pid_in(descriptor)})",
                hint="stop it with `atoll stop --wait`; a second node needs another --home",
            ) from error
        with disk(home.lock):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int) -> None:
    """Raises BlockingIOError, after as many tries as outlast somebody who looks by `is_locked`: 0.2 s."""
    for _ in range(_TRIES - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_TRY_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(home: Home) -> bool:
    """Whether a node of `home` runs, answers or not. The lock is tried and given back, nothing is written.

    Raises DiskFault.
    """
    with disk(home.lock):
        if not home.lock.exists():
            return False
        try:
            descriptor = os.open(home.lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # A disk that the kernel made read-only after an error may have a node on it, which is to be stopped.
            descriptor = os.open(home.lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _pid_in(descriptor: int) -> int:
    text = os.pread(descriptor, _LOCK_MAX_BYTES, 0).strip()
    return int(text) if text.isdigit() else 0


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for bind() or connect() to `path`, however long the path is.

    A long one is reached through an open descriptor of its folder (Linux). Raises LocalFault elsewhere.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise LocalFault(
            f"the path of the control socket has more than {SOCKET_PATH_MAX_BYTES} bytes: {path}",
            hint="choose a shorter --home",
        )
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
