"""A change of docker/ or pyproject.toml is said to be untested until `make compose-test` held for it."""

import shutil
import warnings

import pytest

from tests.compose.tried import ROOT, tree_hash, untested, write_record


@pytest.fixture
def tree(tmp_path):
    """A copy of what is hashed."""
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_a_change_is_untested_until_a_run_held_for_it(tree):
    record = tree / "last_run.json"
    assert "no run" in untested(record, tree)
    for path in ("docker/Dockerfile", "docker/entrypoint.sh", "pyproject.toml"):
        write_record(400.0, "20.10", record, tree)
        assert untested(record, tree) == ""
        with (tree / path).open("a") as file:
            file.write("# another line\n")
        assert "changed since" in untested(record, tree)
    write_record(400.0, "20.10", record, tree)
    (tree / "docker" / "more.sh").write_text("")
    assert "changed since" in untested(record, tree), "a new file"


def test_wheels_of_a_build_are_no_change(tree):
    before = tree_hash(tree)
    (tree / "docker" / "wheelhouse" / "some.whl").write_bytes(b"x")
    assert tree_hash(tree) == before == tree_hash()


@pytest.mark.filterwarnings("default")
def test_the_containers_of_this_tree_were_tried():
    """A skip, not a pass: only an engine can tell, and not every machine has one."""
    if why := untested():
        warnings.warn(f"NOT TESTED: containers: {why}", stacklevel=1)
        pytest.skip(f"NOT TESTED: {why}")
