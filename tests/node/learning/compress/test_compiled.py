"""Where machine code is kept: the user's choice, the cache folder, a private temporary one, or nowhere."""

import os
import shutil
import subprocess
import sys

import pytest

from atoll.node.learning.kernels.compiled import usable_folder, version_of_sources

PROBE = """
import sys
from atoll.node.learning.kernels.compiled import compiled

@compiled
def twice(value: int) -> int:
    return 2 * value

print(twice(21), *{"numba.np.arraymath", "scipy.linalg"} & set(sys.modules))
"""


def run_probe(tmp_path, *, loads=False, **env):
    """Files of machine code below `tmp_path` after a process compiled one function."""
    (tmp_path / "file").touch()
    script = tmp_path / "probe.py"
    if not script.exists():  # a new one is another source, whose machine code is not there
        script.write_text(PROBE)
    kept = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "ATOLL_KERNELS")}
    kept |= {key: str(tmp_path / value) for key, value in env.items()}
    ran = subprocess.run([sys.executable, "-W", "error", script], env=kept, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[0] == "42"
    if loads:
        assert ran.stdout.split() == ["42"], "it loaded the compiler, which takes 0.4 s"
    return [file.relative_to(tmp_path) for file in tmp_path.rglob("*.nbi")]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder where one process compiled the function: three tests look at it."""
    folder = tmp_path_factory.mktemp("kept")
    return folder, run_probe(folder, NUMBA_CACHE_DIR="kept", XDG_CACHE_HOME="cache", TMPDIR="")


def test_the_users_folder_comes_first(kept):
    (found,) = kept[1]
    assert found.parts[:2] == ("kept", version_of_sources())


def test_machine_code_is_loaded_without_the_compiler(kept):
    run_probe(kept[0], loads=True, NUMBA_CACHE_DIR="kept", TMPDIR="")


def test_nothing_is_kept_where_the_users_folder_is_impossible(tmp_path):
    assert run_probe(tmp_path, NUMBA_CACHE_DIR="file/impossible", TMPDIR="") == []


def test_without_a_cache_folder_a_private_temporary_one_serves(tmp_path):
    (found,) = run_probe(tmp_path, XDG_CACHE_HOME="file/impossible", HOME="file", TMPDIR="")
    assert found.parts[0].startswith("atoll-kernels-")
    assert (tmp_path / found.parts[0]).stat().st_mode & 0o777 == 0o700


def test_ready_machine_code_is_taken(kept):
    folder, version = kept[0], version_of_sources()
    shutil.copytree(folder / "kept", folder / "ready")
    (folder / "ready" / version / "mark").touch()
    run_probe(folder, NUMBA_CACHE_DIR="fresh", ATOLL_KERNELS="ready", TMPDIR="")
    assert (folder / "fresh" / version / "mark").exists()


def test_a_folder_that_others_may_write_is_not_used(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert not usable_folder(folder)
    folder.chmod(0o755)
    assert usable_folder(folder)
