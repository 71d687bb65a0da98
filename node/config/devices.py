"""What `device` in the configuration may be: `auto`, one device, or several that take each step together."""

import re

from atoll.protocols.errors import ConfigError

MAX_DEVICES = 64
_GPU = r"cuda:(0|[1-9][0-9]?)"
_ONE = re.compile(rf"auto|cpu|cuda|{_GPU}")
_MANY = re.compile(rf"cpu(,cpu)+|{_GPU}(,{_GPU})+")


def check_devices(text: str) -> None:
    """Raise ConfigError for what no machine can have."""
    devices = devices_of(text)
    if not (_ONE.fullmatch(text) or _MANY.fullmatch(text)):
        raise ConfigError(f"device {text!r} is not one of auto, cpu, cuda, cuda:N, or cuda:0,cuda:1 and so on")
    if len(devices) > MAX_DEVICES:
        raise ConfigError(f"device: {len(devices)} devices; at most {MAX_DEVICES} are legal")
    if devices[0] != "cpu" and len(set(devices)) < len(devices):
        raise ConfigError(f"device {text!r} names a GPU twice")


def devices_of(text: str) -> tuple[str, ...]:
    """`cuda:0,cuda:1` -> both. The first one is the worker's own."""
    return tuple(text.split(","))
