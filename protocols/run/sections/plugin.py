"""`model.plugin`: a model of an installed package in the decoder's place, by name (docs/plugged-models.md).

The RunSpec says what every node must know without the package: the tensors, how each begins, and what a step
stores. The name has a version, because members whose models differ would train two models into one.
"""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.sections.objective import NAME_PATTERN, PACKAGE_PATTERN
from atoll.protocols.run.sections.refusals import Refusal, refuse

MAX_TENSORS = 256
"""Most tensors of a plug-in: with the longest names they fill a third of a RunSpec's 64 KiB."""
SOURCE = "plugin:"
"""Begins the source of a run whose examples its model's package makes; the name follows."""
ZEROS, ONES = 0, -1
"""Values of `TensorSpec.start` that are no variance."""
_RESERVED = ("experts", "lora_", "model.", "momentum")
"""Parts of names that mean something in the arena and in files."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One parameter tensor as the arena has it, a matrix or a vector: dimensions after the first are one."""

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_.]{0,63}\Z")]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 22)], ...], Meta(min_length=1, max_length=2)]
    start: Annotated[int, Meta(ge=-1, le=1 << 32)]
    """First values: 1/σ² of bell-shaped ones, which is at least 1; 0: zeros; −1: ones."""


class PluginSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that a package brings, and what nodes must know of it."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    """Name and version of the model, as in `lanes.1`."""
    package: Annotated[str, Meta(pattern=PACKAGE_PATTERN)]
    """Distribution that brings it, for people who lack it."""
    tensors: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    """All that is trained, in the order of the state."""
    saved: Annotated[int, Meta(ge=1, le=1 << 36)]
    """Most values, float32, that a step holds for one example, beside weights and gradients (docs/memory.md)."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(one.shape) for one in self.tensors)

    @property
    def source(self) -> str:
        """`data.source` of a run with this model."""
        return SOURCE + self.name

    def check(self) -> None:
        """Raise ConfigError for names that are not the tensors' own."""
        names = [one.name for one in self.tensors]
        if len(set(names)) != len(names):
            raise ConfigError("model.plugin.tensors must have each name once")
        for name in names:
            for part in _RESERVED:
                if part in name:
                    raise ConfigError(f"model.plugin.tensors: {name!r} has {part!r}, which means something else")


_REFUSED: tuple[Refusal, ...] = (
    (
        "inner.optimizer other than adamw",
        lambda spec: spec.inner.optimizer != "adamw",
        "muon and spsa know the decoder's matrices and loss",
    ),
    ("outer.fragments", lambda spec: spec.outer.fragments != 1, "fragments are cut between the decoder's layers"),
    ("objective", lambda spec: bool(spec.objective), "its term is of the decoder's hidden states"),
    ("audit", lambda spec: bool(spec.audit), "it compares the losses of tokens"),
    ("serving", lambda spec: bool(spec.serving), "it is about tokens of a text"),
    ("start", lambda spec: bool(spec.start), "given weights are read as a decoder's"),
    (
        "data.source or data.tokenizer of another kind",
        lambda spec: (spec.data.source, spec.data.tokenizer) != (spec.model.plugin.source, "bytes"),
        "its package makes the examples, of bytes",
    ),
)


def check_plugin(spec: Any) -> None:
    """Raise ConfigError for a RunSpec whose settings do not go with its model."""
    if spec.model.plugin is None:
        if spec.data.source.startswith(SOURCE):
            raise ConfigError(f"data.source {SOURCE}… is for runs with model.plugin", hint="use --model")
        return
    refuse(spec, "model.plugin", _REFUSED)
