"""Modules that take seconds to load: when a test uses them, and not when each worker collects all tests.

Tests that use `transformers` are one group: one worker loads it.
"""

from importlib import import_module
from typing import Any

import pytest


class Later:
    """A module that is imported when something of it is looked up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks while it collects
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


loading = Later("atoll.node.generation.loading")
openai = Later("openai")
pandas = Later("pandas")
modeling_gguf = Later("transformers.modeling_gguf_pytorch_utils")
peft = Later("peft")
transformers = Later("transformers")
GROUP = pytest.mark.xdist_group("transformers")
