"""CompressSpec: how a pseudo-gradient becomes a payload, and what its sender remembers (docs/feedback.md)."""

from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.payload import DENSE_BLOCK, check_codec
from atoll.protocols.run.sections.refusals import Refusal, refuse
from atoll.protocols.run.sections.variants.sizes import SizesSpec

FeedbackName: TypeAlias = Literal["ef", "econtrol", "dgc"]
DEFAULT_CONTROL = 0.1
"""η of `compress.feedback_rule` econtrol if unset."""
DEFAULT_MOMENTUM = 0.9
"""m of `compress.feedback_rule` dgc if unset, as published."""
DEFAULT_CLIP = 1.0
"""`compress.clip` if unset."""
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class WarmUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Rounds before `until` send `k` values of each chunk."""

    until: Annotated[int, Meta(ge=1, le=1 << 24)]
    k: int


class OuterSettings(Protocol):
    """What a rule of the error feedback must know of the outer step (`OuterSpec`)."""

    @property
    def rule(self) -> str | UnsetType: ...
    @property
    def floor_256(self) -> int: ...
    @property
    def aggregate(self) -> str | UnsetType: ...
    @property
    def momenta(self) -> int: ...


class CompressSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Compression of a pseudo-gradient into a payload."""

    codec: str
    """`sparse2`, `sparse1`: top-k with 2 bits or the sign only; `int8`, `e3m0`: all values; `lookup2`: the
    quantiser of SparseLoCo's authors; `scalar`: no values, one byte a step (see payload.py)."""
    k: int
    """Values kept of each chunk of 4096; 4096 with a dense codec; with `scalar` the scalars of a payload."""
    feedback: _Share
    """Decay β of the error feedback."""
    feedback_rule: FeedbackName | UnsetType = UNSET
    """How members remember what they did not send (docs/feedback.md); unset: `ef`."""
    control: _Share | UnsetType = UNSET
    """Control step η of econtrol; unset: DEFAULT_CONTROL."""
    momentum: Annotated[float, Meta(ge=0, le=0.9999)] | UnsetType = UNSET
    """Momentum m of dgc; unset: DEFAULT_MOMENTUM."""
    clip: Annotated[float, Meta(ge=1e-6, le=1e6)] | UnsetType = UNSET
    """Longest pseudo-gradient of a round with dgc, in units of what its steps at the peak rate can move the model
    by (rate × steps × √values); unset: DEFAULT_CLIP."""
    warmup: Annotated[tuple[WarmUp, ...], Meta(min_length=1, max_length=16)] | UnsetType = UNSET
    """Larger k of the first rounds, by stage; unset: all rounds have `k`."""
    sizes: SizesSpec | UnsetType = UNSET
    """A k for each tensor (docs/sizes.md); unset: all tensors have `k`."""

    @property
    def stages(self) -> tuple[WarmUp, ...]:
        """Stages of the warm-up; empty without one."""
        return self.warmup or ()

    @property
    def most_k(self) -> int:
        """Largest k of any round."""
        return max(self.k, *(stage.k for stage in self.stages)) if self.stages else self.k

    def k_of(self, number: int) -> int:
        """Values of each chunk that the payloads of round `number` hold."""
        return next((stage.k for stage in self.stages if number < stage.until), self.k)

    @property
    def eta(self) -> float:
        """Control step of econtrol."""
        return DEFAULT_CONTROL if self.control is UNSET else self.control

    @property
    def beta(self) -> float:
        """Momentum of dgc."""
        return DEFAULT_MOMENTUM if self.momentum is UNSET else self.momentum

    @property
    def clip_share(self) -> float:
        """Longest pseudo-gradient with dgc, see `clip`."""
        return DEFAULT_CLIP if self.clip is UNSET else self.clip

    def memories(self, momenta: int) -> int:
        """Arrays of the model's size that a member keeps beside e, where the outer rule has so many momenta."""
        return {"econtrol": momenta, "dgc": 1}.get(self.feedback_rule or "ef", 0)

    def check(self, outer: OuterSettings, *, reduced: bool, audited: bool) -> None:
        """Raise ConfigError, with the key's name, for values that no run can have, alone or beside others."""
        check_codec(self.codec, self.k)
        self._check_warmup(reduced=reduced, audited=audited)
        self._check_keys()
        if self.codec == "lookup2" and (self.feedback_rule or "ef") != "ef":
            raise ConfigError(
                f"compress.codec lookup2 and compress.feedback_rule {self.feedback_rule} cannot go together: "
                "what is sent of a chunk is known only when its whole tensor is encoded"
            )
        refused = {"econtrol": self._against_econtrol, "dgc": self._against_dgc}.get(self.feedback_rule or "ef")
        for is_so, words, why in (*refused(outer), (audited, *_AUDITED)) if refused else ():
            if is_so:
                raise ConfigError(f"compress.feedback_rule {self.feedback_rule} {words}: {why}")

    def _check_warmup(self, *, reduced: bool, audited: bool) -> None:
        if self.warmup is UNSET:
            return
        if self.codec in DENSE_BLOCK:
            raise ConfigError(
                f"compress.warmup is for sparse codecs: {self.codec} sends all values in every round"
            )
        for stage in self.stages:
            check_codec(self.codec, stage.k)
        ends, sizes = [stage.until for stage in self.stages], [*(stage.k for stage in self.stages), self.k]
        if ends != sorted(set(ends)) or sizes != sorted(set(sizes), reverse=True):
            raise ConfigError("compress.warmup must have rising rounds, and k that falls towards compress.k")
        if reduced:
            raise ConfigError("reduce and compress.warmup cannot go together: slices of a round have one k")
        if audited:
            raise ConfigError(
                "audit and compress.warmup cannot go together: payloads of another k cannot be compared"
            )

    def _check_keys(self) -> None:
        """Refuse keys of rules that the run does not have."""
        given = (
            ("control", self.control, "econtrol"),
            ("momentum", self.momentum, "dgc"),
            ("clip", self.clip, "dgc"),
        )
        for key, value, rule in given:
            if value is not UNSET and self.feedback_rule != rule:
                raise ConfigError(f"compress.{key} is for runs with compress.feedback_rule {rule}")

    def _against_econtrol(self, outer: OuterSettings) -> tuple[tuple[bool, str, str], ...]:
        tracks, rule = bool(outer.momenta), outer.rule or "sgd"
        return (
            (self.feedback != 1, "needs compress.feedback 1", "its control step is what bounds the error"),
            (
                rule not in ("sgd", "average", "slowmo"),
                f"and outer.rule {rule} cannot go together",
                "the fold must move by the estimate that members keep: slowmo, or sgd and average without one",
            ),
            (
                tracks and outer.floor_256 != 256,
                "with outer.rule slowmo needs outer.floor_256 256",
                "the momentum must be the mean of all members' estimates, not of those who sent a value",
            ),
            (
                tracks and outer.aggregate is not UNSET,
                "and outer.aggregate cannot go together",
                "a clipped contribution is not what its sender's estimate holds",
            ),
        )

    def _against_dgc(self, outer: OuterSettings) -> tuple[tuple[bool, str, str], ...]:
        rule = outer.rule or "sgd"
        return (
            (self.feedback != 1, "needs compress.feedback 1", "what was not sent is accumulated, not decayed"),
            (
                self.codec in DENSE_BLOCK,
                "needs a sparse codec",
                "where all values are sent, all momentum is masked",
            ),
            (
                rule != "sgd",
                f"and outer.rule {rule} cannot go together",
                "members have the momentum, and the fold would have it again",
            ),
        )


_UNEQUAL = "the fold's momentum is the mean of the members' estimates only if all weigh the same"
_ESTIMATES: tuple[Refusal, ...] = (
    ("pace.least_256 below 256", lambda spec: spec.pace.least_256 != 256, _UNEQUAL),
    ("pace.most_256 above 256", lambda spec: spec.pace.most_256 != 256, _UNEQUAL),
    ("pace.probation_256", lambda spec: bool(spec.pace.probation_256), _UNEQUAL),
)


def check_estimates(spec: Any) -> None:
    """Refuse a RunSpec whose members keep estimates of the fold, and whose weights differ. Raises ConfigError."""
    if spec.compress.feedback_rule == "econtrol" and spec.outer.momenta:
        refuse(spec, "compress.feedback_rule econtrol with outer.rule slowmo", _ESTIMATES)


_AUDITED = (
    "and audit cannot go together",
    "an audit looks for the round's own work in what is sent, and this is older work",
)
