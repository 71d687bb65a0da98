"""The swarm of docker/compose.yaml in a project of its own: up, ask, kill, start, stop, down."""

import http.client
import json
import socket
import urllib.request
from typing import Any

from tests.compose.agreement import Rows
from tests.compose.engine import Engine
from tests.compose.shell import Failed, run, tried

PROJECT = "atoll-compose-test"
IMAGE = "atoll:compose-test"
BASE = "python:3.11-slim-bookworm"
BASE_S, BUILD_S, UP_S, DOWN_S, ASK_S = 400.0, 600.0, 300.0, 180.0, 20.0
RUN_OPTIONS = "--preset tiny --seed 1 --set outer.rounds=600"
"""Tiny, and longer than the story: rounds take one to three seconds."""


class ComposeSwarm:
    """One seed and some trainers. Every call raises Failed where the engine refuses."""

    def __init__(self, engine: Engine) -> None:
        self.env = engine.env | {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "ATOLL_IMAGE": IMAGE,
            "ATOLL_BASE": BASE,
            "ATOLL_PORT": str(_free_port()),
            "ATOLL_WEB_PORT": str(_free_port()),
            "ATOLL_RUN_OPTIONS": RUN_OPTIONS,
            "ATOLL_MEMORY": "2g",
            "ATOLL_CPUS": "1.5",
        }
        if engine.ours:
            # Without a default bridge a build has the host's network, or none.
            self.env["ATOLL_BUILD_NETWORK"] = "host"
        self._base_is_ours = False
        v2 = tried("docker", "compose", "version", within_s=ASK_S, env=self.env) is not None
        program = ("docker", "compose") if v2 else ("docker-compose",)
        self._compose = (*program, "-f", "docker/compose.yaml", "--profile", "dashboard")

    def make_base(self) -> str:
        """See docker/base.sh."""
        how = run("docker/base.sh", BASE, within_s=BASE_S, env=self.env)
        self._base_is_ours = how != "kept"
        return how

    def build(self) -> float:
        """The image's size in bytes."""
        self._run("build", within_s=BUILD_S)
        return float(self._docker("image", "inspect", "--format", "{{.Size}}", IMAGE))

    def up(self, trainers: int) -> list[str]:
        """Start all; the trainers' container ids."""
        self._run("up", "--detach", "--no-build", "--scale", f"trainer={trainers}", within_s=UP_S)
        return self._run("ps", "--quiet", "trainer", within_s=ASK_S).split()

    def ask(self, container: str, *command: str) -> dict[str, Any] | None:
        """What `atoll COMMAND --json` prints in there, None while it fails."""
        text = tried("docker", "exec", container, "atoll", *command, "--json", within_s=ASK_S, env=self.env)
        return None if text is None else json.loads(text)

    def page(self) -> dict[str, Any] | None:
        """The data of the dashboard's page, asked from the host as a browser does; None while nothing answers."""
        url = f"http://127.0.0.1:{self.env['ATOLL_WEB_PORT']}/v1/data.json"
        try:
            with urllib.request.urlopen(url, timeout=ASK_S) as answer:
                return dict(json.loads(answer.read()))
        except (OSError, http.client.HTTPException):
            return None

    def rounds(self, containers: list[str]) -> dict[str, Rows]:
        """Rows by container; those that do not answer have none."""
        answers = {one: self.ask(one, "rounds", "--last", "1000") for one in containers}
        return {one: answer["rounds"] if answer else [] for one, answer in answers.items()}

    def kill(self, container: str) -> int:
        """SIGKILL everything in it; the exit code."""
        self._docker("kill", "--signal", "KILL", container)
        return int(self._docker("wait", container))

    def start(self, container: str) -> None:
        """Start the same container again."""
        self._docker("start", container)

    def health(self, container: str) -> str:
        """`starting`, `healthy`, `unhealthy`."""
        return self._docker("inspect", "--format", "{{.State.Health.Status}}", container)

    def restarts(self, container: str) -> int:
        """How often the engine has started it again by itself."""
        return int(self._docker("inspect", "--format", "{{.RestartCount}}", container))

    def stop(self) -> list[int]:
        """Ask all to end in good order; their exit codes."""
        everyone = self._run("ps", "--quiet", within_s=ASK_S).split()
        self._run("stop", within_s=DOWN_S)
        codes = self._docker("inspect", "--format", "{{.State.ExitCode}}", *everyone)
        return [int(code) for code in codes.split()]

    def down(self) -> str:
        """Remove containers, networks, volumes and the images that we made; says what is left. Raises Failed."""
        self._run("down", "--volumes", "--remove-orphans", "--timeout", "5", within_s=DOWN_S)
        for image in (IMAGE, *([BASE] if self._base_is_ours else [])):
            tried("docker", "image", "rm", "--force", image, within_s=DOWN_S, env=self.env)
        left = self._left()
        if left:
            raise Failed(f"left behind: {left}")
        return "containers, volumes, network and images are gone"

    def _left(self) -> str:
        label = f"label=com.docker.compose.project={PROJECT}"
        lists = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        found = [self._docker(*words, "--quiet", "--filter", label) for words in lists]
        return " ".join([*found, self._docker("image", "ls", "--quiet", IMAGE)]).strip()

    def last_words(self) -> str:
        """The newest lines of every container, for a failure."""
        return tried(*self._compose, "logs", "--tail", "5", within_s=ASK_S, env=self.env) or ""

    def _run(self, *command: str, within_s: float) -> str:
        return run(*self._compose, *command, within_s=within_s, env=self.env)

    def _docker(self, *command: str) -> str:
        return run("docker", *command, within_s=60.0, env=self.env)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
