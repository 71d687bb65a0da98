"""A temporary copy of the tree with an environment of its own, and runs of tests in it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant, MutantError

PACKAGES = ("atoll.protocols", "atoll.p2p", "atoll.node", "atoll.cli", "atoll_bench", "atoll_lab")
FAR_PAST = 1_000_000_000
"""A file's time in seconds. Python trusts its compiled file by time and size, so each mutant has another time."""

Report = tuple[str, str, list[str]]
"""Phase, outcome, errors of one phase of a test."""


@dataclass(frozen=True)
class Outcome:
    """How a run of pytest ended: its exit status, the reports of each case, its last lines."""

    status: int
    ended: dict[str, list[Report]]
    tail: str

    def of(self, test: str) -> list[list[Report]]:
        """The reports of each case of `test`: a parametrised test, a class and a file have several."""
        return [
            reports
            for case, reports in self.ended.items()
            if case == test or case.startswith((f"{test}[", f"{test}::"))
        ]


class TreeCopy:
    """A copy of the tree at `root` whose interpreter imports the copy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._python = root / ".venv" / "bin" / "python"
        self._applied = 0

    def run(self, tests: Sequence[str], limit_s: float) -> Outcome:
        """Run `tests` with pytest. Raises MutantError if `limit_s` passes or another tree is imported."""
        written = self.root / ".venv" / "outcomes.json"
        written.unlink(missing_ok=True)
        options = ["-q", "-n", "0", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        own = ["-p", "tests.mutants.outcomes", "--hypothesis-profile=mutants", "--outcomes", str(written)]
        status, text = self._python_run(["-m", "pytest", *own, *options, *tests], limit_s)
        tail = " | ".join(text.split("\n")[-4:])
        found = json.loads(written.read_text()) if written.exists() else {"ended": {}, "outside": []}
        if found["outside"]:
            raise MutantError(f"imports another tree: {', '.join(found['outside'][:3])}")
        return Outcome(status, found["ended"], tail)

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """The tree with `mutant` in it. Raises MutantError if the broken file is not a valid program."""
        path = self.root / mutant.file
        before, times = path.read_text(), path.stat()
        after = before.replace(mutant.find, mutant.replace)
        self._applied += 1
        try:
            path.write_text(after)
            os.utime(path, (FAR_PAST + self._applied, FAR_PAST + self._applied))
            if path.suffix == ".py":
                self._check_program(path)
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def check_imports(self) -> None:
        """Raises MutantError unless the copy's interpreter imports the copy."""
        text = f"import importlib\nfor name in {PACKAGES}: print(importlib.import_module(name).__file__)"
        status, said = self._python_run(["-c", text], 60)
        files = said.split("\n")[-len(PACKAGES) :]
        if status or not all(Path(f).is_relative_to(self.root) for f in files):
            raise MutantError(f"the copy in {self.root} is not what is imported: {said}")

    def _check_program(self, path: Path) -> None:
        """A file that does not compile, or a name that is not there, fails every test and shows nothing."""
        check = ["ruff", "check", "--isolated", "--select=E9,F821", "--output-format=concise"]
        done = subprocess.run(
            [self._python, "-m", *check, path],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise MutantError(f"the mutant is not a program: {(done.stdout or done.stderr).split(chr(10))[0]}")

    def _python_run(self, arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "VIRTUAL_ENV"))}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [self._python, *arguments], cwd=self.root, env=kept, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise MutantError(f"took more than {limit_s:.0f} s") from None
            finally:
                _end(process)
            output.seek(0)
            return status, output.read().strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it left in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


@contextmanager
def copy_of(root: Path) -> Iterator[TreeCopy]:
    """A copy of the files that git tracks or does not ignore. Raises MutantError if it cannot be imported."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # The name that modules see: they compare paths as text.
        place = Path(folder).resolve()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, place / name)
        _make_environment(root, place)
        tree = TreeCopy(place)
        tree.check_imports()
        yield tree


def _make_environment(root: Path, place: Path) -> None:
    """An environment with everybody else's packages from the one that runs now, and our own from the copy."""
    venv.create(place / ".venv", symlinks=True)
    (site,) = (place / ".venv" / "lib").glob("python*/site-packages")
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__") and module.__file__:
            (site / f"{name}.py").write_text(Path(module.__file__).read_text().replace(str(root), str(place)))
            (site / f"{name}.pth").write_text(f"import {name}; {name}.install()\n")
    lent = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (site / "lent.pth").write_text("\n".join(lent) + "\n")
