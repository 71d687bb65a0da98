"""RunSpec: everything that peers must agree on. Hashed, signed by the owner, in every handshake.

The run id is the BLAKE3 of the canonical bytes. Unknown and missing keys are errors.
"""

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
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
"""Still read: it differs from the newest in how several fragments are cut, and so only where there are several."""
_DOMAIN = "run/1"
_UNREDUCED = "set reduce to null: then every node gets every payload"
_MAX_ROUNDS = 1 << 24
TOKENIZER_MAX_BYTES = 32 << 20
"""Of a tokenizer given as a file. Those of published models have up to 20 MB."""


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What is read: `builtin:shakespeare`, `synthetic:markov`, `file:NAME` (each node has its own path)."""

    source: str
    tokenizer: str
    """`bytes` (256 tokens), `bpe8k` (8192 tokens) or `file`: the blob `tokenizer_blob`, a `tokenizer.json`."""
    digest: bytes
    """BLAKE3 of the source's text, so that all members read the same; empty where it is not checked."""
    tokenizer_blob: bytes = b""
    """Blob id of the tokenizer `file`, which travels with the run; empty for the others."""


class StartSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Θ₀ is given, not drawn from the seed: a snapshot file of round −1, which travels with the run."""

    weights: bytes
    """Blob id of that file. Its size follows from the model."""
    state: bytes
    """State digest of Θ₀."""
    moments: bytes = b""
    """Blob ids of a checkpoint's moments files (protocols/run/moments.py), end to end; empty: they start at
    zero."""

    @property
    def moment_blobs(self) -> tuple[Digest, ...]:
        """The files in their order."""
        ends = range(DIGEST_BYTES, len(self.moments) + 1, DIGEST_BYTES)
        return tuple(Digest(self.moments[end - DIGEST_BYTES : end]) for end in ends)


class InnerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """AdamW between two outer steps."""

    lr: float
    lr_min: float
    """Fraction of `lr` at the end of the cosine."""
    warmup_steps: int
    total_steps: int
    """Inner steps over which the cosine falls."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float
    """Gradient norm bound."""
    batch: int
    """Sequences of one inner step of one member."""
    expert_lr: float = 1.0
    """Rate of the experts' weights, in units of `lr`: above 1 where each has few holders (docs/experts.md)."""
    first_step: int = 0
    """Where in the learning rate's schedule round 0 begins: not at 0 where a run goes on from a checkpoint."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From round `first`, members take `steps` inner steps a round."""

    first: int
    steps: int


class OuterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """θ ← θ − α · mean, in exact integers. Rationals have the denominator 256."""

    rounds: int
    """Outer steps of the whole run."""
    stages: tuple[Stage, ...]
    """Inner steps per round (H); first stage starts at round 0."""
    alpha_256: int
    floor_256: int
    """A coordinate is divided by the weight of its senders, but at least by this share of all weight.

    0: mean over senders (SparseLoCo as coded). 256: mean over members (as published).
    """
    fragments: int = 1
    """Round r exchanges fragment r mod `fragments` of the model (protocols/ledger/coverage.py); 1: all of it."""
    overlap_steps: int = 0
    """Inner steps of the next round that every member may take before the fold of this round is in; 0: none."""
    keep_256: int = 128
    """Share of the progress made during the overlap that stays in the local weights when the fold is in."""
    holders: int = 0
    """Members that train each expert (protocols/ledger/ownership.py); 0: all members train all. 1 is SPES."""
    merge: MergeSpec | msgspec.UnsetType = msgspec.UNSET
    """Unset: experts are not merged."""
    overlap_most: int | msgspec.UnsetType = msgspec.UNSET
    """Up to so many a member may take whose link needs them (node/daemon/rounds/overlap_depth.py); unset:
    `overlap_steps`."""

    @property
    def overlap_bounds(self) -> tuple[int, int]:
        """Least and most steps that a member may be ahead of a fold; nobody is where `overlap_steps` is 0."""
        most = self.overlap_steps if self.overlap_most is msgspec.UNSET else self.overlap_most
        return self.overlap_steps, most if self.overlap_steps else 0


class CompressSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a pseudo-gradient becomes a payload."""

    codec: str
    """`sparse2`, `sparse1`: top-k with 2 bits or the sign alone; `int8`, `e3m0`: all
    (protocols/run/payload.py)."""
    k: int
    """Values kept of each chunk of 4096; all of them with a dense codec."""
    feedback: float
    """β of the error feedback."""


class PaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a round closes. Times are measured in round times, never guessed in seconds."""

    quorum_256: int
    """Share of the expected members whose contribution starts the grace."""
    grace_256: int
    """Grace for the others, as a share of the member's own time of this round."""
    lease_s: float
    """A member unheard for this long is no longer waited for."""
    min_members: int
    """Round 0 begins when so many members hold leases."""
    least_256: int = 256
    """A slow member may end its round after this share of the round's steps, to finish with the others."""
    most_256: int = 256
    """A fast member may go on to this share of the round's steps while the others finish."""


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model being trained."""

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
    """How large rounds are reduced (docs/wires/reduction.md); none: every node always gets every payload."""
    start: StartSpec | msgspec.UnsetType = msgspec.UNSET
    """Unset: Θ₀ is drawn from the seed (node/learning/model/genesis.py)."""
    serving: ServingSpec | msgspec.UnsetType = msgspec.UNSET
    """Unset: nobody said how the model is to be used (docs/huggingface.md)."""

    @property
    def given(self) -> tuple[Digest, ...]:
        """Blobs that travel with the run."""
        start = (self.start.weights, *self.start.moment_blobs) if self.start else ()
        found = (*start, self.data.tokenizer_blob)
        return tuple(Digest(blob) for blob in found if blob)

    @property
    def id(self) -> RunId:
        """BLAKE3 of the canonical bytes."""
        return RunId(digest(codec.encode(self)))

    def steps(self, number: int) -> int:
        """Inner steps (H) of round `number`."""
        return next(s.steps for s in reversed(self.outer.stages) if s.first <= number)

    def steps_before(self, number: int) -> int:
        """Inner steps of all rounds before `number`: the position in the learning-rate schedule."""
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
        _within("compress.feedback", self.compress.feedback, 0, 1)
        _within("pace.quorum_256", self.pace.quorum_256, 1, 256)
        _within("pace.grace_256", self.pace.grace_256, 0, 1 << 16)
        _within("pace.lease_s", self.pace.lease_s, 1, 3600)
        _within("pace.min_members", self.pace.min_members, 1, 1024)
        _within("pace.least_256", self.pace.least_256, 1, 256)
        _within("pace.most_256", self.pace.most_256, 256, 1024)
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
    """What every version of a RunSpec has."""

    version: int


def _check_version(spec: bytes) -> None:
    """Say which version it is before its keys are looked at: another version has other keys."""
    try:
        found = msgspec.msgpack.decode(spec, type=_Versioned).version
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DecodeError(f"not a legal RunSpec: {error}") from error
    if found not in (WHOLE_VERSION, SPEC_VERSION):
        raise DecodeError(f"RunSpec version {found}; this node speaks {WHOLE_VERSION} and {SPEC_VERSION}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN and infinity too, and safe for any int
        raise ConfigError(f"{name} = {value} is outside {low} … {high}")


def _check_names(spec: RunSpec) -> None:
    if not (1 <= len(spec.name) <= 64 and spec.name.isprintable()):
        raise ConfigError("name must have 1 to 64 printable characters")
    _check_given(spec)
    if not (1 <= len(spec.data.source) <= 1024 and spec.data.source.isprintable()):
        raise ConfigError("data.source must have 1 to 1024 printable characters")
    if len(spec.data.digest) not in (0, 32):
        raise ConfigError("data.digest must have 0 or 32 bytes")
    check_codec(spec.compress.codec, spec.compress.k)
    _within("seed", spec.seed, 0, 2**63 - 1)


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
    _within("inner.lr", inner.lr, 1e-9, 1)
    _within("inner.lr_min", inner.lr_min, 0, 1)
    _within("inner.warmup_steps", inner.warmup_steps, 0, 1 << 31)
    _within("inner.total_steps", inner.total_steps, 1, 1 << 31)
    _within("inner.beta1", inner.beta1, 0, 0.9999)
    _within("inner.beta2", inner.beta2, 0, 0.99999)
    _within("inner.eps", inner.eps, 1e-16, 1)
    _within("inner.weight_decay", inner.weight_decay, 0, 1)
    _within("inner.clip", inner.clip, 1e-6, 1e6)
    _within("inner.batch", inner.batch, 1, 1 << 20)
    _within("inner.expert_lr", inner.expert_lr, 1 / 64, 64)
    _within("inner.first_step", inner.first_step, 0, 1 << 31)
    if inner.expert_lr != 1 and model.experts is None:
        raise ConfigError("inner.expert_lr is for runs whose model has experts")


def _check_outer(outer: OuterSpec, model: ModelSpec) -> None:
    _within("outer.rounds", outer.rounds, 1, _MAX_ROUNDS)
    _within("outer.alpha_256", outer.alpha_256, 1, 1024)
    _within("outer.floor_256", outer.floor_256, 0, 256)
    _within("outer.fragments", outer.fragments, 1, model.layers + 1)  # the embeddings are one
    _within("outer.overlap_steps", outer.overlap_steps, 0, 1 << 16)
    if outer.overlap_most is not msgspec.UNSET:
        _within("outer.overlap_most", outer.overlap_most, 1, 1 << 16)
        if outer.overlap_most < outer.overlap_steps:
            raise ConfigError(
                f"outer.overlap_steps = {outer.overlap_steps} is above outer.overlap_most = {outer.overlap_most}",
                hint="set outer.overlap_most too",
            )
    _within("outer.keep_256", outer.keep_256, 0, 256)
    _within("outer.holders", outer.holders, 0, 1024)
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
        _within("outer.stages.steps", stage.steps, 1, 1 << 16)
