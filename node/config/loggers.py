"""Which loggers there are, and what must be installed for each (docs/monitoring.md)."""

import importlib.util
from typing import Literal, get_args

from atoll.protocols.errors import ConfigError

LoggerName = Literal["jsonl", "csv", "tensorboard", "trackio", "wandb"]
BUILT_IN = ("jsonl", "csv")
"""Loggers that need no package. The others have an extra, and a module, of their name."""


def check_loggers(names: tuple[LoggerName, ...]) -> None:
    """Raise ConfigError for a logger that is named twice, or whose package is not installed."""
    if len(set(names)) < len(names):
        raise ConfigError("loggers: one is named twice", hint=f"there are {', '.join(get_args(LoggerName))}")
    for name in names:
        if name not in BUILT_IN and importlib.util.find_spec(name) is None:
            raise ConfigError(f"loggers: {name} is not installed", hint=f"pip install 'atoll[{name}]'")
