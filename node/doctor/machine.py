"""Checks this machine without the network: key, home, disk, clock, configuration, memory, Python, torch, GPU."""

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
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from atoll.node.config.devices import devices_of
from atoll.node.doctor.checks import CheckState, DoctorCheck, DoctorInput, Finding
from atoll.node.doctor.experts import available_room, config_or_cpu, trained_experts
from atoll.node.runs.capacity.free_resources import states_of
from atoll.node.runs.capacity.join_preview import preview_of, with_average
from atoll.node.runs.capacity.machine_fit import measure_machine
from atoll.node.runs.capacity.memory_model import Free, needs_of
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.system.atomic_files import disk
from atoll.p2p.system.control_group import usable_cpus
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import LocalFault
from atoll.protocols.run.bounds import snapshot_max_bytes

GB = 1e9
DISK_FAIL_BYTES = 200e6
DISK_WARN_BYTES = 2e9
SAVED = 4
"""Size of a saved state, in sizes of one snapshot: 16 bytes a value to 4."""
EARLIEST_S = 1_767_225_600.0
"""2026-01-01 in seconds since 1970: this program is not older."""
LATEST_S = 4_102_444_800.0
CLOCK_WARN_S = 30.0
CLOCK_FAIL_S = 3600.0
"""libp2p's certificates begin one hour before they are made: a clock further behind refuses QUIC."""
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


def identity(given: DoctorInput) -> Iterator[Finding]:
    """Check mode and size of the key file, and that the running node has its PeerID."""
    path = given.home.identity
    if not os.path.lexists(path):
        yield Finding("identity", "skip", "no key yet; the first start makes one")
        return
    peer = load_or_create(path).peer_id
    running = (given.status or {}).get("peer", peer)
    if running != peer:
        remedy = "restart the node, or put the old key file back"
        yield Finding("identity", "fail", f"the node runs as {running}, the file holds {peer}", remedy)
        return
    yield Finding("identity", "pass", peer)


def home(given: DoctorInput) -> Iterator[Finding]:
    """Check that the home can be written by us alone, and that a node which holds its lock answers."""
    root = given.home.root
    folder = _existing(root)
    with disk(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"atoll")
        file.flush()
    if root.is_dir() and root.stat().st_mode & 0o077:
        yield Finding("home", "warn", f"others may look into {root}", f"chmod 700 {root}")
    else:
        yield Finding("home", "pass", f"{root} can be written" if folder == root else f"{root} will be made")
    if given.status is None and (pid := _lock_holder(given.home.lock)):
        remedy = f"wait if it has just started; else look at {given.home.log} and stop process {pid}"
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                remedy = f"it was stopped by a signal: `kill -CONT {pid}` lets it go on"
        yield Finding("lock", "fail", f"process {pid} holds the home, but no node answers", remedy)


def free_disk(given: DoctorInput) -> Iterator[Finding]:
    """Check free disk space against what the run may store beside what is stored already, as `start` counts it."""
    free = shutil.disk_usage(_existing(given.home.root)).free
    remedy = "free some space, or choose another --home"
    if given.run is None:
        if free < DISK_WARN_BYTES:
            yield Finding("disk", "fail" if free < DISK_FAIL_BYTES else "warn", f"{bytes_text(free)} free", remedy)
        else:
            yield Finding("disk", "skip", f"{bytes_text(free)} free; no run to measure it by")
        return
    stored, members = _stored_bytes(given.home.run(given.run.id)), (given.status or {}).get("members")
    config = with_average(given.run, config_or_cpu(given), Free(0, free))
    need = preview_of(given.run, config, available_room(given), members or None).disk_bytes
    here = f", {bytes_text(stored)} of it stored" if stored else ""
    text = f"{bytes_text(free)} free, up to {bytes_text(need)} needed{here}"
    if free + stored >= need:
        yield Finding("disk", "pass", text)
    else:
        # Less than one more saved state: the node pauses at its next save.
        yield Finding("disk", "fail" if free < SAVED * snapshot_max_bytes(given.run) else "warn", text, remedy)


def _stored_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; what is deleted meanwhile counts as nothing."""
    count = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                count += os.lstat(os.path.join(root, name)).st_blocks * 512
    return count


def bytes_text(count: int) -> str:
    """`40.5 GB`, or megabytes where there is less than one: a nearly full disk has no "0.0 GB"."""
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 1e6:.1f} MB"


def clock(given: DoctorInput) -> Iterator[Finding]:
    """Check the clock: a wrong one breaks QUIC's certificates, invites and every log."""
    now = time.time()
    remedy = "switch on network time (for example: timedatectl set-ntp true)"
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if not EARLIEST_S < now < LATEST_S:
        yield Finding("clock", "fail", f"{text} cannot be right", remedy)
        return
    newest = max((path.stat().st_mtime for path in _home_files(given)), default=0.0)
    if newest > now + 3600:
        yield Finding("clock", "warn", f"{text}, but files here are {(newest - now) / 3600:.0f} h younger", remedy)
        return
    ahead_s = (given.status or {}).get("clock_ahead_s")
    if isinstance(ahead_s, int | float):
        yield clock_finding(text, float(ahead_s), remedy)
        return
    state = _kernel_clock()
    if state == _TIME_ERROR:
        yield Finding("clock", "warn", f"{text}, and no time service keeps it right", remedy)
    elif state < 0:
        yield Finding("clock", "skip", f"{text}; nothing here says how exact that is")
    else:
        yield Finding("clock", "pass", f"{text}, kept by a time service")


def clock_finding(text: str, peers_ahead_s: float, remedy: str) -> Finding:
    """Judge the clock by the median of the peers' clocks, in seconds ahead of ours."""
    if abs(peers_ahead_s) < CLOCK_WARN_S:
        return Finding("clock", "pass", f"{text}, {abs(peers_ahead_s):.1f} s from the peers' clocks")
    side = "behind" if peers_ahead_s > 0 else "ahead of"
    state: CheckState = "fail" if abs(peers_ahead_s) >= CLOCK_FAIL_S else "warn"
    return Finding("clock", state, f"{text}, {abs(peers_ahead_s):.0f} s {side} the peers' clocks", remedy)


def configuration(given: DoctorInput) -> Iterator[Finding]:
    """Check that the seeds of config.toml are valid; the caller has read the file and reported its errors."""
    path = given.home.config_toml
    if given.config is not None:
        for seed in given.config.seeds:
            parse_seed(seed)
        yield Finding("config", "pass", str(path) if path.exists() else "no config.toml; defaults")


def memory(given: DoctorInput) -> Iterator[Finding]:
    """Check memory against what the worker needs."""
    found = measure_machine("cpu")
    text = f"{found.memory_free_bytes / GB:.1f} of {found.memory_bytes / GB:.1f} GB available"
    if given.run is None:
        yield Finding("memory", "skip", f"{text}; no run to measure it by")
        return
    experts = trained_experts(given)
    config = states_of(given.run, config_or_cpu(given), Free(found.memory_bytes, 0), experts, spare=0.0)
    need = needs_of(given.run, config, experts).host
    text += f", about {need / GB:.1f} GB needed"
    if need > found.memory_bytes:
        remedy = "`atoll doctor --fit` names the presets that fit; or take another machine"
        yield Finding("memory", "fail", text, remedy)
    elif given.status is None and need > found.memory_free_bytes:
        yield Finding("memory", "warn", text, "close other programs before you start")
    else:
        yield Finding("memory", "pass", text)


def software(given: DoctorInput) -> Iterator[Finding]:
    """Check the versions of Python and of the main packages."""
    names = ("atoll", "torch", "hivemind", "libp2p")
    found = {name: _version(name) for name in names}
    text = ", ".join([f"Python {platform.python_version()}", *(f"{name} {found[name]}" for name in names)])
    missing = [name for name in ("torch", "hivemind") if not found[name]]
    if sys.version_info < (3, 11) or missing:
        yield Finding("software", "fail", text, "install atoll again, with Python 3.11 or newer")
    else:
        yield Finding("software", "pass", text)


def gpu(given: DoctorInput) -> Iterator[Finding]:
    """Check what torch can use; in a child process, because torch must not be loaded into this one."""
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
    wanted = given.config.device if given.config is not None else "auto"
    yield gpu_finding(json.loads(ran.stdout.strip().splitlines()[-1]), cards, wanted)


def gpu_finding(torch: dict[str, object], cards: list[str], wanted: str) -> Finding:
    """Judge the GPU: `torch` is the child's report, `cards` that of nvidia-smi, `wanted` the configured device."""
    build = f"torch {torch['torch']}"
    if torch["cuda"]:
        return _judge_cards(torch, build, wanted)
    state: CheckState = "fail" if wanted.startswith("cuda") else "warn"
    if cards and not torch["built"]:
        remedy = "install a CUDA build of torch"
        return Finding("gpu", state, f"{cards[0]} is here, but {build} is a CPU build", remedy)
    if cards:
        remedy = "check the NVIDIA driver: torch needs a newer one, or this process may not use the device"
        return Finding("gpu", state, f"{cards[0]} is here, but {build} cannot use it", remedy)
    if wanted.startswith("cuda"):
        return Finding("gpu", "fail", f"no NVIDIA GPU, but device = {wanted!r}", "set device to auto or cpu")
    return Finding("gpu", "pass", f"none; trains on {usable_cpus()} CPU threads, {build}")


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
    """`path`, or the nearest parent folder that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _home_files(given: DoctorInput) -> list[Path]:
    home = given.home
    return [path for path in (home.identity, home.log, home.lock, home.config_toml) if path.is_file()]


def _kernel_clock() -> int:
    """Result of adjtimex(2): 0 … 4 for a synchronised clock, 5 for another, −1 if unknown."""
    if sys.platform != "linux":
        return -1
    call = getattr(ctypes.CDLL(None), "adjtimex", None)
    return -1 if call is None else int(call(ctypes.create_string_buffer(512)))


def _lock_holder(path: Path) -> int:
    """Id of the process that holds the lock file; 0 if none does."""
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
