"""`python -m tests.package` (`make package-test`): the wheel with its own dependency list, in a fresh environment.

pip resolves the declared list from the index that it is configured with, installs all of it into an environment
that borrows nothing else, and a swarm of two trains there. Only torch's files are not fetched a second time: pip
gets a wheel with the metadata of the torch that runs this program, requirements included, and no files; the files
are linked into the environment afterwards. So a dependency that is missing or in conflict is seen, torch's too.
"""

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("protocols", "p2p", "node", "cli", "pyproject.toml", "README.md", "LICENSE")
INSTALL_S, COMMAND_S = 900.0, 300.0
IMPORT_ALL = """
import importlib, pkgutil, re, sys, atoll
from importlib.metadata import requires
from pathlib import Path
here = Path(sys.prefix).resolve()
wishes = [wish for wish in requires("atoll") if "extra ==" in wish and '"dev"' not in wish.replace("'", '"')]
extras, lacking = {re.match(r"[A-Za-z0-9_]+", wish)[0] for wish in wishes}, []
names = [found.name for found in pkgutil.walk_packages(atoll.__path__, "atoll.") if ".gpu" not in found.name]
for name in names:
    if name not in ("atoll.node.learning.kernels.on_gpu", "atoll.p2p.discovery.dht_child"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in extras:
                raise
            lacking.append(name)
strangers = {
    module.__file__ for name, module in sys.modules.items()
    if getattr(module, "__file__", None) and "site-packages" in module.__file__
    and not Path(module.__file__).absolute().is_relative_to(here)
}
print(len(names), "modules;", len(strangers), "from elsewhere", sorted(strangers)[:3], "; need extras:", lacking)
sys.exit(bool(strangers) or len(names) < 300 or len(lacking) > 6)
"""
SWARM = "sim -n 2 --rounds 3 --steps 2 --data synthetic:markov --timeout 240"


class PackageFault(Exception):
    """A step that failed, with the end of its output."""


def run(name: str, command: Sequence[str | Path], folder: Path, limit_s: float = COMMAND_S) -> str:
    """Run one step outside the checkout and print its line. Raises PackageFault."""
    began = time.monotonic()
    bare = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=bare, capture_output=True, text=True, timeout=limit_s, check=False
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"{name:<34}{time.monotonic() - began:>8.1f}  {last[:120]}", flush=True)
    if done.returncode:
        raise PackageFault(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """The wheel, from a copy of what is shipped."""
    source = folder / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in SHIPPED), str(source)], check=True)
    run("build", [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, source], folder)
    return next(folder.glob("atoll-*.whl"))


def metadata_wheel(found: Distribution, folder: Path) -> Path:
    """A wheel with the metadata of an installed distribution and none of its files."""
    name, version = found.metadata["Name"], found.version
    info = f"{name}-{version}.dist-info"
    texts = {f"{info}/METADATA": found.read_text("METADATA") or ""}
    texts[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: tests.package\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
    )
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},"
        f"{len(text.encode())}\n"
        for path, text in texts.items()
    )
    texts[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in texts.items():
            wheel.writestr(inside, text)
    return path


def link_files(found: Distribution, site: Path) -> None:
    """Link the top-level folders and modules of an installed distribution into `site`."""
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        if not top.endswith(".dist-info") and not (site / top).exists():
            (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())


def check(folder: Path) -> None:
    """All of it. Raises PackageFault."""
    wheel, torch = build_wheel(folder), distribution("torch")
    lent = folder / "lent"
    lent.mkdir()
    metadata_wheel(torch, lent)
    (folder / "constraints.txt").write_text(f"torch=={torch.version}\n")
    environment = folder / "environment"
    run("fresh environment", [sys.executable, "-m", "venv", environment], folder)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--find-links", lent]
    run("install, dependencies resolved", [*install, "-c", folder / "constraints.txt", wheel], folder, INSTALL_S)
    run("pip check", [python, "-m", "pip", "check", "--disable-pip-version-check"], folder)
    site = run("site-packages", [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    link_files(torch, Path(site.strip()))
    run("every module imported", [python, "-c", IMPORT_ALL], folder)
    for script in ("atoll", "node"):
        run(f"{script} --help", [environment / "bin" / script, "--help"], folder)
    run("a swarm of two", [environment / "bin" / "atoll", *SWARM.split(), "--dir", folder / "swarm"], folder)


def main() -> int:
    """Exit status 0: the wheel works with what it declares."""
    print(f"{'step':<34}{'seconds':>8}  last line")
    with tempfile.TemporaryDirectory(prefix="atoll-package-") as folder:
        try:
            check(Path(folder))
        except (PackageFault, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
