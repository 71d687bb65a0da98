"""The address that the web page listens on, `IP:PORT` as the user writes it."""

import ipaddress
from typing import NamedTuple

from atoll.protocols.errors import ConfigError


class ListenAddress(NamedTuple):
    """An IP address and a TCP port; port 0 is any free one."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def parse_listen_address(text: str) -> ListenAddress | None:
    """Parse `IP:PORT`; None for an empty text. Raises ConfigError, also for names: they are not looked up."""
    if not text:
        return None
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ip = ipaddress.ip_address(bare)
    except ValueError:
        ip = None
    if ip is None or (ip.version == 6) != (bare != host) or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"web: {text!r} is not IP:PORT", hint="for example 127.0.0.1:4780, or 127.0.0.1:0")
    if len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"web: port {port} is outside 0 … 65535")
    return ListenAddress(str(ip), int(port))
