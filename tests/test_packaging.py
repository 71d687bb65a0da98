"""The wheel is whole, and the light commands are quick: as installed, from another directory."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from atoll_bench.cli.cli import CPU_RATIOS, cpu_ratio, in_turns, light_commands
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parent.parent
AREAS = ("protocols", "p2p", "node", "cli")
TURNS = 9


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=HANGS_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout gets no `build/`."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*AREAS, "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of a clean environment that holds the wheel; our dependencies are lent by a path file, torch is big.

    The path file does not run the lender's own path files, so its editable atoll is not seen.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "v", with_pip=False, symlinks=True)
    home = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "v"), "platbase": str(folder / "v")}))
    pip = run(
        sys.executable, "-m", "pip", "--python", str(folder / "v" / "bin" / "python"), "install", "--quiet",
        "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel), cwd=folder,
    )  # fmt: skip
    assert pip.returncode == 0, pip.stderr
    (home / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "v" / "bin"


def test_wheel_holds_every_source_file(wheel: Path):
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [path for area in AREAS for path in (ROOT / area).rglob("*.py")]
    files += [ROOT / area / "py.typed" for area in AREAS] + [
        path
        for path in (ROOT / "node/daemon/web").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    missing = {f"atoll/{path.relative_to(ROOT).as_posix()}" for path in files} - inside
    assert not missing
    flat = {name for name in inside if name.split("/")[0] in AREAS or name.startswith("tests/")}
    assert not flat


@pytest.mark.parametrize("script", ["atoll", "node"])
def test_installed_script_answers_elsewhere(installed: Path, script: str, tmp_path: Path):
    ran = run(str(installed / script), "--help", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"Usage: {script}" in ran.stdout
    assert "start" in ran.stdout


def test_installed_code_is_the_wheels(installed: Path, tmp_path: Path):
    code = "import atoll.cli.main, atoll.node.config.home, json; print(json.dumps(atoll.cli.main.__file__))"
    ran = run(str(installed / "python"), "-c", code, cwd=tmp_path)
    assert Path(json.loads(ran.stdout)).is_relative_to(installed.parent), ran.stdout + ran.stderr


def test_installed_node_is_not_running(installed: Path, tmp_path: Path):
    ran = run(str(installed / "node"), "status", "--home", str(tmp_path / "home"), cwd=tmp_path)
    assert ran.returncode == 3
    assert ran.stderr.startswith("error: no node runs in ")


@pytest.mark.parametrize("script", ["atoll", "node"])
def test_light_commands_start_quickly_beside_bare_python(installed: Path, tmp_path: Path, script: str):
    """By CPU time, in turns: a busy machine is no slow program. `atoll bench cli` has the bar in seconds."""
    commands = light_commands(str(installed / "python"), str(installed / script), str(tmp_path))
    starts = in_turns(commands, TURNS, tmp_path)
    for name, bar in CPU_RATIOS.items():
        assert bar.holds(cpu_ratio(starts, name)), (name, starts)
