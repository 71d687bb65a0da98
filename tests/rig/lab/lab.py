"""The lab: hosts on a small internet of network namespaces, some of them behind home routers.

    spec = LabSpec({"seed": Public(), "home1": Home(Nat.CONE), "home2": Home(Nat.CONE)})
    with Lab(spec) as lab:
        process = lab["home1"].run(["ping", "-c1", lab["seed"].address], stdout=subprocess.PIPE, text=True)

Everything lives in namespaces with the process id in their names, has no way out, and is removed at the end of the
block together with every process inside. What a killed lab left is removed when the next one begins.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from atoll.p2p.system.child_processes import die_with_parent
from atoll_lab.links import Link, LinkSpec
from atoll_lab.namespaces import LabError, Namespace, end_processes
from atoll_lab.routers import INNER, Nat, Router
from atoll_lab.sweep import PREFIX, sweep

T = TypeVar("T")
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
HOSTS_MAX = 200
ROUTER_ADDRESSES = 8
CABLE = "eth0"
"""The device of a host at home; a public host's only device is its link."""
CONGESTION_CONTROLS = ("cubic", "reno")
"""What most volunteers have: the first that the kernel allows. A machine's own may be bbr, which ignores loss."""
LABS = itertools.count()


@dataclass(frozen=True)
class Public:
    """A host with a public address."""

    link: LinkSpec = field(default_factory=LinkSpec)


@dataclass(frozen=True)
class Home:
    """A host behind a router of its own; the link is the router's."""

    nat: Nat = Nat.CONE
    link: LinkSpec = field(default_factory=LinkSpec)


@dataclass(frozen=True)
class LabSpec:
    """Hosts by name: lower case letters, digits and hyphens."""

    hosts: Mapping[str, Public | Home]


class Host:
    """One machine of the lab."""

    def __init__(self, name: str, namespace: Namespace, link: Link, address: str, router: Router | None) -> None:
        self.name, self.namespace, self.link, self.router = name, namespace, link, router
        self.address = address
        """Its own address: public, or 192.168.x.2 at home."""
        self.processes: list[subprocess.Popen[Any]] = []

    @property
    def public_address(self) -> str:
        """Public address of this host: its own or, at home, the present one of its router."""
        return self.router.address if self.router else self.address

    @property
    def within(self) -> tuple[str, ...]:
        """Return the words that run a command on this host; the process id stays the command's own."""
        return ("ip", "netns", "exec", self.namespace.name)

    def run(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host; `options` are Popen's. The process id is the program's own.

        It has a session of its own and ends with the lab at the latest, and with this process however that ends.
        """
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("start_new_session", True)
        options.setdefault("preexec_fn", die_with_parent(os.getpid()))
        process = subprocess.Popen([*self.within, *words], **options)
        self.processes.append(process)
        return process

    def inside(self, act: Callable[[], T]) -> T:
        """Run `act` on this host and return its result; sockets that it opens stay on this host."""
        return self.namespace.inside(act)

    def down(self) -> None:
        """Pull the host's cable."""
        if self.router is None:
            self.link.down()
        else:
            self.router.namespace.ip(f"link set dev {INNER} down")

    def up(self) -> None:
        """Put the cable back."""
        if self.router is None:
            self.link.up()
        else:
            self.router.namespace.ip(f"link set dev {INNER} up")

    def close(self) -> None:
        """End the processes of this host and close their pipes. Raises LabError."""
        end_processes([self.namespace])
        for process in self.processes:
            process.kill()  # it may not have entered the namespace yet
            process.wait(timeout=10)
        end_processes([self.namespace])  # what it started when it entered at the last moment; it holds the pipes
        for process in self.processes:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class Delays:
    """The process that delays packets for all links of a lab."""

    def __init__(self, links: Sequence[Link]) -> None:
        delayed = [link for link in links if link.descriptors]
        pairs = [[*(link.descriptors or ()), link.spec.delay_s, link.spec.jitter_s] for link in delayed]
        descriptors = [descriptor for link in delayed for descriptor in link.descriptors or ()]
        script = str(Path(__file__).with_name("relay.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-IS", script, json.dumps(pairs)],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,
        )
        for index, link in enumerate(delayed):
            link.delay_control = (self, index)

    def set_delay(self, index: int, delay_s: float, jitter_s: float) -> None:
        """See Link.set_delay. Raises LabError when the relay is gone."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), json.dumps([index, delay_s, jitter_s]).encode() + b"\n")
        except BrokenPipeError as error:
            raise LabError("the delay relay has ended") from error

    def close(self) -> None:
        """End the process, and the devices with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Lab:
    """A lab that is built as its spec says when its block begins, and removed when it ends. Needs root."""

    def __init__(self, spec: LabSpec) -> None:
        """Check the spec. Raises LabError when names or the number of hosts are impossible."""
        wrong = [name for name in spec.hosts if not NAME.fullmatch(name)]
        if wrong or not 1 <= len(spec.hosts) <= HOSTS_MAX:
            raise LabError(f"1 to {HOSTS_MAX} hosts with names like home-1, not {wrong or len(spec.hosts)}")
        self.spec = spec
        self.prefix = f"{PREFIX}-{os.getpid()}-{next(LABS)}"
        self.hosts: dict[str, Host] = {}
        self._exits = contextlib.ExitStack()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def router(self, name: str) -> Router:
        """Return the router of a host at home. Raises LabError for public hosts."""
        router = self.hosts[name].router
        if router is None:
            raise LabError(f"{name} is public: it has no router")
        return router

    def __enter__(self) -> Self:
        sweep()
        with contextlib.ExitStack() as exits:
            self._exits = exits
            self._build()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._exits:
            end_processes([host.namespace for host in self])

    def _namespace(self, name: str) -> Namespace:
        namespace = Namespace(f"{self.prefix}-{name}")
        self._exits.callback(namespace.remove)  # first, so that no interruption finds it made and not remembered
        namespace.make()
        return namespace

    def _build(self) -> None:
        core = self._namespace("core")
        core.set_kernel("ipv4/ip_forward", "1")
        # What nobody has is lost without an answer, as addresses are that a provider took back.
        core.ip("route add blackhole default")
        machines = [
            self._namespace(f"{name}-router" if isinstance(kind, Home) else name)
            for name, kind in self.spec.hosts.items()
        ]
        links = self._links(core, machines)
        for index, (name, kind) in enumerate(self.spec.hosts.items()):
            make = self._home if isinstance(kind, Home) else self._public
            make(index, name, machines[index], links[index])

    def _links(self, core: Namespace, machines: Sequence[Namespace]) -> list[Link]:
        links: list[Link] = []
        with contextlib.ExitStack() as opened:
            for index, (machine, kind) in enumerate(zip(machines, self.spec.hosts.values(), strict=True)):
                links.append(Link(core, machine, index, kind.link))
                for descriptor in links[-1].descriptors or ():
                    opened.callback(os.close, descriptor)
            if any(link.descriptors for link in links):
                self._exits.callback(Delays(links).close)
        return links

    def _public(self, index: int, name: str, namespace: Namespace, link: Link) -> None:
        address = f"5.{10 + index}.1.1"
        link.configure(address)
        self._add(Host(name, namespace, link, address, None))

    def _home(self, index: int, name: str, machine: Namespace, link: Link) -> None:
        spec = self.spec.hosts[name]
        assert isinstance(spec, Home)
        # Every provider has a block of its own: peers that count addresses by /16 see different networks.
        router = Router(
            machine, link, spec.nat, [f"11.{10 + index}.{place}.1" for place in range(1, ROUTER_ADDRESSES)]
        )
        link.configure(router.address)
        namespace = self._namespace(name)
        lan = f"192.168.{10 + index}"
        machine.ip(
            f"link add {INNER} type veth peer name {CABLE} netns {namespace.name}",
            f"addr add {lan}.1/24 dev {INNER}",
            f"link set dev {INNER} up",
        )
        namespace.ip(
            f"addr add {lan}.2/24 dev {CABLE}",
            f"link set dev {CABLE} up",
            f"route add default via {lan}.1",
        )
        router.configure()
        self._add(Host(name, namespace, link, f"{lan}.2", router))

    def _add(self, host: Host) -> None:
        set_congestion_control(host.namespace)
        self.hosts[host.name] = host
        self._exits.callback(host.close)


def set_congestion_control(namespace: Namespace) -> None:
    """Choose a congestion control for the lab. Raises LabError when the kernel allows none of ours."""
    for name in CONGESTION_CONTROLS:
        try:
            namespace.set_kernel("ipv4/tcp_congestion_control", name)
        except OSError:
            continue
        return
    raise LabError(f"the kernel allows none of {CONGESTION_CONTROLS} in a namespace")


__all__ = ["Home", "Host", "Lab", "LabError", "LabSpec", "LinkSpec", "Nat", "Public", "Router"]
