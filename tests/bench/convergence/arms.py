"""The arms of `bench convergence`: what is trained, and with which RunSpec. One line adds a method.

A method is a set of `KEY=VALUE` changes of one recipe, as `atoll run new --set` makes them, so whatever a RunSpec
can say can be compared. The rules of the outer step come from the product's own list: one that has no line here is
trained with the settings of a dense rule.
"""

import typing
from typing import NamedTuple

import msgspec

from atoll.cli.runs.changes import with_changes
from atoll.node.runs.presets import SHAPES, Shape
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import digest, peer_id_of
from atoll.protocols.run import run_spec
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import DataSpec, InnerSpec, OuterSpec, PaceSpec, RunSpec, Stage
from atoll.protocols.run.sections.compression import CompressSpec

MEMBERS = 8
SOURCE = "builtin:shakespeare"
LENGTHS = (15, 30, 100)
"""Inner steps of a round (H)."""
KEPT = (32, 64, 128)
"""Values of a chunk that sparse payloads hold (k)."""
WARMUP = 20
"""One step in so many warms the rate up."""
_DENSE = ("compress.codec=int8", "compress.k=4096")
_ESTIMATED = ("outer.rule=slowmo", "outer.momentum_256=255", "outer.floor_256=256")
"""What makes the fold move by EControl's estimate (docs/feedback.md)."""
_AS_CODED = ("outer.floor_256=1", "outer.aggregate=clip", "outer.most_256=65536")
"""What SparseLoCo's authors do beside their quantiser (docs/feedback.md)."""
_SIZES = 'compress.sizes={{"goal":"{}"}}'
"""A k for each tensor (docs/sizes.md)."""
Settings = tuple[str, ...]


class Size(NamedTuple):
    """A model, and how one member trains it."""

    shape: Shape
    vocab: int
    batch: int
    """Sequences of a member's step."""
    lr: float
    """Peak rate where no trial names another one."""


SIZES = {
    "micro": Size(Shape(64, 1, 1, 1, 128, 32), 256, 4, 4e-3),
    "tiny": Size(SHAPES["tiny"], 256, 4, 3e-3),
    "10m": Size(SHAPES["10m"], 256, 2, 2e-3),
    "125m": Size(SHAPES["125m"], 8192, 16, 1e-3),
}
SMALLEST = "micro"
"""The size at which all settings of each method are tried."""


class Method(NamedTuple):
    """One outer loop. `trials` are the settings that are tried first, on one seed; the best one is used."""

    label: str
    settings: Settings = ()
    trials: tuple[Settings, ...] = ((),)
    parallel: bool = False
    """Members share each step, and there are no rounds."""
    exact: bool = False
    """Contributions are float32 and not encoded; everything else is the product's."""
    sparse: bool = False
    """Whether k can be chosen."""
    tuned_as: str = ""
    """The method whose best trial is used; empty: its own."""


def _rates(*alphas_256: int) -> tuple[Settings, ...]:
    return tuple((f"outer.alpha_256={alpha}",) for alpha in alphas_256)


def _inner(lr: float, *settings: str) -> Settings:
    return (*settings, f"inner.lr={lr:g}")


def _outer(alpha_256: int, lr: float) -> Settings:
    return _inner(lr, f"outer.alpha_256={alpha_256}")


_PARALLEL_RATES = tuple(_inner(rate) for rate in (2e-3, 3e-3, 4e-3, 8e-3, 16e-3, 32e-3))
_FEEDBACK: tuple[Settings, ...] = (
    *((f"compress.feedback={beta:g}",) for beta in (0.8, 0.9, 0.95, 0.98)),
    *(_inner(lr, "compress.feedback=0.98") for lr in (8e-3, 16e-3)),
)
_AVERAGE = tuple(_inner(rate) for rate in (2e-3, 4e-3, 8e-3, 16e-3))
_MUON_RATES = tuple(_inner(rate) for rate in (2e-3, 4e-3, 8e-3, 16e-3))
_MUON_FEEDBACK = tuple(
    _inner(lr, f"compress.feedback={beta:g}")
    for beta, lr in ((0.9, 4e-3), (0.95, 4e-3), (0.98, 4e-3), (0.98, 8e-3))
)
_MUON = ("inner.optimizer=muon", "inner.muon_lr=2")
_NESTEROV = (*_rates(90, 128, 179, 256), _outer(128, 8e-3), _outer(179, 8e-3))
_RULES = {
    "sgd": Method("sgd, sparse2 (SparseLoCo, ours)", trials=_FEEDBACK, sparse=True),
    "average": Method("average, int8", ("outer.rule=average", *_DENSE), _AVERAGE),
    "nesterov": Method("nesterov, int8 (DiLoCo)", ("outer.rule=nesterov", *_DENSE), _NESTEROV),
    "slowmo": Method(
        "slowmo β 0.5, int8",
        ("outer.rule=slowmo", "outer.momentum_256=128", *_DENSE),
        (_outer(128, 4e-3), _outer(192, 4e-3), _outer(256, 4e-3), _outer(128, 8e-3)),
    ),
    "co2": Method(
        "co2, φ = 0.02, int8", ("outer.rule=co2", "outer.clip_65536=1311", *_DENSE), _rates(32, 64, 128, 192, 256)
    ),
}
"""By name of `outer.rule`."""
_BESIDE = {
    "adamw-parallel": Method("data-parallel AdamW", trials=_PARALLEL_RATES, parallel=True),
    "muon-parallel": Method("data-parallel Muon", _MUON, _MUON_RATES, parallel=True),
    "nesterov-float32": Method(
        "nesterov, float32 (DiLoCo)", ("outer.rule=nesterov", *_DENSE), exact=True, tuned_as="nesterov"
    ),
    "nesterov-muon": Method(
        "nesterov β 0.6, int8, Muon (MuLoCo)",
        ("outer.rule=nesterov", "outer.momentum_256=154", *_DENSE, *_MUON),
        (_outer(179, 4e-3), _outer(128, 4e-3), _outer(179, 8e-3), _outer(128, 8e-3)),
    ),
    "average-float32": Method("average, float32", ("outer.rule=average", *_DENSE), exact=True, tuned_as="average"),
    "sgd-muon": Method("sgd, sparse2, Muon", _MUON, _MUON_FEEDBACK, sparse=True),
    "isotropic": Method(
        "nesterov β 0.8, isotropic, int8 (IsoLoCo)",
        ("outer.rule=nesterov", "outer.momentum_256=205", "outer.spectrum=isotropic", *_DENSE),
        (_outer(179, 4e-3), _outer(256, 4e-3), _outer(461, 4e-3), _outer(640, 4e-3), _outer(461, 8e-3)),
    ),
    "sgd-slow": Method(
        "sgd, sparse2, slow momentum (MT-DAO)",
        ("inner.beta1=0.995", "inner.beta2=0.999", "compress.feedback=0.98"),
        tuple((f"inner.momentum_share={share:g}",) for share in (0.3, 0.5, 0.7, 0.9, 0.98)),
        sparse=True,
    ),
    "edit": Method(
        "edit: nesterov β 0.8 with EDiT's penalty, int8",
        ("outer.rule=nesterov", "outer.momentum_256=205", "outer.aggregate=edit", *_DENSE),
        tuned_as="nesterov",
    ),
    "blend": Method(
        "nesterov, e3m0, τ = 4, blended (Streaming DiLoCo, whole)",
        (
            "outer.rule=nesterov",
            "compress.codec=e3m0",
            "compress.k=4096",
            "compress.feedback=0",
            "outer.overlap_steps=4",
            "outer.late=blend",
        ),
        (_outer(102, 4e-3), _outer(128, 4e-3), _outer(179, 4e-3), _outer(102, 8e-3)),
    ),
    "reference": Method(
        "sgd, lookup2, mean over senders, median clip (SparseLoCo as coded)",
        ("compress.codec=lookup2", *_AS_CODED),
        sparse=True,
        tuned_as="sgd",
    ),
    "econtrol": Method(
        "slowmo β 255/256, sparse2, EControl",
        ("compress.feedback_rule=econtrol", "compress.feedback=1", *_ESTIMATED),
        tuple((f"compress.control={eta:g}",) for eta in (0.025, 0.05, 0.1, 0.2, 0.4)),
        sparse=True,
    ),
    "dgc": Method(
        "sgd α = 1 − m, sparse2, DGC with its warm-up",
        ("compress.feedback_rule=dgc", "compress.feedback=1", "compress.warmup=[[4,1024],[8,256]]"),
        # A momentum m makes the sum of the steps 1/(1 − m) times as long.
        tuple(
            (f"compress.momentum={momentum:g}", f"outer.alpha_256={round(256 * (1 - momentum))}")
            for momentum in (0.3, 0.5, 0.7, 0.9)
        ),
        sparse=True,
    ),
    "lgreco": Method("sgd, L-GreCo: fewest bytes", (_SIZES.format("bytes"),), sparse=True, tuned_as="sgd"),
    "lgreco-error": Method("sgd, L-GreCo: least error", (_SIZES.format("error"),), sparse=True, tuned_as="sgd"),
    "sgd-overlap": Method("sgd, sparse2, τ = 4", ("outer.overlap_steps=4",), sparse=True, tuned_as="sgd"),
}


def methods() -> dict[str, Method]:
    """Every method by its name: each rule of the product, and what stands beside them."""
    rules = {rule: _RULES.get(rule) or _unlisted(rule) for rule in typing.get_args(run_spec.Step)}
    return {**rules, **_BESIDE}


def _unlisted(rule: str) -> Method:
    return Method(f"{rule}, int8", (f"outer.rule={rule}", *_DENSE), _rates(64, 128, 192, 256))


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run."""

    method: str
    size: str
    steps: int
    """Inner steps of a round (H)."""
    k: int
    """Values of a chunk; 4096 where all are sent."""
    settings: Settings
    """Changes of the recipe."""
    parallel: bool
    exact: bool
    total: int
    """Inner steps of a member in the whole run; the last round may go beyond it."""
    seed: int

    @property
    def name(self) -> str:
        """What tables and plots call it, apart from its size, length and seed."""
        if self.parallel:
            return self.method
        return f"{self.method} H={self.steps}" + (f" k={self.k}" if self.k < 4096 else "")

    @property
    def key(self) -> str:
        """A short name of all its settings, of the RunSpec that follows from them too."""
        return digest(msgspec.json.encode(self), codec.encode(spec_of(self))).hex()[:16]


def arm_of(
    method: str, size: str, *, total: int, seed: int, steps: int = 15, k: int = 64, trial: Settings = ()
) -> Arm:
    """An arm of a method with one of its trials' settings. Raises ConfigError for names and settings of no run."""
    found = methods().get(method)
    if found is None:
        raise ConfigError(f"no method {method!r}", hint=f"use one of {', '.join(methods())}")
    sparse = (f"compress.k={k}",) if found.sparse else ()
    return Arm(
        method=method,
        size=size,
        steps=1 if found.parallel else steps,
        k=k if found.sparse else 4096,
        settings=(*found.settings, *sparse, *trial),
        parallel=found.parallel,
        exact=found.exact,
        total=total,
        seed=seed,
    )


def spec_of(arm: Arm) -> RunSpec:
    """The RunSpec of an arm. Nothing comes from a preset but the shape of the model. Raises ConfigError."""
    size = SIZES.get(arm.size)
    if size is None:
        raise ConfigError(f"no size {arm.size!r}", hint=f"use one of {', '.join(SIZES)}")
    rounds = -(-arm.total // arm.steps)
    model = ModelSpec(
        vocab=size.vocab, tied=True, rope_theta=10000.0, norm_eps=1e-5, **msgspec.structs.asdict(size.shape)
    )
    spec = RunSpec(
        version=run_spec.SPEC_VERSION,
        name="bench",
        owner=peer_id_of(bytes(range(32))),
        seed=arm.seed,
        model=model,
        data=DataSpec(source=SOURCE, tokenizer="bytes" if size.vocab == 256 else "bpe8k", digest=b""),
        inner=InnerSpec(
            lr=size.lr, lr_min=0.1, warmup_steps=arm.total // WARMUP, total_steps=rounds * arm.steps,
            beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0, batch=size.batch,
        ),
        outer=OuterSpec(rounds=rounds, stages=(Stage(0, arm.steps),), alpha_256=256, floor_256=64),
        compress=CompressSpec(codec="sparse2", k=64, feedback=0.95),
        pace=PaceSpec(quorum_256=192, grace_256=128, lease_s=60.0, min_members=1),
    )  # fmt: skip
    return with_changes(spec, arm.settings)
