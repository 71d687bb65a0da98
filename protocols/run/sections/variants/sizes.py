"""`compress.sizes`: a k for each tensor, from what members measured; L-GreCo, arXiv 2210.17357 (docs/sizes.md)."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.sections.refusals import Refusal, refuse

Size = Annotated[int, Meta(ge=1, le=CHUNK)]


class SizesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Values of a chunk by tensor: which k there are, what they are chosen for, and how often."""

    goal: Literal["bytes", "error"]
    """`bytes`: the fewest with no more error than compress.k everywhere; `error`: the least in no more bytes."""
    every: Annotated[int, Meta(ge=1, le=1 << 16)] = 10
    """Rounds from one choice to the next; members measure in the first of them."""
    ks: Annotated[tuple[Size, ...], Meta(min_length=2, max_length=16)] = (16, 32, 64, 128, 256)
    """The k that a tensor can have, rising; compress.k is one of them."""

    def is_measured(self, number: int) -> bool:
        """Whether payloads of round `number` say what each k would leave of each tensor."""
        return number % self.every == 0


_SETS = "a table of k is made of one set after the other"
_REFUSED: tuple[Refusal, ...] = (
    (
        "compress.codec other than sparse2",
        lambda spec: spec.compress.codec != "sparse2",
        "k of a tensor is how many of its values are sent, as sparse2 sends them",
    ),
    ("compress.warmup", lambda spec: bool(spec.compress.warmup), "both say k"),
    ("reduce", lambda spec: spec.reduce is not None, "slices of a round have one k; set reduce to null"),
    ("audit", lambda spec: bool(spec.audit), "payloads of another k cannot be compared"),
    ("outer.aggregate", lambda spec: bool(spec.outer.aggregate), "a rule compares payloads of one k"),
    ("outer.fragments", lambda spec: spec.outer.fragments > 1, "errors are compared of all tensors at once"),
    ("outer.holders", lambda spec: bool(spec.outer.holders), "members would measure other tensors"),
    ("outer.merge", lambda spec: bool(spec.outer.merge), "a merged expert would keep the k of another"),
    (
        "outer.rule with momentum",
        lambda spec: bool(spec.outer.momenta),
        "behind its momentum the state has no place for a table of k",
    ),
    ("start", lambda spec: bool(spec.start), "imported weights are a state without a table of k"),
    ("model.lora_rank", lambda spec: bool(spec.base), "adapters are vectors, which have one k together"),
    ("pace.excise_rounds", lambda spec: bool(spec.pace.excise_rounds), _SETS),
)


def check_sizes(spec: Any) -> None:
    """Raise ConfigError for a RunSpec whose settings do not go with a k for each tensor."""
    sizes = spec.compress.sizes
    if sizes is UNSET:
        return
    refuse(spec, "compress.sizes", _REFUSED)
    if list(sizes.ks) != sorted(set(sizes.ks)) or spec.compress.k not in sizes.ks:
        raise ConfigError("compress.sizes must have rising ks, of which compress.k is one")
