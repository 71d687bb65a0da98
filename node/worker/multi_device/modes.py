"""How the local ranks hold what is trained: each a copy, or each a part."""

from atoll.node.worker.multi_device.group import Group, RankPlace
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.zeroth_order import is_scalar

_ONE = "name one device in config.toml, and start one node for each of the others"


def group_of(place: RankPlace, spec: RunSpec, *, shard: bool) -> Group:
    """A group of ranks that is not joined yet."""
    if not shard:
        return Group(place)
    # It loads a second's worth of torch that nobody else needs.
    from atoll.node.worker.multi_device.shards import Shards

    return Shards(place, spec)


def check_devices(spec: RunSpec, devices: int) -> None:
    """Raise ConfigError for a run whose steps are not shared out among devices."""
    if devices > 1 and is_scalar(spec):
        raise ConfigError(
            "a run with inner.optimizer spsa takes each step on one device",
            hint=_ONE,
        )
    if devices > 1 and spec.model.plugin is not None:
        raise ConfigError("a model of a package takes each step on one device", hint=_ONE)
    if devices > 1 and spec.outer.gossip:
        raise ConfigError("a run with outer.gossip takes each step on one device", hint=_ONE)
    if devices > 1 and spec.privacy:
        raise ConfigError("a run with privacy takes each step on one device: its noise is added once", hint=_ONE)


def check_shards(spec: RunSpec, ranks: int) -> None:
    """Raise ConfigError for a run whose weights cannot be cut: matrices of experts are, along their inputs."""
    if spec.inner.optimizer == "muon":
        raise ConfigError(
            "shard cannot go with inner.optimizer muon, which needs whole matrices",
            hint="leave out shard: then each device holds all that is trained",
        )
    model, experts = spec.model, spec.model.experts
    if model.ffn_slices:
        # A slice's product is of the whole stack at once, and its frozen part is not cut.
        raise ConfigError("a model with model.ffn_slices cannot be cut into shards", hint="leave out shard")
    if model.lora_rank:
        raise ConfigError("adapters of a LoRA run are too small to be cut into shards", hint="leave out shard")
    if experts is not None and (model.dim % ranks or experts.ffn % ranks):
        raise ConfigError(
            f"experts of width {experts.ffn} in a model of width {model.dim} cannot be cut into {ranks}",
            hint="give another number of devices, or leave out shard",
        )
