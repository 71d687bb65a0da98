"""A home behind a router that gives ports by UPnP: it becomes public, and a stranger dials it.

The router runs miniupnpd (Debian's miniupnpd-nftables); without it the case is not run, and says so.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll_lab.lab import Home, Lab, LabSpec, Nat, Public
from atoll_lab.links import OUTER
from atoll_lab.namespaces import LabError
from atoll_lab.routers import INNER, Router
from tests.rig.remote import OrderFailed, Remote
from tests.rig.tables import Row

BAR_S = 30.0
BAR = "public <= 30 s, dialled by a stranger"
CASE = "home behind a router with UPnP"
CONFIG = f"""
ext_ifname={OUTER}
listening_ip={INNER}
enable_natpmp=yes
enable_upnp=yes
upnp_table_name=miniupnpd
upnp_nat_table_name=miniupnpd
upnp_forward_chain=forward
upnp_nat_chain=prerouting
upnp_nat_postrouting_chain=postrouting
allow 1024-65535 0.0.0.0/0 1024-65535
"""
CHAINS = """
table inet miniupnpd {
    chain forward { type filter hook forward priority -25; policy accept; }
    chain prerouting { type nat hook prerouting priority -100; policy accept; }
    chain postrouting { type nat hook postrouting priority 100; policy accept; }
}
"""


@contextmanager
def gateway(router: Router, folder: Path) -> Iterator[None]:
    """Run miniupnpd on a router. Raises LabError."""
    config = folder / "miniupnpd.conf"
    config.write_text(CONFIG)
    router.namespace.nft(CHAINS)
    words = ["miniupnpd", "-d", "-f", str(config), "-P", str(folder / "pid")]
    process = subprocess.Popen(
        ["ip", "netns", "exec", router.namespace.name, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
        if process.poll() is not None:
            raise LabError("miniupnpd ended")
    finally:
        process.terminate()
        process.wait(timeout=10)


def mapped(folder: Path) -> list[Row]:
    """Return the time until the home is public, and whether a peer that never met it can dial it then."""
    if shutil.which("miniupnpd") is None:
        return [Row(CASE, BAR, "apt-get install miniupnpd-nftables", None)]
    hosts = {"seed": Public(), "other": Public(), "stranger": Public(), "home1": Home(Nat.CONE)}
    with Lab(LabSpec(hosts)) as lab, gateway(lab.router("home1"), folder):
        seed, other, stranger, home = (Remote(lab[name], folder) for name in hosts)
        for number, remote in enumerate((seed, other, stranger)):
            remote.new(number, 4001)
        began = time.monotonic()
        home.new(9, 20_000, port_map=True)
        home.meet(seed)
        home.meet(other)
        while home.do("routes")["reach"] != "public" and time.monotonic() - began < BAR_S:
            time.sleep(0.5)
        took_s = time.monotonic() - began
        routes = home.do("routes")
        reach, ports = routes["reach"], routes["port_map"]
        try:
            stranger.meet(home, within_s=10.0)
            path = stranger.path(home)
        except OrderFailed as error:
            path = f"not connected: {error}"
    text = f"{reach} after {took_s:.1f} s, a stranger is {path}, the router's ports are known: {ports}"
    ok = reach == "public" and took_s < BAR_S and path == "direct" and sorted(ports) == ["tcp", "udp"]
    return [Row(CASE, BAR, text, ok)]
