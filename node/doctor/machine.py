"""Checks of this machine: key, home, disk, clock, configuration, memory, Python, torch, GPU. No network."""

import ctypes
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from atoll.node.config.devices import devices_of
from atoll.node.daemon.coordinator.interfaces import snapshot_max_bytes
from atoll.node.doctor.checks import DoctorCheck, Finding, Patient, State
from atoll.node.doctor.experts import config_of, trained_found
from atoll.node.runs.capacity.memory_model import needs_of
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.system.atomic_files import disk
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import LocalFault

GB = 1e9
DISK_FAIL_BYTES = 200e6
DISK_WARN_BYTES = 2e9
SNAPSHOTS_KEPT = 8
"""Weights, checkpoints and payloads at hand, in sizes of one snapshot: rough, on the safe side."""
EARLIEST_S = 1_767_225_600.0
"""2026-01-01: this program is not older."""
LATEST_S = 4_102_444_800.0
CLOCK_WARN_S = 30.0
CLOCK_FAIL_S = 3600.0
"""libp2p's certificates begin one hour before they are made: who is further behind refuses QUIC connections."""
CHILD_S = 60.0
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.cuda.is_available(), "built": torch.version.cuda or ""}
if found["cuda"]:
    found["free"], found["total"] = torch.cuda.mem_get_info()
    found["name"], found["count"] = torch.cuda.get_device_name(), torch.cuda.device_count()
print(json.dumps(found))
"""


def identity(patient: Patient) -> Iterator[Finding]:
    """The key file: its mode, its size, the PeerID."""
    path = patient.home.identity
    if not os.path.lexists(path):
        yield Finding("identity", "pass", "no key yet; the first start makes one")
        return
    peer = load_or_create(path).peer_id
    running = (patient.status or {}).get("peer", peer)
    if running != peer:
        remedy = "restart the node, or put the old key file back"
        yield Finding("identity", "fail", f"the node runs as {running}, the file holds {peer}", remedy)
        return
    yield Finding("identity", "pass", peer)


def home(patient: Patient) -> Iterator[Finding]:
    """The folder is ours and can be written; the lock is held by a node that answers, or by nobody."""
    root = patient.home.root
    folder = _existing(root)
    with disk(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"atoll")
        file.flush()
    if root.is_dir() and root.stat().st_mode & 0o077:
        yield Finding("home", "warn", f"others may look into {root}", f"chmod 700 {root}")
    else:
        yield Finding("home", "pass", f"{root} can be written" if folder == root else f"{root} will be made")
    if patient.status is None and (pid := _lock_holder(patient.home.lock)):
        remedy = f"wait if it has just started; else look at {patient.home.log} and stop process {pid}"
        yield Finding("lock", "fail", f"process {pid} holds the home, but no node answers", remedy)


def free_disk(patient: Patient) -> Iterator[Finding]:
    """Room for what the run keeps."""
    free = shutil.disk_usage(_existing(patient.home.root)).free
    need = DISK_WARN_BYTES
    if patient.run is not None:
        need = max(DISK_FAIL_BYTES, SNAPSHOTS_KEPT * snapshot_max_bytes(patient.run))
    text = f"{free / GB:.1f} GB free, about {need / GB:.1f} GB needed"
    remedy = "free some space, or choose another --home"
    state: State = "pass" if free >= need else "warn" if free >= DISK_FAIL_BYTES else "fail"
    yield Finding("disk", state, text, "" if state == "pass" else remedy)


def clock(patient: Patient) -> Iterator[Finding]:
    """A wrong clock breaks QUIC's certificates (an hour behind is too much), invites and every log."""
    now = time.time()
    remedy = "switch on network time (for example: timedatectl set-ntp true)"
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if not EARLIEST_S < now < LATEST_S:
        yield Finding("clock", "fail", f"{text} cannot be right", remedy)
        return
    newest = max((path.stat().st_mtime for path in _files_of_ours(patient)), default=0.0)
    if newest > now + 3600:
        yield Finding("clock", "warn", f"{text}, but files here are {(newest - now) / 3600:.0f} h younger", remedy)
        return
    ahead_s = (patient.status or {}).get("clock_ahead_s")
    if isinstance(ahead_s, int | float):
        yield judge_clock(text, float(ahead_s), remedy)
        return
    state = _kernel_clock()
    if state == _TIME_ERROR:
        yield Finding("clock", "warn", f"{text}, and no time service keeps it right", remedy)
    else:
        yield Finding("clock", "pass", f"{text}" + (", kept by a time service" if state >= 0 else ""))


def judge_clock(text: str, peers_ahead_s: float, remedy: str) -> Finding:
    """Against the median of the peers' clocks."""
    if abs(peers_ahead_s) < CLOCK_WARN_S:
        return Finding("clock", "pass", f"{text}, {abs(peers_ahead_s):.1f} s from the peers' clocks")
    side = "behind" if peers_ahead_s > 0 else "ahead of"
    state: State = "fail" if abs(peers_ahead_s) >= CLOCK_FAIL_S else "warn"
    return Finding("clock", state, f"{text}, {abs(peers_ahead_s):.0f} s {side} the peers' clocks", remedy)


def configuration(patient: Patient) -> Iterator[Finding]:
    """It can be read (the caller does that first, and says why not), and its seeds are seeds."""
    path = patient.home.config_toml
    if patient.config is not None:
        for seed in patient.config.seeds:
            parse_seed(seed)
        yield Finding("config", "pass", str(path) if path.exists() else "no config.toml; defaults")


def memory(patient: Patient) -> Iterator[Finding]:
    """Room for the worker, before it starts."""
    found = psutil.virtual_memory()
    text = f"{found.available / GB:.1f} of {found.total / GB:.1f} GB available"
    if patient.run is None:
        yield Finding("memory", "pass", text)
        return
    need = needs_of(patient.run, config_of(patient), trained_found(patient)).host
    text += f", about {need / GB:.1f} GB needed"
    if need > found.total:
        yield Finding("memory", "fail", text, "choose a run with a smaller model, or another machine")
    elif patient.status is None and need > found.available:
        yield Finding("memory", "warn", text, "close other programs before you start")
    else:
        yield Finding("memory", "pass", text)


def software(patient: Patient) -> Iterator[Finding]:
    """Python and the packages that do the work."""
    names = ("atoll", "torch", "hivemind", "libp2p")
    found = {name: _version(name) for name in names}
    text = ", ".join([f"Python {platform.python_version()}", *(f"{name} {found[name]}" for name in names)])
    missing = [name for name in ("torch", "hivemind") if not found[name]]
    if sys.version_info < (3, 11) or missing:
        yield Finding("software", "fail", text, "install atoll again, with Python 3.11 or newer")
    else:
        yield Finding("software", "pass", text)


def gpu(patient: Patient) -> Iterator[Finding]:
    """What torch can use. A child asks: torch must not live in this process."""
    cards = _nvidia_cards()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=CHILD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LocalFault(f"torch was not ready in {CHILD_S:.0f} s", hint="the machine is very busy") from error
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding("torch", "fail", f"torch cannot be imported: {last}", "install torch again")
        return
    wanted = patient.config.device if patient.config is not None else "auto"
    yield judge_gpu(json.loads(ran.stdout.strip().splitlines()[-1]), cards, wanted)


def judge_gpu(torch: dict[str, object], cards: list[str], wanted: str) -> Finding:
    """`torch`: what the child printed; `cards`: what nvidia-smi printed; `wanted`: NodeConfig.device."""
    build = f"torch {torch['torch']}"
    if torch["cuda"]:
        return _judge_cards(torch, build, wanted)
    state: State = "fail" if wanted.startswith("cuda") else "warn"
    if cards and not torch["built"]:
        remedy = "install a CUDA build of torch"
        return Finding("gpu", state, f"{cards[0]} is here, but {build} is a CPU build", remedy)
    if cards:
        remedy = "check the NVIDIA driver: torch needs a newer one, or this process may not use the device"
        return Finding("gpu", state, f"{cards[0]} is here, but {build} cannot use it", remedy)
    if wanted.startswith("cuda"):
        return Finding("gpu", "fail", f"no NVIDIA GPU, but device = {wanted!r}", "set device to auto or cpu")
    return Finding("gpu", "pass", f"none; trains on {os.cpu_count()} CPU threads, {build}")


def _judge_cards(torch: dict[str, object], build: str, wanted: str) -> Finding:
    count, free, total = int(str(torch["count"])), float(str(torch["free"])) / GB, float(str(torch["total"])) / GB
    many = f"{count} devices, the first " if count > 1 else ""
    text = f"{many}{torch['name']}, {free:.1f} of {total:.1f} GB free, {build}"
    for device in devices_of(wanted):
        if device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= count:
            return Finding("gpu", "fail", f"no {device}; {text}", "choose another device")
    return Finding("gpu", "pass", text)


def _nvidia_cards() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        ran = subprocess.run(query, capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in ran.stdout.splitlines() if line.strip()] if ran.returncode == 0 else []


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _existing(path: Path) -> Path:
    """`path`, or the folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _files_of_ours(patient: Patient) -> list[Path]:
    home = patient.home
    return [path for path in (home.identity, home.log, home.lock, home.config_toml) if path.is_file()]


def _kernel_clock() -> int:
    """adjtimex(2)'s answer: 0 … 4 kept, 5 not kept, −1 unknown here."""
    if sys.platform != "linux":
        return -1
    call = getattr(ctypes.CDLL(None), "adjtimex", None)
    return -1 if call is None else int(call(ctypes.create_string_buffer(512)))


def _lock_holder(path: Path) -> int:
    """Process id in the lock file if that process lives and holds it; else 0."""
    try:
        text = path.read_bytes()[:64].strip()
        if not text.isdigit() or not psutil.pid_exists(int(text)):
            return 0
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(text)
    except OSError:
        return 0
    return 0


CHECKS = (
    DoctorCheck("identity", 5.0, identity),
    DoctorCheck("home", 10.0, home),
    DoctorCheck("disk", 10.0, free_disk),
    DoctorCheck("clock", 5.0, clock),
    DoctorCheck("config", 5.0, configuration),
    DoctorCheck("memory", 5.0, memory),
    DoctorCheck("software", 10.0, software),
    DoctorCheck("gpu", CHILD_S + 20.0, gpu),
)
