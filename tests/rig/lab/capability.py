"""What this machine lacks for the lab, in one line that says how to get it."""

import functools
import os
import shutil
import sys
from pathlib import Path

from atoll_lab.namespaces import LabError, Namespace
from atoll_lab.sweep import PREFIX

PROGRAMS = ("ip", "tc", "nft")
TRIAL_RULES = """
    table inet trial {
        chain passing { type filter hook forward priority 0; numgen random mod 100 < 1 drop; }
    }
    table ip trial {
        chain outgoing { type nat hook postrouting priority srcnat; masquerade fully-random; }
    }
"""


@functools.cache
def missing() -> str | None:
    """Return one line about what is missing, or None if the lab can run. It tries: containers forbid much."""
    found = _missing()
    return found and f"THE NAT LAB CANNOT RUN HERE: {found}"


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"it needs Linux network namespaces, this is {sys.platform}"
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"no {', '.join(absent)} in PATH: apt-get install nftables iproute2"
    if os.geteuid() != 0:
        return "not root: run it with sudo, or in a container with --privileged"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun: modprobe tun, or give the container --device /dev/net/tun"
    return _trial()


def _trial() -> str | None:
    namespace = Namespace(f"{PREFIX}-{os.getpid()}-trial")
    try:
        namespace.make()
    except LabError as error:
        return f"no network namespaces ({error}): a container needs --privileged"
    try:
        namespace.nft(TRIAL_RULES)
        namespace.ip("link add end0 type veth peer name end1")
        namespace.tc("qdisc replace dev end0 root tbf rate 1mbit burst 16384 latency 100ms")
    except LabError as error:
        return f"the kernel lacks a part (nf_tables with nat and numgen, veth, sch_tbf): {error}"
    finally:
        namespace.remove()
    return None
