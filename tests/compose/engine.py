"""A Docker engine for the story: the one that runs, else one of our own in a temporary folder.

Our own leaves nothing on the machine: no firewall rules, no forwarding, no default bridge, all data below one
folder.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.compose.shell import Failed, run, tried, until

ASK_S = 20.0
START_S = 60.0
END_S = 45.0


class Engine(NamedTuple):
    """How to reach an engine, and the environment for its clients."""

    env: dict[str, str]
    ours: bool
    about: str


@contextmanager
def engine() -> Iterator[Engine]:
    """The engine that answers, or our own for as long as the block lasts. Raises Failed."""
    env = _client()
    if tried("docker", "version", within_s=ASK_S, env=env) is not None:
        yield Engine(env, ours=False, about=f"running already, {_about(env)}")
        return
    with _own_engine(env) as own:
        yield Engine(own, ours=True, about=f"our own, {_about(own)}")


def _client() -> dict[str, str]:
    """The environment in which `docker` and docker-compose build with BuildKit."""
    env = os.environ | {"DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1", "BUILDKIT_PROGRESS": "plain"}
    for folder in os.get_exec_path():
        found = {**env, "PATH": os.pathsep.join((folder, env.get("PATH", os.defpath)))}
        if (Path(folder) / "docker").is_file() and _has_buildkit(found):
            return found
    raise Failed("no docker client with BuildKit is installed (docker.io, or docker with its buildx plugin)")


def _has_buildkit(env: dict[str, str]) -> bool:
    """Built in before 23, a plugin since."""
    if tried("docker", "buildx", "version", within_s=ASK_S, env=env) is not None:
        return True
    words = (tried("docker", "--version", within_s=ASK_S, env=env) or "").split()
    version = words[2].split(".")[0] if len(words) > 2 else ""
    return version.isdigit() and 18 <= int(version) < 23


def _about(env: dict[str, str]) -> str:
    return run("docker", "info", "--format", "{{.ServerVersion}} with {{.Driver}}", within_s=ASK_S, env=env)


@contextmanager
def _own_engine(env: dict[str, str]) -> Iterator[dict[str, str]]:
    if os.geteuid() != 0:
        raise Failed("no Docker engine answers; start one, or run this as root so that it starts its own")
    with tempfile.TemporaryDirectory(prefix="atoll-engine-") as name:
        folder = Path(name)
        own = {**env, "DOCKER_HOST": f"unix://{folder}/docker.sock"}
        process = _start(folder)
        try:
            until(lambda: _answer(process, own, folder), within_s=START_S, every_s=0.5, what="engine start")
            yield own
        finally:
            _end(process, folder)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    command = (
        "dockerd", "--host", f"unix://{folder}/docker.sock", "--pidfile", f"{folder}/pid",
        "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec",
        "--iptables=false", "--ip-forward=false", "--bridge=none",
    )  # fmt: skip
    try:
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
    except FileNotFoundError as error:
        raise Failed("no Docker engine answers and dockerd is not installed (Debian: docker.io)") from error


def _answer(process: subprocess.Popen[bytes], env: dict[str, str], folder: Path) -> str | None:
    if process.poll() is not None:
        words = (folder / "log").read_text(errors="replace").splitlines()[-5:]
        raise Failed("the engine did not start:\n  " + "\n  ".join(words))
    return tried("docker", "version", within_s=ASK_S, env=env)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    containerd = _containerd(folder)
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        if containerd is not None:
            _kill(containerd)
    for mount in _mounts_below(folder):
        tried("umount", "--lazy", mount, within_s=ASK_S)
    _remove_groups()


def _containerd(folder: Path) -> int | None:
    try:
        return int((folder / "exec/containerd/containerd.pid").read_text())
    except (OSError, ValueError):
        return None


def _kill(pid: int) -> None:
    """Only where dockerd had to be killed: then its child is left behind."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    time.sleep(1)


def _remove_groups() -> None:
    """The control groups that dockerd leaves behind; one that is in use stays."""
    root = Path("/sys/fs/cgroup")
    for top in (*root.glob("docker"), *root.glob("*/docker")):
        for group in sorted((top, *filter(Path.is_dir, top.rglob("*"))), reverse=True):
            with suppress(OSError):
                group.rmdir()


def _mounts_below(folder: Path) -> list[str]:
    """Innermost first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{folder}/")), key=len, reverse=True)
