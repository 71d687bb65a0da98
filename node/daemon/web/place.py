"""Where the web page listens: `IP:PORT` as the user writes it."""

import ipaddress
from typing import NamedTuple

from atoll.protocols.errors import ConfigError


class ListenAddress(NamedTuple):
    """An address and a port; 0: any free one."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def read_place(text: str) -> ListenAddress | None:
    """None for no text. Raises ConfigError: names are not looked up."""
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
