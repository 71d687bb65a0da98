"""A home router: network address translation of three kinds, and what happens to it in the wild."""

import enum
import os
import random
import re
import socket
import struct
from pathlib import Path

from atoll_lab.links import OUTER, Link
from atoll_lab.namespaces import LabError, Namespace

INNER = "lan"
NETLINK_NETFILTER = 12
CONNTRACK_DELETE = 0x0102
REQUEST_AND_ACKNOWLEDGE = 0x0005
TRACKED = re.compile(r"^ipv4\s+\d+ (?P<kind>udp|tcp) .*?src=(?P<source>\S+) dst=\S+ sport=(?P<port>\d+) ")
SHIFTED_PORTS = (20_000, 60_000)


class Nat(enum.StrEnum):
    """How a router translates.

    CONE keeps the port where it can, so that every peer sees the same one: punching works. What comes from outside
    passes only as an answer. SYMMETRIC takes another port for every peer. NOUDP is CONE and lets no UDP through.
    """

    CONE = "cone"
    SYMMETRIC = "symmetric"
    NOUDP = "noudp"


def rules(nat: Nat) -> str:
    """The router's rules for nft(8).

    What comes to a closed port is dropped without a trace: an answer would end a punch, and an entry would take
    the port away from the host that is about to punch.
    """
    return f"""
        table ip nat {{
            map moved_udp {{ type inet_service : inet_service; }}
            map moved_tcp {{ type inet_service : inet_service; }}
            chain forwarded_ports {{ type nat hook prerouting priority dstnat; }}
            chain outgoing {{
                type nat hook postrouting priority srcnat;
                oifname "{OUTER}" udp sport @moved_udp masquerade to : udp sport map @moved_udp
                oifname "{OUTER}" tcp sport @moved_tcp masquerade to : tcp sport map @moved_tcp
                oifname "{OUTER}" masquerade {"fully-random" if nat is Nat.SYMMETRIC else ""}
            }}
        }}
        table ip filter {{
            chain through {{
                type filter hook forward priority 0; policy drop;
                {"meta l4proto udp counter drop" if nat is Nat.NOUDP else ""}
                ct state established,related accept
                ct status dnat accept
                iifname "{INNER}" accept
            }}
            chain to_router {{
                type filter hook input priority 0; policy drop;
                ct state established,related accept
                iifname "{INNER}" accept
            }}
        }}
    """


class Router:
    """The router of one home, between the home's cable and the core."""

    def __init__(self, namespace: Namespace, link: Link, nat: Nat, addresses: list[str]) -> None:
        """`addresses`: those that the provider may assign; the first one is assigned now."""
        self.namespace, self.link, self.nat = namespace, link, nat
        self.address = addresses[0]
        self._addresses = addresses

    def configure(self) -> None:
        """Set up translation and filter. Raises LabError."""
        self.namespace.set_kernel("ipv4/ip_forward", "1")
        self.namespace.nft(rules(self.nat))

    def tracked(self) -> set[tuple[str, int]]:
        """Return protocol and inner port of every mapping of the router."""
        # /proc/net is the network of the process's first thread
        text = self.namespace.inside(Path("/proc/thread-self/net/nf_conntrack").read_text)
        found = (TRACKED.match(line) for line in text.splitlines())
        return {
            (match["kind"], int(match["port"])) for match in found if match and match["source"] != self.address
        }

    def flush_conntrack(self) -> None:
        """Forget every mapping, as after a restart of the router.

        Nothing passes from outside until the host sends again. Then a cone router gives the same port, a symmetric
        one another. Raises LabError.
        """
        self.namespace.inside(delete_tracked)

    def rebind(self) -> dict[tuple[str, int], int]:
        """Forget every mapping and give every inner port in use another outer port, as routers do that run short.

        Gives back (protocol, inner port) -> outer port. A symmetric router changes ports anyway. Raises LabError.
        """
        moved = {used: random.randrange(*SHIFTED_PORTS) for used in self.tracked()}
        lines = [f"flush map ip nat moved_{kind}" for kind in ("udp", "tcp")]
        if self.nat is not Nat.SYMMETRIC:
            lines += [
                f"add element ip nat moved_{kind} {{ {inner} : {outer} }}"
                for (kind, inner), outer in moved.items()
            ]
        self.namespace.nft("\n".join(lines))
        self.flush_conntrack()
        return moved

    def change_address(self) -> str:
        """Let the provider assign another public address and return it; mappings end with the old one."""
        place = (self._addresses.index(self.address) + 1) % len(self._addresses)
        old, self.address = self.address, self._addresses[place]
        self.link.add_address(self.address)
        self.link.drop_address(old)
        self.flush_conntrack()
        return self.address

    def forward_port(self, kind: str, port: int, host_address: str) -> None:
        """Forward `port` ("udp" or "tcp") from outside, as people configure by hand. Raises LabError."""
        if kind not in ("udp", "tcp"):
            raise LabError(f"ports are udp or tcp, not {kind}")
        rule = f'iifname "{OUTER}" {kind} dport {port} dnat to {host_address}'
        self.namespace.nft(f"add rule ip nat forwarded_ports {rule}")


def delete_tracked() -> None:
    """Empty the connection table of the network of this thread, over netlink: conntrack(8) is seldom installed."""
    message = struct.pack("=IHHII4x", 20, CONNTRACK_DELETE, REQUEST_AND_ACKNOWLEDGE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as kernel:
        kernel.settimeout(5.0)
        kernel.send(message)
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error:
        raise LabError(f"the kernel did not empty the connection table: {os.strerror(-error)}")
