"""RunSpec: everything that the members of a run must agree on, signed by the run's owner.

The run id is the BLAKE3 of the canonical bytes and is part of every handshake. Unknown and missing keys are
errors.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, check_range
from atoll.protocols.identity import Identity, Signature, verify
from atoll.protocols.ids import DIGEST_BYTES, Digest, Link, PeerId, RunId, digest, public_key_of
from atoll.protocols.run.admission import AdmissionSpec
from atoll.protocols.run.lora import check_lora
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.moments import MAX_GROUPS, Optimizer, file_count
from atoll.protocols.run.sections.audits import AuditSpec, check_audit
from atoll.protocols.run.sections.compression import CompressSpec, check_estimates
from atoll.protocols.run.sections.excision import check_excision
from atoll.protocols.run.sections.history import HistorySpec
from atoll.protocols.run.sections.means import Spectrum, check_average, check_spectrum
from atoll.protocols.run.sections.merging import MergeSpec
from atoll.protocols.run.sections.objective import ObjectiveSpec, check_objective
from atoll.protocols.run.sections.optimizer import DEFAULT_MUON_MOMENTUM, WHOLE_SHARE, check_optimizer
from atoll.protocols.run.sections.plugin import check_plugin
from atoll.protocols.run.sections.privacy import PrivacySpec, check_privacy
from atoll.protocols.run.sections.serving import ServingSpec
from atoll.protocols.run.sections.variants.gossip import GossipSpec, check_gossip
from atoll.protocols.run.sections.variants.sizes import check_sizes
from atoll.protocols.run.sections.variants.staleness import StaleSpec, check_staleness
from atoll.protocols.run.sections.zeroth_order import DEFAULT_SPREAD, check_zeroth_order
from atoll.protocols.run.slices import ReduceSpec

SPEC_VERSION = 9
"""Of the keys, and of what members decide and compute by them: rules of finality, epochs, voters, weights, folds.
Whoever changes one of these raises it: members with two such versions of atoll would part, and not know why."""
SAME_KEYS_VERSION = 8
"""Oldest version with the keys of this one: from a checkpoint of it a new run can go on."""
_DOMAIN = "run/1"
PACKED = "packed:"
"""Begins the source of a run whose text is packed: shards that members fetch from each other."""
_UNREDUCED = "set reduce to null: then every node gets every payload"
TOKENIZER_MAX_BYTES = 32 << 20
"""Largest tokenizer file, in bytes. Those of published models have up to 20 MB."""
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Share256: TypeAlias = Annotated[int, Meta(ge=0, le=256)]
Tokenizer: TypeAlias = Literal["bytes", "bpe8k", "file"]
RoundSteps: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 16)]
Rule: TypeAlias = Literal["clip", "nnm", "krum", "rfa", "cclip", "flag", "edit"]
Late: TypeAlias = Literal["rebase", "blend"]
Arrival: TypeAlias = Literal["median", "group"]
Step: TypeAlias = Literal["sgd", "average", "nesterov", "slowmo", "co2"]
MOMENTA: dict[Step, int] = {"nesterov": 1, "slowmo": 1, "co2": 2}
"""Arrays of the model's size that a rule keeps beside Θ: its momentum; co2 also a mean that moved nothing yet."""
MOMENTUM_256: dict[Step, int] = {"nesterov": 230, "slowmo": 230, "co2": 128}
"""β of a rule if unset: 0.9, as DiLoCo has it; 0.5, as CO2's code has it."""
MAX_EXCISE_ROUNDS = 1024
MAX_HOLDERS = 1024
TotalSteps: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 31)]


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The training text and its tokenizer."""

    source: Annotated[str, Meta(min_length=1, max_length=1024)]
    """`builtin:shakespeare`, `synthetic:markov`, `packed:NAME`, or `file:NAME`, of which each node has a copy."""
    tokenizer: Tokenizer
    """`bytes` (256 tokens), `bpe8k` (8192 tokens) or `file`: the blob `tokenizer_blob`, a `tokenizer.json`."""
    digest: Link
    """BLAKE3 of the source's text, so that all members read the same; empty: not checked. With `packed:` the blob
    id of the index of its shards (protocols/data/shard_index.py)."""
    tokenizer_blob: Link = b""
    """Blob id of the tokenizer file, which travels with the run; empty unless `tokenizer` is `file`."""
    size: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes of the text, or of all files of a packed one; 0: not given. Who reads the text checks it."""

    @property
    def index(self) -> Digest | None:
        """Blob id of the index of a packed text; None for other texts."""
        return Digest(self.digest) if self.source.startswith(PACKED) else None


class StartSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Imported initial weights: Θ₀ is a snapshot file of round −1, which travels with the run."""

    weights: Digest
    """Blob id of the snapshot file. Its size follows from the model."""
    state: Digest
    """State digest of Θ₀."""
    moments: Annotated[bytes, Meta(max_length=(1 + MAX_GROUPS) * DIGEST_BYTES)] = b""
    """Blob ids, end to end, of a checkpoint's moments files (protocols/run/moments.py); empty: zero moments."""

    @property
    def moment_blobs(self) -> tuple[Digest, ...]:
        """Blob ids of the moments files, in their order."""
        ends = range(DIGEST_BYTES, len(self.moments) + 1, DIGEST_BYTES)
        return tuple(Digest(self.moments[end - DIGEST_BYTES : end]) for end in ends)


class InnerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The optimizer and the learning-rate schedule of the inner steps."""

    lr: Annotated[float, Meta(ge=1e-9, le=1)]
    """Peak learning rate."""
    lr_min: Share
    """Learning rate at the end, as a fraction of `lr`."""
    warmup_steps: TotalSteps
    """Inner steps over which the learning rate rises."""
    total_steps: Annotated[int, Meta(ge=1, le=1 << 31)]
    """Inner step at which the learning rate has fallen to its end."""
    beta1: Annotated[float, Meta(ge=0, le=0.9999)]
    beta2: Annotated[float, Meta(ge=0, le=0.99999)]
    eps: Annotated[float, Meta(ge=1e-16, le=1)]
    weight_decay: Share
    clip: Annotated[float, Meta(ge=1e-6, le=1e6)]
    """Bound of the gradient norm."""
    batch: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Sequences per inner step of one member."""
    expert_lr: Annotated[float, Meta(ge=1 / 64, le=64)] = 1.0
    """Learning rate of experts, in units of `lr`; above 1 if each has few holders (docs/experts.md)."""
    first_step: TotalSteps = 0
    """Position of round 0 in the learning-rate schedule; above 0 if the run continues a checkpoint."""
    optimizer: Optimizer = "adamw"
    """What moves the matrices of attention and feed-forward: `adamw`, or `muon` (docs/inner-optimizer.md). AdamW
    moves everything else. `spsa` moves all, without gradients (docs/zeroth-order.md)."""
    muon_momentum: Annotated[float, Meta(ge=0, le=0.9999)] = DEFAULT_MUON_MOMENTUM
    """Decay of Muon's momentum."""
    muon_lr: Annotated[float, Meta(ge=1 / 64, le=64)] = 1.0
    """Learning rate of Muon, in units of `lr`."""
    decay_256: Annotated[int, Meta(ge=0, le=256)] | msgspec.UnsetType = msgspec.UNSET
    """Share of the steps after the warm-up, the last ones, in which the rate falls from `lr`; unset: a cosine."""
    momentum_share: Annotated[float, Meta(ge=0, le=1)] = WHOLE_SHARE
    """ω: AdamW's move is this share of its momentum and else the gradient; 1: AdamW (docs/inner-optimizer.md)."""
    spread: Annotated[float, Meta(ge=1e-6, le=1)] = DEFAULT_SPREAD
    """ε of `spsa`: how far from the weights the two losses of a step are taken, in each weight."""

    @property
    def decay_steps(self) -> int:
        """Inner steps of the decay; 0 without one."""
        return max(0, self.total_steps - self.warmup_steps) * (self.decay_256 or 0) // 256


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From round `first` on, members take `steps` inner steps per round."""

    first: Annotated[int, Meta(ge=0)]
    steps: Annotated[int, Meta(ge=1, le=1 << 16)]


class OuterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The outer step, θ ← θ − α · mean, in exact integers. Names ending in _256 are numerators over 256."""

    rounds: Annotated[int, Meta(ge=1, le=1 << 24)]
    """Number of outer steps of the whole run."""
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1, max_length=64)]
    """Inner steps per round (H), by stage; the first stage starts at round 0."""
    alpha_256: Annotated[int, Meta(ge=1, le=1024)]
    """Outer learning rate α."""
    floor_256: Share256
    """Least divisor of a coordinate, as a share of all weight; above it, the weight of the coordinate's senders.

    0: mean over senders (SparseLoCo as coded). 256: mean over members (as published).
    """
    fragments: int = 1
    """Number of fragments; round r exchanges fragment r mod `fragments` (protocols/ledger/coverage.py)."""
    overlap_steps: RoundSteps = 0
    """Inner steps of the next round that a member may take before this round is folded; 0: no overlap."""
    keep_256: Share256 = 128
    """Share of the progress made during the overlap that stays in the local weights after the fold; see `late`."""
    holders: Annotated[int, Meta(ge=0, le=MAX_HOLDERS)] = 0
    """Number of members that train each expert (protocols/ledger/ownership.py); 0: all train all; 1: SPES."""
    merge: MergeSpec | msgspec.UnsetType = msgspec.UNSET
    """Expert merging; unset: experts are not merged."""
    overlap_most: Annotated[int, Meta(ge=1, le=1 << 16)] | msgspec.UnsetType = msgspec.UNSET
    """Most overlap steps of a member with a slow link (docs/overlap.md); unset: `overlap_steps`."""
    aggregate: Rule | msgspec.UnsetType = msgspec.UNSET
    """How contributions are judged before their mean is taken (docs/aggregation.md); unset: they are not."""
    liars_256: Annotated[int, Meta(ge=0, le=120)] | msgspec.UnsetType = msgspec.UNSET
    """Share of contributions that may be bad, for `aggregate`; unset: 64, a quarter."""
    most_256: Annotated[int, Meta(ge=1, le=1 << 16)] | msgspec.UnsetType = msgspec.UNSET
    """Largest norm of a contribution to an atom, in 256ths of what steps at the peak rate can move it by, for
    `aggregate`; unset: 256."""
    step_most_256: Annotated[int, Meta(ge=1, le=1 << 20)] | msgspec.UnsetType = msgspec.UNSET
    """Largest norm of a round's mean in an atom, in 256ths, for `aggregate` edit; unset: 2560, which is 10."""
    by_weight: bool | msgspec.UnsetType = msgspec.UNSET
    """Medians of `aggregate` count contributions by their weights, and newcomers are a quarter of all weight at
    most (docs/aggregation.md); unset: each contribution counts once."""
    rule: Step | msgspec.UnsetType = msgspec.UNSET
    """How the mean becomes a step (docs/outer-loop.md); unset: `sgd`."""
    momentum_256: Annotated[int, Meta(ge=0, le=255)] | msgspec.UnsetType = msgspec.UNSET
    """Outer momentum β of the rules that have one; unset: MOMENTUM_256."""
    late: Late | msgspec.UnsetType = msgspec.UNSET
    """How a fold that arrives during the overlap meets the local weights (docs/overlap.md); unset: `rebase`."""
    stale_256: Annotated[int, Meta(ge=1, le=256)] | msgspec.UnsetType = msgspec.UNSET
    """1/Λ of `outer.rule` co2: the share of a stale mean that enters the momentum; unset: all of it."""
    clip_65536: Annotated[int, Meta(ge=1, le=1 << 22)] | msgspec.UnsetType = msgspec.UNSET
    """φ of `outer.rule` co2: largest value of the momentum, in units of 2⁻¹⁶; unset: 65536, which is 1."""
    spectrum: Spectrum | msgspec.UnsetType = msgspec.UNSET
    """What becomes of the singular values of a round's mean (docs/outer-loop.md); unset: they stay."""
    gossip: GossipSpec | msgspec.UnsetType = msgspec.UNSET
    """Pulls from neighbours within a round (docs/gossip-merge.md); unset: members meet in the fold alone."""

    @property
    def momenta(self) -> int:
        """Arrays of the model's size that the rule keeps beside Θ; they are part of the state and its digest."""
        return MOMENTA.get(self.rule, 0) if self.rule else 0

    @property
    def beta_256(self) -> int:
        """Outer momentum β of a rule that has one."""
        default = MOMENTUM_256.get(self.rule, 0) if self.rule else 0
        return default if self.momentum_256 is msgspec.UNSET else self.momentum_256

    @property
    def overlap_bounds(self) -> tuple[int, int]:
        """Least and most inner steps that a member may be ahead of a fold; both 0 without overlap."""
        most = self.overlap_steps if self.overlap_most is msgspec.UNSET else self.overlap_most
        return self.overlap_steps, most if self.overlap_steps else 0


class PaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a round closes. Times are measured in round times, never guessed in seconds."""

    quorum_256: Annotated[int, Meta(ge=1, le=256)]
    """Share of the expected members whose contributions start the grace period."""
    grace_256: Annotated[int, Meta(ge=0, le=1 << 16)]
    """Grace period for the others, as a share of the member's own time of this round."""
    lease_s: Annotated[float, Meta(ge=1, le=3600)]
    """Life of a lease, in seconds: a member that is silent for longer is not waited for."""
    min_members: Annotated[int, Meta(ge=1, le=1024)]
    """Number of leases that round 0 waits for."""
    least_256: Annotated[int, Meta(ge=1, le=256)] = 256
    """Share of the round's steps after which a slow member may end its round, to finish with the others. Below 256
    its steps may have fewer sequences, too."""
    most_256: Annotated[int, Meta(ge=256, le=1024)] = 256
    """Share of the round's steps up to which a fast member may train while the others finish."""
    arrival: Arrival | msgspec.UnsetType = msgspec.UNSET
    """When the members aim to be done, within these shares (docs/rounds.md); unset: `median`."""
    probation: Annotated[int, Meta(ge=1, le=1 << 16)] | msgspec.UnsetType = msgspec.UNSET
    """Final sets with a member's work after which it decides rounds (docs/finality.md); unset: 1, at once."""
    probation_256: Annotated[int, Meta(ge=1, le=256)] | msgspec.UnsetType = msgspec.UNSET
    """Share of its weight that a member's work has until then (docs/aggregation.md); unset: all of it."""
    excise_rounds: Annotated[int, Meta(ge=1, le=MAX_EXCISE_ROUNDS)] | msgspec.UnsetType = msgspec.UNSET
    """Newest final rounds that an excluded member's work can be taken out of (docs/removal.md); unset: none."""
    stale: StaleSpec | msgspec.UnsetType = msgspec.UNSET
    """Work of an older base (docs/staleness.md); unset: it counts in its own round or nowhere."""


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model being trained, with all settings that its members share."""

    version: int
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    owner: PeerId
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    model: ModelSpec
    data: DataSpec
    inner: InnerSpec
    outer: OuterSpec
    compress: CompressSpec
    pace: PaceSpec
    admission: AdmissionSpec = AdmissionSpec()
    reduce: ReduceSpec | None = None
    """Reduction of large rounds (docs/wires/reduction.md); None: every node always gets every payload."""
    start: StartSpec | msgspec.UnsetType = msgspec.UNSET
    """Imported initial weights; unset: Θ₀ is drawn from the seed (node/learning/model/genesis.py)."""
    serving: ServingSpec | msgspec.UnsetType = msgspec.UNSET
    """Use of the trained model (docs/huggingface.md); unset: not specified."""
    audit: AuditSpec | msgspec.UnsetType = msgspec.UNSET
    """Audits of contributions (docs/audits.md); unset: weights are what contributions claim."""
    base: Digest | msgspec.UnsetType = msgspec.UNSET
    """Blob id of the frozen base of a LoRA run, a snapshot file of round −1; unset: members train all."""
    history: HistorySpec | msgspec.UnsetType = msgspec.UNSET
    """Certified summaries of old rounds (docs/history.md); unset: newcomers need one that keeps all."""
    objective: ObjectiveSpec | msgspec.UnsetType = msgspec.UNSET
    """A term beside the cross-entropy (docs/objectives.md); unset: none."""
    privacy: PrivacySpec | msgspec.UnsetType = msgspec.UNSET
    """Clipped gradients and noise (docs/privacy.md); unset: steps are exact."""

    @property
    def probation(self) -> int:
        """Final sets with a member's work after which it decides rounds."""
        return self.pace.probation or 1

    @property
    def given(self) -> tuple[Digest, ...]:
        """Blob ids of the files that travel with the run."""
        start = (self.start.weights, *self.start.moment_blobs) if self.start else ()
        found = (*start, self.base or b"", self.data.tokenizer_blob, self.data.index or b"")
        return tuple(Digest(blob) for blob in found if blob)

    @property
    def id(self) -> RunId:
        """BLAKE3 of the canonical bytes."""
        return RunId(digest(codec.encode(self)))

    def steps(self, number: int) -> int:
        """Number of inner steps (H) of round `number`."""
        return next(s.steps for s in reversed(self.outer.stages) if s.first <= number)

    def nominal_tokens(self, number: int) -> int:
        """Tokens that a member trains on that takes all of round `number`."""
        return self.steps(number) * self.inner.batch * self.model.context

    def steps_before(self, number: int) -> int:
        """Number of inner steps of all rounds before `number`: the position in the learning-rate schedule."""
        total = 0
        for at, stage in enumerate(self.outer.stages):
            last = self.outer.stages[at + 1].first if at + 1 < len(self.outer.stages) else number
            total += max(0, min(number, last) - stage.first) * stage.steps
        return total

    @property
    def last_step(self) -> int:
        """Position of the run's end in the learning-rate schedule."""
        return self.inner.first_step + self.steps_before(self.outer.rounds)

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that no run can have."""
        _check_version(self.version)
        codec.check_types(self)
        self.model.check()
        public_key_of(self.owner)
        _check_names(self)
        if self.inner.expert_lr != 1 and not self.model.expert_count:
            raise ConfigError("inner.expert_lr is for runs whose model has experts or ffn_slices")
        check_optimizer(self.inner)
        _check_outer(self.outer, self.model)
        _check_rule(self)
        for check in (check_average, check_spectrum, check_zeroth_order, check_objective, check_plugin):
            check(self)
        self.compress.check(self.outer, reduced=bool(self.reduce), audited=bool(self.audit))
        self.admission.check()
        if self.serving:
            self.serving.check(self.model.vocab)
        for check in (check_gossip, _check_reduce, check_audit):
            check(self)
        for check in (check_excision, check_lora, check_privacy, check_estimates, check_sizes, check_staleness):
            check(self)
        if self.pace.arrival == "group" and self.pace.least_256 == self.pace.most_256:
            raise ConfigError("pace.arrival group needs pace.least_256 or pace.most_256 other than 256")
        if self.pace.probation_256 is not msgspec.UNSET and self.probation == 1:
            raise ConfigError("pace.probation_256 needs pace.probation above 1: else nobody is on probation")


class SignedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A RunSpec's canonical bytes with the owner's signature: the content of a `.run` file."""

    spec: bytes
    signature: Signature


def sign_run(spec: RunSpec, owner: Identity) -> bytes:
    """Bytes of a `.run` file. Raises ConfigError unless `owner` is the spec's owner."""
    if spec.owner != owner.peer_id:
        raise ConfigError(f"the run belongs to {spec.owner}, not to {owner.peer_id}")
    spec.check()
    body = codec.encode(spec)
    return codec.encode(SignedRun(body, owner.sign(_DOMAIN, body)))


def open_run(data: bytes, *, oldest: int = SPEC_VERSION) -> RunSpec:
    """The verified RunSpec of a `.run` file. Raises DecodeError or SignatureFault.

    `oldest`: SAME_KEYS_VERSION for the run of a checkpoint, which nobody takes part in.
    """
    signed = codec.decode(data, SignedRun)
    try:
        _check_version(version_of(signed.spec), oldest)
        spec = codec.decode(signed.spec, RunSpec)
        msgspec.structs.replace(spec, version=SPEC_VERSION).check()
    except ConfigError as error:
        raise DecodeError(str(error), hint=error.hint) from error
    verify(spec.owner, _DOMAIN, signed.spec, signed.signature)
    return spec


class _Versioned(msgspec.Struct, frozen=True):
    """The part of a RunSpec that every version has."""

    version: int


def version_of(spec: bytes) -> int:
    """The version, before the keys are read, which may be others. Raises DecodeError."""
    try:
        return msgspec.msgpack.decode(spec, type=_Versioned).version
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DecodeError(f"not a legal RunSpec: {error}") from error


def _check_version(version: int, oldest: int = SPEC_VERSION) -> None:
    """Raise ConfigError for a run whose members decide or compute otherwise than this version of atoll."""
    if not oldest <= version <= SPEC_VERSION:
        newer = "update atoll on this node"
        older = "`atoll checkpoint save` with the version that made it, then `run new --from-checkpoint` with this"
        hint = newer if version > SPEC_VERSION else older
        raise ConfigError(f"RunSpec version {version}; this node speaks {SPEC_VERSION}", hint=hint)


def _check_names(spec: RunSpec) -> None:
    for key, text in (("name", spec.name), ("data.source", spec.data.source)):
        if not text.isprintable():
            raise ConfigError(f"{key} must have printable characters only")
    _check_given(spec)
    if len(spec.data.digest) not in (0, DIGEST_BYTES):
        raise ConfigError("data.digest must have 0 or 32 bytes")
    if spec.data.source.startswith(PACKED) and (not spec.data.digest or spec.data.tokenizer == "bpe8k"):
        raise ConfigError(f"{PACKED} needs data.digest, the id of its index, and the tokenizer `bytes` or `file`")


def _check_reduce(spec: RunSpec) -> None:
    if spec.reduce is None:
        return
    if spec.compress.codec != "sparse2" or spec.outer.fragments != 1:
        raise ConfigError("reduce needs compress.codec sparse2 and outer.fragments 1", hint=_UNREDUCED)
    refused = (
        (bool(spec.outer.holders), "outer.holders", "slices are of whole payloads"),
        (bool(spec.pace.probation_256), "pace.probation_256", "a reducer adds what contributions claim"),
        (bool(spec.outer.aggregate), "outer.aggregate", "a rule judges whole payloads, a reducer has slices"),
        (bool(spec.audit), "audit", "a reducer adds up weights before verdicts are final"),
    )
    for is_set, key, why in refused:
        if is_set:
            raise ConfigError(f"reduce and {key} cannot go together: {why}", hint=_UNREDUCED)


def _check_given(spec: RunSpec) -> None:
    if len(spec.data.tokenizer_blob) != (DIGEST_BYTES if spec.data.tokenizer == "file" else 0):
        raise ConfigError("data.tokenizer_blob must have 32 bytes with the tokenizer `file`, none with others")
    files = file_count(spec.model)
    if spec.start and len(spec.start.moments) not in (0, files * DIGEST_BYTES):
        raise ConfigError(f"start.moments must have 32 bytes for each of {files} files, or none")


def _check_outer(outer: OuterSpec, model: ModelSpec) -> None:
    check_range("outer.fragments", outer.fragments, 1, model.layers + 1)  # the embeddings are one
    if outer.overlap_most is not msgspec.UNSET and outer.overlap_most < outer.overlap_steps:
        raise ConfigError(
            f"outer.overlap_steps = {outer.overlap_steps} is above outer.overlap_most = {outer.overlap_most}",
            hint="set outer.overlap_most too",
        )
    if outer.holders and not model.expert_count:
        raise ConfigError("outer.holders is for runs whose model has experts or ffn_slices")
    if outer.late is not msgspec.UNSET and not outer.overlap_steps:
        raise ConfigError("outer.late is for runs with outer.overlap_steps above 0: else no fold is late")
    if outer.merge and model.experts is None:
        raise ConfigError("outer.merge is for runs whose model has experts")
    _check_aggregate(outer)
    firsts = [stage.first for stage in outer.stages]
    if firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ConfigError("outer.stages must start at round 0 and rise")


def _check_rule(spec: RunSpec) -> None:
    """Refuse a rule of the outer step beside settings that it cannot work with."""
    outer, rule = spec.outer, spec.outer.rule
    if outer.momentum_256 is not msgspec.UNSET and not outer.momenta:
        raise ConfigError("outer.momentum_256 is for runs with outer.rule nesterov, slowmo or co2")
    if rule != "co2" and (outer.stale_256 or outer.clip_65536):
        raise ConfigError("outer.stale_256 and outer.clip_65536 are for runs with outer.rule co2")
    if not outer.momenta:
        return
    refused = (
        (spec.reduce is not None, "reduce", "slices of a reduced round are added to the weights one by one"),
        (bool(outer.holders), "outer.holders", "an expert that nobody trained would move by its momentum"),
        (bool(outer.merge), "outer.merge", "a merged expert would keep the momentum of the one that it was"),
        (bool(spec.start), "start", "imported weights are a state without momentum"),
    )
    for is_set, key, why in refused:
        if is_set:
            raise ConfigError(f"outer.rule {rule} and {key} cannot go together: {why}")


def _check_aggregate(outer: OuterSpec) -> None:
    if outer.step_most_256 is not msgspec.UNSET and outer.aggregate != "edit":
        raise ConfigError("outer.step_most_256 is for runs with outer.aggregate edit")
    if outer.liars_256 is not msgspec.UNSET and outer.aggregate == "edit":
        raise ConfigError("outer.liars_256 is not for outer.aggregate edit: it finds anomalies by their length")
    if outer.by_weight and outer.aggregate in (msgspec.UNSET, "edit"):
        raise ConfigError("outer.by_weight is for runs with an outer.aggregate other than edit")
    if outer.aggregate is msgspec.UNSET:
        if outer.liars_256 is not msgspec.UNSET or outer.most_256 is not msgspec.UNSET:
            raise ConfigError("outer.liars_256 and outer.most_256 are for runs with outer.aggregate")
    elif not outer.floor_256:
        raise ConfigError("outer.aggregate needs outer.floor_256 above 0: else one member moves a value alone")
