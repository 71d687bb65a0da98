"""`node` is ours, unless Node.js was meant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.alias import meant_for_node_js, next_node
from atoll.cli.command_table import COMMANDS
from tests.waiting import HANGS_S


@pytest.mark.parametrize(
    "line",
    [
        "",
        "-e 1",
        "-p 1",
        "--version",
        "-v",
        "--eval x",
        "--inspect x.js",
        "x.js",
        "x.mjs",
        "x.cjs",
        "a/x.js",
        "-",
        "inspect x.js",
        "here.txt",
        "beside",
        "-h",
    ],
)
def test_meant_for_node_js(line: str, tmp_path: Path):
    (tmp_path / "here.txt").touch()
    (tmp_path / "beside.js").touch()
    assert meant_for_node_js(line.split(), tmp_path)


@pytest.mark.parametrize(
    "line", [*COMMANDS, "--help", "--home x status", "--home=x status", "strat", "start x.js"]
)
def test_meant_for_us(line: str, tmp_path: Path):
    for name in COMMANDS:
        (tmp_path / name).touch()
    assert not meant_for_node_js(line.split(), tmp_path)


def script(path: Path, words: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "{words} $@"\n')
    path.chmod(0o755)
    return path


def test_next_node_is_behind_ours(tmp_path: Path):
    before, ours, after = (script(tmp_path / name / "node", name) for name in ("before", "ours", "after"))
    folders = os.pathsep.join(str(path.parent) for path in (before, ours, after))
    assert next_node(folders, ours) == after
    assert next_node(folders, after) is None
    assert next_node(folders, tmp_path / "elsewhere" / "node") == before


def test_next_node_passes_links_to_ours_and_what_cannot_run(tmp_path: Path):
    ours, after = script(tmp_path / "ours" / "node", "ours"), script(tmp_path / "after" / "node", "after")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "node").symlink_to(ours)
    script(tmp_path / "plain" / "node", "plain").chmod(0o644)
    (tmp_path / "folder" / "node").mkdir(parents=True)
    folders = os.pathsep.join(
        str(tmp_path / name) for name in ("ours", "link", "plain", "folder", "missing", "after")
    )
    assert next_node(folders, ours) == after


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A console script as pip writes it."""
    path = tmp_path / "ours" / "node"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom atoll.cli.alias import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return path


def test_hands_over_with_all_arguments(ours: Path, tmp_path: Path):
    other = tmp_path / "js" / "node"
    other.parent.mkdir()
    other.write_text('#!/bin/sh\necho "Node.js got $#: $2"\n')
    other.chmod(0o755)
    ran = subprocess.run(
        [str(ours), "x.js", "two words"], env=os.environ | {"PATH": f"{ours.parent}:{other.parent}:/usr/bin:/bin"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "Node.js got 2: two words\n")


def test_two_copies_of_ours_do_not_loop(ours: Path, tmp_path: Path):
    second = tmp_path / "second" / "node"
    second.parent.mkdir()
    second.write_bytes(ours.read_bytes())
    second.chmod(0o755)
    ran = subprocess.run(
        [str(second), "x.js"], env=os.environ | {"PATH": f"{ours.parent}:{second.parent}"},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANGS_S,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "No such command 'x.js'" in ran.stderr


def test_ours_answers_where_there_is_no_node_js(ours: Path, tmp_path: Path):
    environment = os.environ | {"PATH": str(ours.parent), "ATOLL_HOME": str(tmp_path / "home")}
    help_text = subprocess.run([str(ours), "--help"], env=environment, capture_output=True, text=True, check=False)
    assert (help_text.returncode, help_text.stdout.split("\n")[0]) == (
        0,
        "Usage: node [OPTIONS] COMMAND [ARGS]...",
    )
    status = subprocess.run([str(ours), "status"], env=environment, capture_output=True, text=True, check=False)
    assert status.returncode == 3
