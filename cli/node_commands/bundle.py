"""`bundle`: one file for a bug report, without what must not leave the machine."""

import getpass
import importlib.metadata
import io
import platform
import re
import socket
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from atoll.cli.client import call
from atoll.cli.doctor_findings import findings
from atoll.cli.formatting import print_json, size
from atoll.cli.node_commands.detached import CRASH_LOG
from atoll.cli.options import home_option, json_option
from atoll.cli.stopped_node import last_rows, last_run, last_status
from atoll.node.config.home import Home
from atoll.node.doctor.redaction import SECRET, Redaction, forms_of, hosts_in
from atoll.p2p.system.atomic_files import disk, write_whole
from atoll.protocols.errors import AtollError, ConfigError, LocalFault, NotRunning
from atoll.protocols.local import control_messages

TAIL_BYTES = 1 << 20
"""Of each log."""
ROUNDS = 200
KEY_BYTES = 32
_OWN_NAME = re.compile(r"(?m)^(\s*name\s*=\s*).+$")
READ_ME = (
    "look into it before you send it: secrets, invites and addresses are taken out, words that you wrote are not"
)


@click.command()
@home_option
@json_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: here, with the time."
)
def bundle(home: Home, as_json: bool, output: Path | None) -> None:
    """Write versions, doctor, status, rounds, logs and settings into one file for a bug report.

    Keys, invites, addresses, PeerIDs, names of members and of this machine are taken out.
    """
    path = output or Path(f"atoll-bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if path.exists():
        raise ConfigError(f"{path} is there already", hint="choose another --output")
    parts = redacted(home, dict(_parts(home)))
    data = packed(parts, time.time())
    write_whole(path, data)
    if as_json:
        print_json({"path": str(path.absolute()), "bytes": len(data), "files": sorted(parts)})
    else:
        click.echo(f"{path} ({size(len(data))}): {', '.join(sorted(parts))}\n{READ_ME}")


def redacted(home: Home, parts: dict[str, str]) -> dict[str, str]:
    """The parts of a bundle without what must not leave. Raises LocalFault rather than let a key out."""
    secrets = _secrets(home)
    redaction = Redaction(secrets, _names(home, parts))
    clean = {name: redaction.text(text) for name, text in parts.items()}
    for name, text in clean.items():
        if any(secret in text for secret in secrets):
            raise LocalFault(f"a key of this node would be in {name}; nothing was written", hint="report this bug")
    return clean


def packed(parts: dict[str, str], unix_s: float) -> bytes:
    """The parts as a tar.gz with one folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in sorted(parts.items()):
            data = text.encode(errors="replace")
            entry = tarfile.TarInfo(f"atoll-bundle/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(unix_s), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def _parts(home: Home) -> Iterator[tuple[str, str]]:
    """Name and text of each part. One that cannot be had says why."""
    yield "versions.json", _json(_versions())
    yield "doctor.json", _json(_tried(lambda: findings(home)))
    yield "status.json", _json(_tried(lambda: _status(home)))
    yield "rounds.json", _json(_tried(lambda: _rounds(home)))
    for name in (home.log.name, CRASH_LOG, "doctor.log"):
        if (home.root / name).exists():
            yield name, _tail(home.root / name)
    if home.config_toml.exists():
        yield home.config_toml.name, _OWN_NAME.sub(r'\1"<name>"', _tail(home.config_toml))
    for path in sorted(home.runs.glob("*/worker.log")):
        yield f"worker-{path.parent.name[:8]}.log", _tail(path)


def _versions() -> dict[str, Any]:
    wishes = importlib.metadata.requires("atoll") or []
    names = sorted({re.split(r"[<>=!~;\[ ]", wish)[0] for wish in wishes if "extra ==" not in wish})
    return {
        "atoll": importlib.metadata.version("atoll"),
        "python": sys.version,
        "system": platform.platform(),
        "machine": platform.machine(),
        "packages": {name: _version(name) for name in names},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _status(home: Home) -> Any:
    try:
        now = call(home, control_messages.GetStatus(), control_messages.Status)
        return msgspec.structs.replace(now, name="", names={})
    except NotRunning:
        return last_status(home)


def _rounds(home: Home) -> Any:
    try:
        return call(home, control_messages.GetRounds(ROUNDS), control_messages.RoundList).rounds
    except NotRunning:
        return last_rows(home, last_run(home))[-ROUNDS:]


def _tried(work: Any) -> Any:
    try:
        return work()
    except AtollError as error:
        return {"error": error.line()}


def _tail(path: Path) -> str:
    with disk(path), path.open("rb") as file:
        begin = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(begin)
        data = file.read(TAIL_BYTES)
    # A line that is cut may begin inside a secret, and then nothing would know it for one.
    return data[data.find(b"\n") + 1 if begin else 0 :].decode(errors="replace")


def _secrets(home: Home) -> list[str]:
    """The node's key in every form, and the invites that it joined with."""
    found: list[str] = []
    if home.identity.exists():
        with disk(home.identity):
            found += forms_of(home.identity.read_bytes()[:KEY_BYTES])
    for path in home.runs.glob("*/invite"):
        with disk(path):
            found.append(path.read_text(errors="replace").strip())
    return [secret for secret in found if secret != SECRET]


def _names(home: Home, parts: dict[str, str]) -> dict[str, str]:
    """What else is replaced in every part: this machine, its user, folders, and hosts that some part has."""
    hosts = set().union(*map(hosts_in, parts.values()))
    names = {host: "<address>" for host in hosts if re.search(r"[A-Za-z]", host)}
    names |= {socket.gethostname(): "<host>", getpass.getuser(): "<user>"}
    return names | {str(Path.home()): "~", str(home.root): "HOME"}


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
