"""What docker/ repeats from elsewhere stays the same; the scripts parse. The image itself: `make compose-test`."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE = (ROOT / "docker/compose.yaml").read_text()
STORY = (ROOT / "tests/compose/swarm.py").read_text()


@pytest.mark.parametrize("script", ["base.sh", "entrypoint.sh", "install.sh"])
def test_scripts_parse(script: str):
    assert subprocess.run(["sh", "-n", str(ROOT / "docker" / script)], check=False, timeout=60).returncode == 0


def test_torch_is_the_one_of_the_makefile():
    pinned = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    assert set(re.findall(r"^ARG TORCH=(\S+)$", DOCKERFILE, re.MULTILINE)) == {pinned[1]}


def test_base_image_is_one():
    base = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert base is not None
    assert f"BASE: ${{ATOLL_BASE:-{base[1]}}}" in COMPOSE
    assert f'BASE = "{base[1]}"' in STORY


def test_every_source_folder_reaches_the_build():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for folder in ("protocols", "p2p", "node", "cli"):
        assert f"!{folder}" in ignore
        assert f"COPY {folder} {folder}" in DOCKERFILE


def test_the_image_runs_as_nobody_in_particular():
    for target in ("cpu", "cuda"):
        stage = DOCKERFILE.split(f"FROM runtime AS {target}\n")[1].split("\nFROM ")[0]
        assert re.findall(r"^USER .*$", stage, re.MULTILINE) == ["USER atoll"]
        assert stage.rstrip().endswith("USER atoll")


def test_only_the_seed_has_ports_that_the_world_sees():
    """The page and Grafana have some of this machine only."""
    seed, rest = COMPOSE.split("  trainer:")
    assert seed.count("4710/tcp") == 1
    assert re.findall(r"ports:\n +- (.+)", rest) == [
        '"127.0.0.1:${ATOLL_WEB_PORT:-4780}:4780/tcp"',
        '"127.0.0.1:${ATOLL_GRAFANA_PORT:-3000}:3000/tcp"',
    ]


def test_what_is_not_in_a_profile_is_the_swarm_alone():
    parts = dict(re.findall(r"^  ([\w-]+):\n((?: {4}.*\n|\n)+)", COMPOSE.split("services:")[1], re.MULTILINE))
    profiles = {name: re.findall(r"^    profiles: \[(\w+)\]$", part, re.MULTILINE) for name, part in parts.items()}
    assert profiles == {
        "seed": [],
        "trainer": [],
        "dashboard": ["dashboard"],
        "trainer-gpu": ["gpu"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }
