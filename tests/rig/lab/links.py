"""The link between one machine and the core: its rates, its loss, its delay, its plug."""

import fcntl
import json
import os
import struct
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from atoll_lab.namespaces import LabError, Namespace, command

OUTER = "ext"
"""The device of a link in the machine; in the core it is called `port` with a number."""
GATEWAY = "169.254.1.1"
"""The core's end of every link. Link-local: nobody takes it for an address of a host."""
TUNSETIFF, IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
TUNSETOFFLOAD, CHECKSUM_AND_TCP, UDP_TOO = 0x400454D0, 0x07, 0x60
BUNDLES = "gso_max_segs 65535 gso_max_size 65536"
SINGLE = "gso_max_segs 1 gso_max_size 1515"
"""A packet with its Ethernet header has at most 1514 bytes. Of bundles that a relay wrote the kernel knows only
the size, not the count."""
QUEUE_S = 0.1
"""How long a packet waits at most before a rate limit: a home router's buffer, not a bottomless one."""
QUEUE_PACKETS = 10_000
"""Before the relay, which has to wait for its turn on a busy machine: only rate limits may drop."""
LOSS_STEPS = 100_000


@dataclass(frozen=True)
class LinkSpec:
    """What a link is like. Up is towards the core.

    Rates in bits per second, None without limit. `delay_s` and `jitter_s` are for each direction of this link:
    between two hosts with equal links the round trip takes four times `delay_s`. `loss` is the share of packets
    that is lost in each direction of this link.
    """

    up_bits_s: float | None = None
    down_bits_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


class Carried(NamedTuple):
    """Bytes on the wire of a link since its start, headers included."""

    up_bytes: int
    down_bytes: int


class DelayControl(Protocol):
    """The control of a link's delay while the link runs."""

    def set_delay(self, index: int, delay_s: float, jitter_s: float) -> None: ...


class Link:
    """One link between the core and a machine's namespace, with `address` routed to the machine."""

    def __init__(self, core: Namespace, machine: Namespace, index: int, spec: LinkSpec) -> None:
        """Create the devices only; `configure` makes it carry packets. A delay needs a relay at `descriptors`."""
        self.spec = spec
        self.core, self.machine = core, machine
        self.port = f"port{index}"
        self.addresses: list[str] = []
        self.descriptors: tuple[int, int] | None = None
        self.delay_control: tuple[DelayControl, int] | None = None
        if spec.delay_s or spec.jitter_s:
            self.descriptors = (open_tun(machine, OUTER), open_tun(core, self.port))
        else:
            machine.ip(f"link add {OUTER} type veth peer name {self.port} netns {core.name}")

    def configure(self, address: str) -> None:
        """Set addresses, routes, rates and loss. Raises LabError."""
        up = f"txqueuelen {QUEUE_PACKETS} up"
        self.core.ip(f"addr add {GATEWAY}/32 dev {self.port}", f"link set dev {self.port} {up}")
        self.machine.ip(f"link set dev {OUTER} {up}")
        for end, device in ((self.core, self.port), (self.machine, OUTER)):
            end.nft(
                f"table inet lab_{device} {{ chain arriving {{ type filter hook prerouting priority raw\n }}\n }}"
            )
        self.add_address(address)
        self.set_rate(self.spec.up_bits_s, self.spec.down_bits_s)
        self.set_loss(self.spec.loss)

    def add_address(self, address: str) -> None:
        """Let the machine answer to `address` and send from it."""
        self.machine.ip(
            f"addr add {address}/32 dev {OUTER}",
            f"route replace default via {GATEWAY} dev {OUTER} onlink src {address}",
        )
        self.addresses.append(address)
        self.core.ip(f"route add {address}/32 dev {self.port}")

    def drop_address(self, address: str) -> None:
        """Lose packets to `address` from now on."""
        self.addresses.remove(address)
        self.core.ip(f"route del {address}/32 dev {self.port}")
        self.machine.ip(f"addr del {address}/32 dev {OUTER}")

    def set_rate(self, up_bits_s: float | None, down_bits_s: float | None) -> None:
        """Set the rates from now on, in bits per second; None lifts a limit. Raises LabError."""
        for end, device, bits_s in ((self.machine, OUTER, up_bits_s), (self.core, self.port, down_bits_s)):
            if bits_s is None:
                end.tc(f"qdisc replace dev {device} root pfifo limit {QUEUE_PACKETS}")
            else:
                burst_bytes = max(16_384, int(bits_s / 8 * 0.005))
                rate = f"rate {int(bits_s)}bit burst {burst_bytes} latency {int(QUEUE_S * 1000)}ms"
                end.tc(f"qdisc replace dev {device} root tbf {rate}")
        self.spec = replace(self.spec, up_bits_s=up_bits_s, down_bits_s=down_bits_s)

    def set_loss(self, loss: float) -> None:
        """Set the share of packets that are lost in each direction from now on, 0 to 1. Raises LabError."""
        if not 0 <= loss <= 1:
            raise LabError(f"a loss is a share from 0 to 1, not {loss}")
        # The kernel hands over bundles of up to forty packets. With loss each must be on its own, or whole bundles
        # would be lost; it costs much speed.
        drop = f"numgen random mod {LOSS_STEPS} < {round(loss * LOSS_STEPS)} counter drop"
        for end, device in ((self.core, self.port), (self.machine, OUTER)):
            end.ip(f"link set dev {device} {SINGLE if loss else BUNDLES}")
            rule = f'add rule inet lab_{device} arriving iifname "{device}" {drop}\n' if loss else ""
            end.nft(f"flush chain inet lab_{device} arriving\n{rule}")
        self.spec = replace(self.spec, loss=loss)

    def set_delay(self, delay_s: float, jitter_s: float = 0.0) -> None:
        """Set the delay of each direction in seconds. Raises LabError on a link that began without delay."""
        if self.delay_control is None:
            raise LabError("this link has no relay: begin with a delay_s above 0")
        control, index = self.delay_control
        control.set_delay(index, delay_s, jitter_s)
        self.spec = replace(self.spec, delay_s=delay_s, jitter_s=jitter_s)

    def down(self) -> None:
        """Cut the link: nothing passes in either direction until `up`."""
        self.core.ip(f"link set dev {self.port} down")

    def up(self) -> None:
        """Restore a cut link, with the same addresses."""
        self.core.ip(
            f"link set dev {self.port} up",
            *(f"route replace {address}/32 dev {self.port}" for address in self.addresses),
        )

    def carried(self) -> Carried:
        """Return the bytes that passed the rate limits since the start. Loss comes after that."""
        sent = [device_bytes(self.machine, OUTER), device_bytes(self.core, self.port)]
        return Carried(*sent)


def device_bytes(namespace: Namespace, device: str) -> int:
    """Bytes that a device sent since its start."""
    shown = command("ip", "-n", namespace.name, "-json", "-statistics", "link", "show", "dev", device)
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def open_tun(namespace: Namespace, device: str) -> int:
    """Open a new TUN device to read and write its packets; closing it removes it. Raises OSError."""

    def act() -> int:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
            allow_bundles(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return namespace.inside(act)


def allow_bundles(descriptor: int) -> None:
    """Let the device hand over bundles of up to 64 KiB: far fewer steps for the relay."""
    try:
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, CHECKSUM_AND_TCP | UDP_TOO)
    except OSError:  # UDP bundles came with Linux 6.2
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, CHECKSUM_AND_TCP)
