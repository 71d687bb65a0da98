"""Topologies and link descriptions by name, as they are typed on the command line."""

import re
from collections.abc import Sequence

from atoll_lab.lab import Home, LabSpec, Public
from atoll_lab.links import LinkSpec
from atoll_lab.namespaces import LabError
from atoll_lab.routers import Nat

SEED = "seed"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SHAPE = re.compile(r"(public|homes)-(\d{1,3})")


def bits_s(text: str) -> float:
    """`100mbit` -> 1e8. Raises LabError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or float(match[1]) == 0:
        raise LabError(f"a rate is like 20mbit, not {text!r}")
    return float(match[1]) * UNITS[match[2]]


def seconds(text: str) -> float:
    """`60ms` -> 0.06, `1.5s` -> 1.5. Raises LabError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None:
        raise LabError(f"a time is like 60ms, not {text!r}")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def share(text: str) -> float:
    """`1%` -> 0.01. Raises LabError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if match is None or float(match[1]) > 100:
        raise LabError(f"a loss is like 1%, not {text!r}")
    return float(match[1]) / 100


def nats(text: str, homes: int) -> list[Nat]:
    """`cone,symmetric` for two homes; one kind holds for all. Raises LabError."""
    try:
        kinds = [Nat(word) for word in text.split(",")]
    except ValueError as error:
        raise LabError(f"a NAT is one of {', '.join(Nat)}, not {text!r}") from error
    if len(kinds) not in (1, homes):
        raise LabError(f"{len(kinds)} kinds of NAT for {homes} homes")
    return kinds * (homes if len(kinds) == 1 else 1)


def path_link(rate: str | None, rtt: str, jitter: str, loss: str) -> LinkSpec:
    """The link that, at both ends of a path, gives the path this round trip and this loss each way.

    `rate` is `DOWN/UP` or one value for both. Raises LabError.
    """
    down, _, up = (rate or "").partition("/")
    return LinkSpec(
        up_bits_s=bits_s(up or down) if rate else None,
        down_bits_s=bits_s(down) if rate else None,
        delay_s=seconds(rtt) / 4,
        jitter_s=seconds(jitter) / 2,
        loss=1 - (1 - share(loss)) ** 0.5,
    )


def topology(name: str, link: LinkSpec, kinds: str = "cone") -> LabSpec:
    """Return the hosts of `home-home`, `homes-N` or `public-N`. Raises LabError.

    The first host is the seed. In `public-N` all hosts have the same link; where there are homes, the seed has no
    rate limit, as a server in a data centre has none worth the name.
    """
    match = SHAPE.fullmatch("homes-2" if name == "home-home" else name)
    if match is None or int(match[2]) == 0:
        raise LabError(f"a topology is home-home, homes-N or public-N, not {name!r}")
    count = int(match[2])
    if match[1] == "public":
        return LabSpec({host: Public(link) for host in (SEED, *numbered("public", count - 1))})
    server = LinkSpec(delay_s=link.delay_s, jitter_s=link.jitter_s, loss=link.loss)
    homes = zip(numbered("home", count), nats(kinds, count), strict=True)
    return LabSpec({SEED: Public(server), **{host: Home(kind, link) for host, kind in homes}})


def numbered(name: str, count: int) -> Sequence[str]:
    """`home1`, `home2`, …"""
    return [f"{name}{index}" for index in range(1, count + 1)]
