"""RunSpec: everything that the members of a run must agree on, signed by the run's owner.

The run id is the BLAKE3 of the canonical bytes and is part of every handshake. Unknown and missing keys are
errors.
"""

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, check_range
from atoll.protocols.identity import SIGNATURE_BYTES, Identity, verify
from atoll.protocols.ids import DIGEST_BYTES, Digest, PeerId, RunId, digest, public_key_of
from atoll.protocols.run.admission import AdmissionSpec
from atoll.protocols.run.merging import MergeSpec
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.moments import file_count
from atoll.protocols.run.payload import check_codec
from atoll.protocols.run.serving import ServingSpec
from atoll.protocols.run.slices import ReduceSpec

SPEC_VERSION = 4
WHOLE_VERSION = 3
"""Older version that is still read for runs with one fragment: it cuts several fragments differently."""
_DOMAIN = "run/1"
_UNREDUCED = "set reduce to null: then every node gets every payload"
_MAX_ROUNDS = 1 << 24
TOKENIZER_MAX_BYTES = 32 << 20
"""Largest tokenizer file, in bytes. Those of published models have up to 20 MB."""


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The training text and its tokenizer."""

    source: str
    """`builtin:shakespeare`, `synthetic:markov`, or `file:NAME`, for which each node has its own path."""
    tokenizer: str
    """`bytes` (256 tokens), `bpe8k` (8192 tokens) or `file`: the blob `tokenizer_blob`, a `tokenizer.json`."""
    digest: bytes
    """BLAKE3 of the source's text, so that all members read the same; empty: not checked."""
    tokenizer_blob: bytes = b""
    """Blob id of the tokenizer file, which travels with the run; empty unless `tokenizer` is `file`."""


class StartSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Imported initial weights: Θ₀ is a snapshot file of round −1, which travels with the run."""

    weights: bytes
    """Blob id of the snapshot file. Its size follows from the model."""
    state: bytes
    """State digest of Θ₀."""
    moments: bytes = b""
    """Blob ids, end to end, of a checkpoint's moments files (protocols/run/moments.py); empty: zero moments."""

    @property
    def moment_blobs(self) -> tuple[Digest, ...]:
        """Blob ids of the moments files, in their order."""
        ends = range(DIGEST_BYTES, len(self.moments) + 1, DIGEST_BYTES)
        return tuple(Digest(self.moments[end - DIGEST_BYTES : end]) for end in ends)


class InnerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """AdamW and the learning-rate schedule of the inner steps."""

    lr: float
    """Peak learning rate."""
    lr_min: float
    """Learning rate at the end of the cosine, as a fraction of `lr`."""
    warmup_steps: int
    """Inner steps over which the learning rate rises."""
    total_steps: int
    """Inner steps over which the cosine falls."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float
    """Bound of the gradient norm."""
    batch: int
    """Sequences per inner step of one member."""
    expert_lr: float = 1.0
    """Learning rate of experts, in units of `lr`; above 1 if each has few holders (docs/experts.md)."""
    first_step: int = 0
    """Position of round 0 in the learning-rate schedule; above 0 if the run continues a checkpoint."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From round `first` on, members take `steps` inner steps per round."""

    first: int
    steps: int


class OuterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The outer step, θ ← θ − α · mean, in exact integers. Names ending in _256 are numerators over 256."""

    rounds: int
    """Number of outer steps of the whole run."""
    stages: tuple[Stage, ...]
    """Inner steps per round (H), by stage; the first stage starts at round 0."""
    alpha_256: int
    """Outer learning rate α."""
    floor_256: int
    """Least divisor of a coordinate, as a share of all weight; above it, the weight of the coordinate's senders.

    0: mean over senders (SparseLoCo as coded). 256: mean over members (as published).
    """
    fragments: int = 1
    """Number of fragments; round r exchanges fragment r mod `fragments` (protocols/ledger/coverage.py)."""
    overlap_steps: int = 0
    """Inner steps of the next round that a member may take before this round is folded; 0: no overlap."""
    keep_256: int = 128
    """Share of the progress made during the overlap that stays in the local weights after the fold."""
    holders: int = 0
    """Number of members that train each expert (protocols/ledger/ownership.py); 0: all train all; 1: SPES."""
    merge: MergeSpec | msgspec.UnsetType = msgspec.UNSET
    """Expert merging; unset: experts are not merged."""
    overlap_most: int | msgspec.UnsetType = msgspec.UNSET
    """Most overlap steps of a member with a slow link (node/daemon/rounds/overlap_depth.py); unset:
    `overlap_steps`."""

    @property
    def overlap_bounds(self) -> tuple[int, int]:
        """Least and most inner steps that a member may be ahead of a fold; both 0 without overlap."""
        most = self.overlap_steps if self.overlap_most is msgspec.UNSET else self.overlap_most
        return self.overlap_steps, most if self.overlap_steps else 0


class CompressSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Compression of a pseudo-gradient into a payload."""

    codec: str
    """`sparse2`, `sparse1`: top-k with 2 bits or the sign only; `int8`, `e3m0`: all values (see payload.py)."""
    k: int
    """Values kept of each chunk of 4096; 4096 with a dense codec."""
    feedback: float
    """Decay β of the error feedback."""


class PaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a round closes. Times are measured in round times, never guessed in seconds."""

    quorum_256: int
    """Share of the expected members whose contributions start the grace period."""
    grace_256: int
    """Grace period for the others, as a share of the member's own time of this round."""
    lease_s: float
    """Life of a lease, in seconds: a member that is silent for longer is not waited for."""
    min_members: int
    """Number of leases that round 0 waits for."""
    least_256: int = 256
    """Share of the round's steps after which a slow member may end its round, to finish with the others."""
    most_256: int = 256
    """Share of the round's steps up to which a fast member may train while the others finish."""


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model being trained, with all settings that its members share."""

    version: int
    name: str
    owner: PeerId
    seed: int
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

    @property
    def given(self) -> tuple[Digest, ...]:
        """Blob ids of the files that travel with the run."""
        start = (self.start.weights, *self.start.moment_blobs) if self.start else ()
        found = (*start, self.data.tokenizer_blob)
        return tuple(Digest(blob) for blob in found if blob)

    @property
    def id(self) -> RunId:
        """BLAKE3 of the canonical bytes."""
        return RunId(digest(codec.encode(self)))

    def steps(self, number: int) -> int:
        """Number of inner steps (H) of round `number`."""
        return next(s.steps for s in reversed(self.outer.stages) if s.first <= number)

    def steps_before(self, number: int) -> int:
        """Number of inner steps of all rounds before `number`: the position in the learning-rate schedule."""
        total = 0
        for at, stage in enumerate(self.outer.stages):
            last = self.outer.stages[at + 1].first if at + 1 < len(self.outer.stages) else number
            total += max(0, min(number, last) - stage.first) * stage.steps
        return total

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that no run can have."""
        if self.version != SPEC_VERSION and self.outer.fragments > 1:
            raise ConfigError(
                f"in version {self.version} outer.fragments were cut otherwise", hint="make the run again"
            )
        self.model.check()
        public_key_of(self.owner)
        _check_names(self)
        _check_inner(self.inner, self.model)
        _check_outer(self.outer, self.model)
        check_range("compress.feedback", self.compress.feedback, 0, 1)
        check_range("pace.quorum_256", self.pace.quorum_256, 1, 256)
        check_range("pace.grace_256", self.pace.grace_256, 0, 1 << 16)
        check_range("pace.lease_s", self.pace.lease_s, 1, 3600)
        check_range("pace.min_members", self.pace.min_members, 1, 1024)
        check_range("pace.least_256", self.pace.least_256, 1, 256)
        check_range("pace.most_256", self.pace.most_256, 256, 1024)
        self.admission.check()
        if self.serving:
            self.serving.check(self.model.vocab)
        _check_reduce(self)


class SignedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A RunSpec's canonical bytes with the owner's signature: the content of a `.run` file."""

    spec: bytes
    signature: bytes


def sign_run(spec: RunSpec, owner: Identity) -> bytes:
    """Bytes of a `.run` file. Raises ConfigError unless `owner` is the spec's owner."""
    if spec.owner != owner.peer_id:
        raise ConfigError(f"the run belongs to {spec.owner}, not to {owner.peer_id}")
    spec.check()
    body = codec.encode(spec)
    return codec.encode(SignedRun(body, owner.sign(_DOMAIN, body)))


def open_run(data: bytes) -> RunSpec:
    """The verified RunSpec of a `.run` file. Raises DecodeError or SignatureFault."""
    signed = codec.decode(data, SignedRun)
    _check_version(signed.spec)
    if len(signed.signature) != SIGNATURE_BYTES:
        raise DecodeError("a signature has 64 bytes")
    spec = codec.decode(signed.spec, RunSpec)
    try:
        spec.check()
    except ConfigError as error:
        raise DecodeError(str(error), hint=error.hint) from error
    verify(spec.owner, _DOMAIN, signed.spec, signed.signature)
    return spec


class _Versioned(msgspec.Struct, frozen=True):
    """The part of a RunSpec that every version has."""

    version: int


def _check_version(spec: bytes) -> None:
    """Raise DecodeError for another version, before the keys are read: another version has other keys."""
    try:
        found = msgspec.msgpack.decode(spec, type=_Versioned).version
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DecodeError(f"not a legal RunSpec: {error}") from error
    if found not in (WHOLE_VERSION, SPEC_VERSION):
        raise DecodeError(f"RunSpec version {found}; this node speaks {WHOLE_VERSION} and {SPEC_VERSION}")


def _check_names(spec: RunSpec) -> None:
    if not (1 <= len(spec.name) <= 64 and spec.name.isprintable()):
        raise ConfigError("name must have 1 to 64 printable characters")
    _check_given(spec)
    if not (1 <= len(spec.data.source) <= 1024 and spec.data.source.isprintable()):
        raise ConfigError("data.source must have 1 to 1024 printable characters")
    if len(spec.data.digest) not in (0, 32):
        raise ConfigError("data.digest must have 0 or 32 bytes")
    check_codec(spec.compress.codec, spec.compress.k)
    check_range("seed", spec.seed, 0, 2**63 - 1)


def _check_reduce(spec: RunSpec) -> None:
    if spec.reduce is None:
        return
    spec.reduce.check()
    if spec.compress.codec != "sparse2" or spec.outer.fragments != 1:
        raise ConfigError("reduce needs compress.codec sparse2 and outer.fragments 1", hint=_UNREDUCED)
    if spec.outer.holders:
        raise ConfigError(
            "reduce and outer.holders cannot go together: slices are of whole payloads", hint=_UNREDUCED
        )


def _check_given(spec: RunSpec) -> None:
    if spec.data.tokenizer not in ("bytes", "bpe8k", "file"):
        raise ConfigError(f"data.tokenizer {spec.data.tokenizer!r} is not one of bytes, bpe8k, file")
    if len(spec.data.tokenizer_blob) != (DIGEST_BYTES if spec.data.tokenizer == "file" else 0):
        raise ConfigError("data.tokenizer_blob must have 32 bytes with the tokenizer `file`, none with others")
    if spec.start and not len(spec.start.weights) == len(spec.start.state) == DIGEST_BYTES:
        raise ConfigError("start.weights and start.state must have 32 bytes")
    files = file_count(spec.model)
    if spec.start and len(spec.start.moments) not in (0, files * DIGEST_BYTES):
        raise ConfigError(f"start.moments must have 32 bytes for each of {files} files, or none")


def _check_inner(inner: InnerSpec, model: ModelSpec) -> None:
    check_range("inner.lr", inner.lr, 1e-9, 1)
    check_range("inner.lr_min", inner.lr_min, 0, 1)
    check_range("inner.warmup_steps", inner.warmup_steps, 0, 1 << 31)
    check_range("inner.total_steps", inner.total_steps, 1, 1 << 31)
    check_range("inner.beta1", inner.beta1, 0, 0.9999)
    check_range("inner.beta2", inner.beta2, 0, 0.99999)
    check_range("inner.eps", inner.eps, 1e-16, 1)
    check_range("inner.weight_decay", inner.weight_decay, 0, 1)
    check_range("inner.clip", inner.clip, 1e-6, 1e6)
    check_range("inner.batch", inner.batch, 1, 1 << 20)
    check_range("inner.expert_lr", inner.expert_lr, 1 / 64, 64)
    check_range("inner.first_step", inner.first_step, 0, 1 << 31)
    if inner.expert_lr != 1 and model.experts is None:
        raise ConfigError("inner.expert_lr is for runs whose model has experts")


def _check_outer(outer: OuterSpec, model: ModelSpec) -> None:
    check_range("outer.rounds", outer.rounds, 1, _MAX_ROUNDS)
    check_range("outer.alpha_256", outer.alpha_256, 1, 1024)
    check_range("outer.floor_256", outer.floor_256, 0, 256)
    check_range("outer.fragments", outer.fragments, 1, model.layers + 1)  # the embeddings are one
    check_range("outer.overlap_steps", outer.overlap_steps, 0, 1 << 16)
    if outer.overlap_most is not msgspec.UNSET:
        check_range("outer.overlap_most", outer.overlap_most, 1, 1 << 16)
        if outer.overlap_most < outer.overlap_steps:
            raise ConfigError(
                f"outer.overlap_steps = {outer.overlap_steps} is above outer.overlap_most = {outer.overlap_most}",
                hint="set outer.overlap_most too",
            )
    check_range("outer.keep_256", outer.keep_256, 0, 256)
    check_range("outer.holders", outer.holders, 0, 1024)
    if outer.holders and model.experts is None:
        raise ConfigError("outer.holders is for runs whose model has experts")
    if outer.merge:
        outer.merge.check()
        if model.experts is None:
            raise ConfigError("outer.merge is for runs whose model has experts")
    firsts = [stage.first for stage in outer.stages]
    if not 1 <= len(firsts) <= 64 or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ConfigError("outer.stages must start at round 0 and rise")
    for stage in outer.stages:
        check_range("outer.stages.steps", stage.steps, 1, 1 << 16)
