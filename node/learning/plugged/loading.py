"""Loads the models of installed packages, and compares them with what a run has agreed on. Torch is not needed."""

import math
from typing import cast

import msgspec
from msgspec.structs import replace

from atoll.node.learning.plugged.interface import Factory, PluggedModel
from atoll.node.runs.installed_parts import entry_of, loaded
from atoll.node.runs.presets import with_adamw
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ModelSpec, plugged
from atoll.protocols.run.run_spec import DataSpec, RunSpec
from atoll.protocols.run.sections.plugin import SOURCE, PluginSpec


def with_model(spec: RunSpec, name: str) -> RunSpec:
    """A run of an installed model, by its name, with the recipe of `spec`, and AdamW. Raises ConfigError."""
    made, owner = _made(name), entry_of("model", name).dist
    model = _described(made, name, owner.name if owner else "")
    data = DataSpec(source=SOURCE + name, tokenizer="bytes", digest=b"")
    return replace(spec, model=model, inner=with_adamw(spec.inner), data=data)


def model_of(model: ModelSpec) -> PluggedModel:
    """The model of a run that has one of a package. Raises ConfigError unless it is the one agreed on."""
    assert model.plugin is not None, "a model of a package"
    name, package = model.plugin.name, model.plugin.package
    made = _made(name, package)
    if _described(made, name, package) != model:
        raise ConfigError(
            f"{package} has another {name} here than the run was made with",
            hint="install the version that the run's owner has",
        )
    return made


def examples_of(source: str) -> tuple[bytes, bytes]:
    """Training and validation examples of a source `plugin:NAME`, as whole windows. Raises ConfigError."""
    made = _made(source.removeprefix(SOURCE))
    train, val = made.examples()
    if len(train) % made.context or len(val) % made.context:
        sizes = f"{len(train)} and {len(val)} bytes"
        raise ConfigError(f"{source} gave {sizes}, which are not whole examples of {made.context}")
    # A window's last value is the first of the next one, and no example uses it.
    return train + b"\0", val + b"\0"


def _made(name: str, package: str = "") -> PluggedModel:
    return cast(Factory, loaded("model", name, package))()


def _described(made: PluggedModel, name: str, package: str) -> ModelSpec:
    """What a run says of a model. Raises ConfigError for one that no run can have."""
    tensors = [(each, flat(shape), start) for each, (shape, start) in made.starts.items()]
    told = {"name": name, "package": package, "tensors": tensors, "saved": made.saved}
    try:
        found = plugged(msgspec.convert(told, PluginSpec), made.context)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model {name} cannot be a run's: {error}", hint=f"ask who made {package}") from error
    found.check()
    return found


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as the arena has it: of more than two dimensions all but the first are one."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape
