"""Prometheus and promtool as programs, or a loud skip. Only on loopback, in folders of a test."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from tests.waiting import HANGS_S, poll

PACKAGES = {"promtool": "prometheus"}


def program(name: str) -> str:
    """Its path; skips the test, with a warning, where it is not installed."""
    path = shutil.which(name)
    if path is None:
        why = f"NOT TESTED: {name} is missing (Debian: apt-get install {PACKAGES.get(name, name)})"
        warnings.warn(why, stacklevel=2)
        pytest.skip(why)
    return path


def promtool(*args: str, given: bytes | None = None) -> tuple[int, str]:
    """Its exit code and all that it said."""
    done = subprocess.run(
        [program("promtool"), *args], input=given, capture_output=True, check=False, timeout=HANGS_S
    )
    return done.returncode, (done.stdout + done.stderr).decode()


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now. Raises HTTPError where it does not parse."""
        return self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")["result"]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=HANGS_S) as reply:
                return reply.status == 200
        except OSError:
            return False

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=HANGS_S) as reply:
            return json.load(reply)["data"]


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Prometheus]:
    """Prometheus with this configuration, in a folder of its own."""
    path = program("prometheus")
    with create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "prometheus.yml").write_text(config)
    command = [
        path, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={place}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as words:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
    try:
        found = Prometheus(f"http://{place}")

        def is_up() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            return found.is_ready()

        poll("Prometheus answers", is_up)
        yield found
    finally:
        process.kill()
        process.wait()
