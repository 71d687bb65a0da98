"""Ready RunSpecs, from a swarm on one laptop to a billion parameters, and RunSpecs derived from others.

`tiny` is the one that `make swarm` trains; its numbers were measured (docs/calibration.md). The others follow
SparseLoCo's published settings (arXiv 2508.15706) and are starting points. `moe-…` are mixtures of experts:
`moe-smoke` for tests, `moe-12m` with 92 % of its weights in experts: their members may share the experts, so that
their rounds are not reduced. Rounds of dense runs are, above sixteen contributors.

`fragmented` exchanges a run's model in fragments (protocols/ledger/coverage.py): a lower peak rate, not fewer
bytes. `continuation_of` continues from a round of another run, with the same recipe. Both are pure.
"""

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from atoll.protocols.run.run_spec import (
    SPEC_VERSION,
    DataSpec,
    InnerSpec,
    OuterSpec,
    PaceSpec,
    RunSpec,
    Stage,
    Tokenizer,
)
from atoll.protocols.run.sections.compression import CompressSpec, WarmUp
from atoll.protocols.run.sections.merging import MergeSpec
from atoll.protocols.run.sections.optimizer import DEFAULT_MUON_MOMENTUM
from atoll.protocols.run.slices import ReduceSpec

BYTES = 256
DECAY_256 = 54
"""A fifth of the steps after the warm-up."""
PROBATION = 8
"""Final sets with an author's work after which it decides rounds (docs/finality.md)."""
BPE = 8192


class Shape(msgspec.Struct, frozen=True):
    """The fields of a ModelSpec that differ between presets; widths are multiples of the arena's 64."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    qk_norm: bool = False
    experts: ExpertsSpec | None = None


SHAPES = {
    "tiny": Shape(128, 3, 2, 1, 320, 128),
    "10m": Shape(384, 6, 6, 2, 1024, 256),
    "50m": Shape(640, 10, 10, 2, 1728, 512),
    "125m": Shape(768, 18, 12, 4, 2176, 1024),
    "350m": Shape(1024, 24, 16, 4, 3840, 1024),
    "1b": Shape(2048, 16, 32, 8, 8192, 2048),
    "moe-smoke": Shape(128, 4, 4, 4, 256, 128, qk_norm=True, experts=ExpertsSpec(count=8, per_token=2, ffn=128)),
    "moe-12m": Shape(192, 6, 6, 6, 384, 256, qk_norm=True, experts=ExpertsSpec(count=16, per_token=2, ffn=192)),
}
NAMES = tuple(SHAPES)
_OF_BYTES = ("tiny", "10m", "moe-smoke", "moe-12m")


def model_of(name: str) -> ModelSpec:
    """The decoder of a preset. Raises ConfigError for a name that is none."""
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigError(f"no preset {name!r}", hint=f"use one of {', '.join(NAMES)}")
    vocab = BYTES if name in _OF_BYTES else BPE
    fields = msgspec.structs.asdict(shape)
    return ModelSpec(vocab=vocab, tied=True, rope_theta=10000.0, norm_eps=1e-5, **fields)


def preset(
    name: str, owner: PeerId, seed: int, source: str = "builtin:shakespeare", digest: bytes = b""
) -> RunSpec:
    """A complete RunSpec. `digest` is that of `data.dataset.measured(...)`, or empty where data is not checked.

    The run's own name is the preset's: replace it with `msgspec.structs.replace`. Raises ConfigError.
    """
    model = model_of(name)
    tokenizer: Tokenizer = "bytes" if model.vocab == BYTES else "bpe8k"
    is_small = name in ("tiny", "moe-smoke")
    inner, outer, compress = _SMALL if is_small else _large(name)
    # Of their rounds of eight steps of eight sequences a slow member may take one sequence: docs/steps.md.
    least_256 = 32 if is_small else 64
    if name in ("tiny", "10m"):
        # Measured at these two sizes, from scratch, with three and with two seeds: docs/calibration.md.
        inner = replace(inner, optimizer="muon", muon_lr=2.0)
    if name == "tiny":
        inner = replace(inner, decay_256=DECAY_256)  # with three seeds, at this size alone
    spec = RunSpec(
        version=SPEC_VERSION,
        name=name,
        owner=owner,
        seed=seed,
        model=model,
        data=DataSpec(source=source, tokenizer=tokenizer, digest=digest),
        inner=inner,
        outer=outer,
        compress=compress,
        pace=PaceSpec(
            quorum_256=192, grace_256=128, lease_s=60.0, min_members=1, least_256=least_256, probation=PROBATION
        ),
        reduce=None if model.experts else ReduceSpec(k=2 * compress.k),
    )
    spec.check()
    return spec


_SMALL = (
    InnerSpec(
        lr=3e-3, lr_min=0.1, warmup_steps=20, total_steps=384,
        beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0, batch=8,
    ),
    OuterSpec(
        rounds=54, stages=(Stage(0, 2), Stage(8, 8)), alpha_256=256, floor_256=64, overlap_steps=4
    ),
    CompressSpec(codec="sparse2", k=128, feedback=0.5),
)  # fmt: skip
_LARGE = {
    # name: (peak rate, sequences of one member's step, rounds)
    "10m": (2e-3, 16, 400),
    "50m": (1.5e-3, 32, 1000),
    "125m": (1e-3, 64, 2000),
    "350m": (8e-4, 128, 4000),
    "1b": (4e-4, 256, 8000),
    "moe-12m": (2e-3, 16, 400),
}


def _large(name: str) -> tuple[InnerSpec, OuterSpec, CompressSpec]:
    """H grows to 15 (about 10M) or 30; k = 64, β = 0.95, α = 1; divisor floor of a quarter of all weight.

    A fold may come two steps late on every link and five on one that needs them, the most that Streaming DiLoCo
    advises (arXiv 2501.18512 §3.3.2).
    """
    lr, batch, rounds = _LARGE[name]
    last = 15 if name in ("10m", "moe-12m") else 30
    stages = (Stage(0, 5), Stage(rounds // 20, last))
    steps = (rounds // 20) * 5 + (rounds - rounds // 20) * last
    inner = InnerSpec(
        lr=lr, lr_min=0.1, warmup_steps=min(500, steps // 20), total_steps=steps,
        beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0, batch=batch,
    )  # fmt: skip
    outer = OuterSpec(
        rounds=rounds, stages=stages, alpha_256=256, floor_256=64, overlap_steps=2, overlap_most=5
    )  # fmt: skip
    return inner, outer, CompressSpec(codec="sparse2", k=64, feedback=0.95)


def with_decay_at_end(spec: RunSpec) -> RunSpec:
    """The run with its learning rate's decay, if it has one, in its last inner steps: `total_steps` follows."""
    if spec.inner.decay_256 is UNSET:
        return spec
    return replace(spec, inner=replace(spec.inner, total_steps=spec.last_step))


def fragmented(spec: RunSpec, count: int) -> RunSpec:
    """The run in `count` fragments and as much finer rounds, which are not reduced.

    Raises ConfigError where it has fragments already, or for more of them than the model can have.
    """
    if spec.outer.fragments != 1:
        raise ConfigError(f"the run has {spec.outer.fragments} fragments already", hint="drop --fragments")
    spec = replace(spec, outer=finer(spec.outer, count), reduce=None if count > 1 else spec.reduce)
    if spec.compress.warmup:
        longer = tuple(WarmUp(stage.until * count, stage.k) for stage in spec.compress.stages)
        spec = replace(spec, compress=replace(spec.compress, warmup=longer))
    spec = with_decay_at_end(spec)
    spec.check()
    return spec


def finer(outer: OuterSpec, count: int) -> OuterSpec:
    """The schedule in rounds of a `count`-th of the steps: each fragment is exchanged as often as the whole was.

    Steps of a round are whole, at least one, and a stage has whole rounds: it takes as many steps in all as
    before but for half a round. Experts are merged as often as before.
    """
    ends = [*(stage.first for stage in outer.stages[1:]), outer.rounds]
    stages: list[Stage] = []
    first = 0
    for stage, end in zip(outer.stages, ends, strict=True):
        span = min(end, outer.rounds) - stage.first
        if span <= 0:
            break  # the run ends before this stage
        steps = max(1, _nearest(stage.steps, count))
        stages.append(Stage(first, steps))
        first += max(1, _nearest(span * stage.steps, steps))
    merge = outer.merge
    if merge:
        merge = replace(merge, every=count * merge.every, until=count * merge.until)
    return replace(outer, rounds=first, stages=tuple(stages), fragments=count, merge=merge if merge else UNSET)


def _nearest(total: int, parts: int) -> int:
    """total / parts, rounded to the nearest integer, halves up."""
    return (2 * total + parts) // (2 * parts)


def with_adamw(inner: InnerSpec) -> InnerSpec:
    """AdamW for all weights, and a cosine: for weights that somebody has trained, most likely with AdamW."""
    return replace(inner, optimizer="adamw", muon_lr=1.0, muon_momentum=DEFAULT_MUON_MOMENTUM, decay_256=UNSET)


def continuation_of(recipe: RunSpec, done: int) -> RunSpec:
    """The rest of a run of which `done` rounds are final: what is left of its rounds, stages and schedules.

    A run that was at its end has as many rounds again, at the rate where it ended. With `inner.decay_256` the
    new run's last steps decay, and all before have the peak rate.
    """
    outer, inner = recipe.outer, recipe.inner
    rounds = outer.rounds - done if done < outer.rounds else outer.rounds
    first_step = min(1 << 31, inner.first_step + recipe.steps_before(done))
    later = (Stage(stage.first - done, stage.steps) for stage in outer.stages if stage.first > done)
    stages = (Stage(0, recipe.steps(done)), *later)
    rest = replace(
        recipe,
        version=SPEC_VERSION,
        outer=replace(outer, rounds=rounds, stages=stages, merge=_merging(outer.merge, done)),
        compress=replace(recipe.compress, warmup=_warming(recipe.compress, done)),
        inner=replace(inner, first_step=first_step),
    )
    return with_decay_at_end(rest)


def _warming(compress: CompressSpec, done: int) -> tuple[WarmUp, ...] | UnsetType:
    """The stages of the warm-up that are not over."""
    return tuple(WarmUp(stage.until - done, stage.k) for stage in compress.stages if stage.until > done) or UNSET


def _merging(spec: MergeSpec | UnsetType, done: int) -> MergeSpec | UnsetType:
    """α goes on falling along the same line, to 0 in the same round; its first value is rounded down."""
    if not spec or done >= spec.until:
        return UNSET
    left = spec.until - done
    alpha_4096 = spec.alpha_4096 * left // spec.until
    return replace(spec, until=left, alpha_4096=alpha_4096) if alpha_4096 else UNSET
