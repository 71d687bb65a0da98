"""A legal example of every message and record that has a version, and the names that peers know them by.

`wires.json` has the bytes of each as this release writes them (hex). Other releases read these bytes: a change of
them needs a new version of the wire (`protocols/wires.py`). `test_messages.py` fails for a message without one.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from atoll.node.checkpoint import local, manifests, universal
from atoll.node.daemon.certificates import certificate, full_summary, reducers, summary
from atoll.p2p.blobs import frames as blob_frames
from atoll.p2p.discovery import dht_records
from atoll.p2p.exchange import summaries
from atoll.p2p.exchange.floors import FeedFloors, FloorsQuery
from atoll.p2p.exchange.orphans import FoundEntries, WantedEntries
from atoll.p2p.exchange.sync import Exchange
from atoll.p2p.gossip.push_trees import Ids
from atoll.p2p.host.framing import framed
from atoll.p2p.ledger.history import Link, StoredLink
from atoll.p2p.limits.monthly_quota import Month
from atoll.p2p.membership.kept_leases import SeenLeases
from atoll.p2p.membership.register_sync import KnownVersions, RegisterBatch
from atoll.p2p.nat import held_circuits
from atoll.p2p.rpc import frames as call_frames
from atoll.protocols import blobs, codec, nat, wires
from atoll.protocols.data.shard_index import ShardIndex
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, RunId
from atoll.protocols.ledger import audit_claims, ballots, records, reduction, registers
from atoll.protocols.local import control_messages
from atoll.protocols.local import rank_messages as ranks
from atoll.protocols.local import worker_messages as worker
from atoll.protocols.pulls.question import PullQuestion
from atoll.protocols.pulls.requests import DifferenceReply, DifferenceRequest, MixReply, MixRequest
from atoll.protocols.run import admission, invite
from atoll.protocols.run.arena import Span
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, RopeStretch, plugged
from atoll.protocols.run.run_spec import (
    DataSpec,
    InnerSpec,
    OuterSpec,
    PaceSpec,
    RunSpec,
    SignedRun,
    Stage,
    StartSpec,
    sign_run,
)
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.compression import CompressSpec, WarmUp
from atoll.protocols.run.sections.history import HistorySpec
from atoll.protocols.run.sections.merging import MergeSpec
from atoll.protocols.run.sections.objective import ObjectiveSpec
from atoll.protocols.run.sections.plugin import ONES, PluginSpec, TensorSpec
from atoll.protocols.run.sections.privacy import PrivacySpec
from atoll.protocols.run.sections.serving import SamplingSpec, ServingSpec, TokensSpec
from atoll.protocols.run.sections.variants.gossip import GossipSpec
from atoll.protocols.run.sections.variants.sizes import SizesSpec
from atoll.protocols.run.sections.variants.staleness import StaleSpec
from atoll.protocols.run.slices import ReduceSpec, plan_of

ME, OTHER = Identity(bytes(range(32))), Identity(bytes(range(32, 64)))
RUN = RunId(b"\xaa" * 32)
A, B = Digest(b"\1" * 32), Digest(b"\2" * 32)
ROUND = Round(8)
PLACE = "/ip4/203.0.113.7/tcp/4001"
UNIX_S = 1_900_000_000


class Case(NamedTuple):
    """One example."""

    value: Any
    kind: Any
    """The type that its readers decode, a union where there are several answers."""
    is_local: bool = False
    """Only processes of this machine write and read it; floats are not limited then."""


def _model(**changes: Any) -> ModelSpec:
    plain = ModelSpec(
        dim=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=256, context=16, tied=True, rope_theta=10000.0,
        norm_eps=1e-5,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def _run(**changes: Any) -> RunSpec:
    plain = RunSpec(
        version=9, name="golden", owner=ME.peer_id, seed=7, model=_model(),
        data=DataSpec(source="builtin:shakespeare", tokenizer="bytes", digest=b""),
        inner=InnerSpec(
            lr=2e-3, lr_min=0.1, warmup_steps=10, total_steps=600, beta1=0.9, beta2=0.95, eps=1e-8,
            weight_decay=0.1, clip=1.0, batch=8,
        ),
        outer=OuterSpec(rounds=100, stages=(Stage(0, 5), Stage(10, 15)), alpha_256=256, floor_256=64),
        compress=CompressSpec(codec="sparse2", k=64, feedback=0.95),
        pace=PaceSpec(quorum_256=171, grace_256=64, lease_s=30.0, min_members=1),
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


DENSE = _run(
    model=_model(
        qk_norm=True, qk_norm_across=True, head_size=32,
        rope_stretch=RopeStretch(factor=8.0, low=1.0, high=4.0, original=8192),
    ),
    data=DataSpec(source="file:text", tokenizer="file", digest=A, tokenizer_blob=B),
    admission=admission.AdmissionSpec(mode="allowlist", members=(OTHER.peer_id,)),
    reduce=ReduceSpec(),
    start=StartSpec(weights=A, state=B, moments=A),
    serving=ServingSpec(
        bos=1, eos=(2, 3), pad=0, tokens=TokensSpec(bos=1, eos=2, pad=0, unk=4), chat_template="{{ messages }}",
        sampling=SamplingSpec(do_sample=True, temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1),
    ),
)  # fmt: skip
MIXTURE = _run(
    model=_model(
        ffn=96,
        experts=ExpertsSpec(
            count=4, per_token=2, ffn=48, normalise=False, zero=2, computed=1.5, bias_rate=0.01, load_balance=0.02,
            router_z=0.003,
        ),
    ),
    pace=msgspec.structs.replace(_run().pace, probation=8, probation_256=64),
    inner=msgspec.structs.replace(_run().inner, expert_lr=2.0, first_step=40),
    outer=OuterSpec(
        rounds=100, stages=(Stage(0, 5),), alpha_256=256, floor_256=64, fragments=2, overlap_steps=2, keep_256=100,
        holders=1, merge=MergeSpec(every=4, until=40, alpha_4096=205), overlap_most=5,
        aggregate="nnm", liars_256=80, most_256=512,
    ),
)  # fmt: skip

PLUGGED = msgspec.structs.replace(
    _run(
        model=plugged(
            PluginSpec(
                name="lanes.1", package="atoll-lanes", saved=70_000,
                tensors=(TensorSpec("down.weight", (8, 9), 9), TensorSpec("norm.weight", (8,), ONES)),
            ),
            context=1024,
        ),
    ),
    data=DataSpec(source="plugin:lanes.1", tokenizer="bytes", digest=A),
)  # fmt: skip
AUDITED = _run(audit=AuditSpec(windows=32, each=2, lag=3, memory=24))
GUARDED = _run(audit=AuditSpec(each=3, voters=True, newcomers=16))
CERTIFYING = _run(history=HistorySpec(every=128))
WITH_TERM = _run(
    objective=ObjectiveSpec(name="edges.2", weight=0.02, settings=(("width", 3.5),), package="atoll-edges")
)
PRIVATE = _run(privacy=PrivacySpec(clip=1.5, noise=0.75, delta=1e-6, most=8.0))
MUON = _run(inner=msgspec.structs.replace(_run().inner, optimizer="muon", muon_lr=2.0, muon_momentum=0.9))
DECAYING = _run(inner=msgspec.structs.replace(_run().inner, total_steps=1400, decay_256=54))
SLOW = _run(
    outer=msgspec.structs.replace(_run().outer, spectrum="isotropic"),
    inner=msgspec.structs.replace(_run().inner, beta1=0.995, beta2=0.999, momentum_share=0.9),
    pace=msgspec.structs.replace(_run().pace, least_256=64, most_256=512, arrival="group"),
)
SCALARS = _run(
    inner=msgspec.structs.replace(_run().inner, optimizer="spsa", spread=0.01, weight_decay=0.0),
    compress=CompressSpec(codec="scalar", k=16, feedback=0.0),
)
LORA = _run(model=_model(lora_rank=4, lora_alpha=8.0, lora_targets="attention"), base=A)
ECONTROL = _run(
    compress=CompressSpec(codec="int8", k=4096, feedback=1.0, feedback_rule="econtrol", control=0.3),
    outer=msgspec.structs.replace(_run().outer, rule="slowmo", momentum_256=255, floor_256=256),
)
DGC = _run(
    compress=CompressSpec(
        codec="sparse2", k=64, feedback=1.0, feedback_rule="dgc", momentum=0.8, clip=2.0,
        warmup=(WarmUp(4, 1024), WarmUp(8, 256)),
    ),
)  # fmt: skip
SIZED = _run(compress=CompressSpec(codec="sparse2", k=64, feedback=0.95, sizes=SizesSpec(goal="bytes")))
STALE = _run(pace=msgspec.structs.replace(_run().pace, stale=StaleSpec(most=8, weights="fedfix")))
GOSSIPING = _run(
    outer=msgspec.structs.replace(_run().outer, gossip=GossipSpec(steps=3, first_256=5, last_256=128)),
    compress=CompressSpec(codec="e3m0", k=4096, feedback=0.0),
)
PUZZLED = _run(admission=admission.AdmissionSpec(mode="open", puzzle_bits=20))

BALLOT = records.Ballot(3, ME.peer_id)
IN_EPOCH = records.Ballot(3, ME.peer_id, A)
WORK = records.Contribution(ROUND, A, B, 15, 122880, 64, 2.5)
TOKEN = admission.make_token(RUN, ME, bytes(range(64, 96)), UNIX_S, "friends", 5)
BODIES: tuple[records.Body, ...] = (
    WORK,
    records.PartContribution(ROUND, A, B, 15, 122880, 64, 2.5, experts=b"\x06"),
    records.StaleContribution(ROUND, A, B, 15, 122880, 64, 2.5, age=3),
    records.SlicedContribution(ROUND, A, B, 15, 122880, 64, 2.5, rows=A),
    records.PlannedContribution(ROUND, A, B, 15, 122880, 64, 2.5, rows=A),
    records.AuditedContribution(
        ROUND, A, B, 15, 122880, 64, 2.5, verdicts=(records.Verdict(A, 40), records.Verdict(B, -96))
    ),
    records.Ack(ROUND, A, B),
    records.Proposal(ROUND, BALLOT, (A, B), A),
    records.ExcisingProposal(ROUND, BALLOT, (A, B), A, (records.Excised(OTHER.peer_id, Round(7)),)),
    records.ExcludingProposal(ROUND, BALLOT, (A, B), A, (OTHER.peer_id,)),
    records.SummaryProposal(ROUND, records.Ballot(0, ME.peer_id), (A, B), A, B),
    records.Vote(ROUND, IN_EPOCH, A),
    records.Prepare(ROUND, BALLOT),
    records.Promise(ROUND, BALLOT, (A,)),
    records.Reduction(ROUND, Span(256, 272), b"\x05", (A, B), A, B, A, B, previous=A),
    records.ReductionFault(ROUND, A, B),
    records.Unanswered(ROUND, A, 261),
    records.Leave(ROUND),
    records.Epoch(ROUND, A, tuple(sorted((ME.peer_id, OTHER.peer_id)))),
    records.Follow(ROUND, A),
    records.Exclude(ROUND, OTHER.peer_id, "noise"),
    records.Excise(ROUND, OTHER.peer_id, "noise", Round(7)),
)
VALUES = (
    registers.Lease("training", ROUND, 6, A, 6, 1234.5, 2.5, 3.25, "otter"),
    registers.Holding(b"\x03", 8, ((2, A),)),
    registers.Addresses((PLACE,)),
    registers.Validation(ROUND, A, 2.5),
    audit_claims.AuditCall(ROUND, A),
    audit_claims.AuditFindings(((A[:8], -3), (B[:8], 40))),
)
OPENING = reduction.Opening(
    Span(5, 7), b"rows", b"path", (b"before", b"\x00"), b"more", (A, B), b"last", ((b"raw", b"its"),)
)
PUNCH = nat.sign_punch(RUN, ME, OTHER.peer_id, bytes(16), (PLACE,))
SEEDS = invite.Seed(OTHER.public_key, (PLACE,)), invite.Seed(b"", ("/dnsaddr/example.org",))
OWN_SEED = (invite.Seed(ME.public_key, (PLACE, "/ip4/203.0.113.7/udp/4001/quic-v1")),)
INVITED = invite.make_invite(ME, RUN, SEEDS, UNIX_S, TOKEN, b"r")
MEMBER = worker.Member(A, ME.peer_id, 64, B, "/home/payload", b"\x03")
REDUCE = worker.ReduceRequest(ROUND, Span(0, 4), (MEMBER,), (A,), 7)
SLICE = worker.Slice(Span(0, 4), (MEMBER,), (MEMBER,), True)
PENDING = worker.Pending(ROUND, A, B, "/home/payload", 15, 122880, 64, 2.5, b"\x03", A)


def _feed() -> Iterator[tuple[str, Case]]:
    for body in BODIES:
        entry = records.sign_entry(RUN, ME, 7, A, body)
        yield f"entry: {type(body).__name__}", Case(entry, records.Entry)
    admit = records.Admit(TOKEN.permit, admission.prove(RUN, TOKEN, OTHER.peer_id))
    yield "entry: Admit", Case(records.sign_entry(RUN, OTHER, 0, b"", admit), records.Entry)
    yield "entry: Solved", Case(records.sign_entry(RUN, OTHER, 0, b"", records.Solved(1 << 40)), records.Entry)
    exchange = Exchange({ME.peer_id: 8}, True, (OTHER.peer_id,), (b"e",), ((b"f", b"g"),), "no")
    yield "Exchange", Case(exchange, Exchange)
    yield "FloorsQuery", Case(FloorsQuery(), FloorsQuery)
    yield "FeedFloors", Case(FeedFloors({ME.peer_id: 8}, (b"e",)), FeedFloors)
    yield "WantedEntries", Case(WantedEntries(ROUND, (A,), (A, B)), WantedEntries)
    yield "FoundEntries", Case(FoundEntries((b"e", b"f")), FoundEntries)
    yield "gossip: Ids", Case(Ids(have=bytes(range(16)), want=bytes(range(8)), prune=b""), Ids)
    tally, who = (8, 9, ((ME.peer_id, 7),)), (ME.peer_id, OTHER.peer_id)
    parts = (9, who, tally, ((A, 4, who, (ME.peer_id,), tally),), ((9, who, who),), ((OTHER.peer_id, 3),), who)
    yield "Summary", Case(codec.decode(codec.encode((1, *parts)), summary.Summary), summary.Summary, True)
    full = full_summary.FullSummary(
        summary.VERSION,
        codec.decode(codec.encode((1, *parts)), summary.Summary),
        (full_summary.Floor(ME.peer_id, A, (B,)),),
        reducers.ReducerHistory(
            (reducers.Missed(OTHER.peer_id, 2, 17),), (reducers.Decided(12, who, (OTHER.peer_id,)),)
        ),
    )
    said = ((0,), ((1, 8),), ((7, 1, 0, -3),), ((8, 1, 0, A),))
    audited = codec.decode(codec.encode((2, *parts, (said,))), summary.AuditedSummary)
    yield "AuditedSummary", Case(audited, summary.AuditedSummary, True)
    values = msgspec.structs.asdict(full) | {"version": summary.AUDITED_VERSION, "summary": audited}
    full_2 = full_summary.AuditedFullSummary(**values)
    yield "AuditedFullSummary", Case(full_2, full_summary.AuditedFullSummary, True)
    link = Link(b"p", (b"v", b"w"))
    yield "StoredLink", Case(StoredLink(link, A, b"summary"), StoredLink, True)
    yield "LinkQuery", Case(summaries.LinkQuery(2), summaries.LinkQuery)
    yield "LinkAnswer", Case(summaries.LinkAnswer((link,)), summaries.LinkAnswer)
    yield "PartQuery", Case(summaries.PartQuery(A, 3), summaries.PartQuery)
    yield "PartAnswer", Case(summaries.PartAnswer(b"part"), summaries.PartAnswer)
    yield "RecordsQuery", Case(summaries.RecordsQuery((A, B)), summaries.RecordsQuery)
    yield "RecordsAnswer", Case(summaries.RecordsAnswer((b"e", b"f")), summaries.RecordsAnswer)
    yield "FullSummary", Case(full, full_summary.FullSummary, True)
    proof = certificate.FinalProof(certificate.VERSION, ((b"e", b"f"),), ((b"g",),))
    index = ShardIndex(vocab=300, shard_tokens=4096, shards=A + B, held_out=B, held_out_tokens=2048)
    yield "ShardIndex", Case(index, ShardIndex)
    yield "FinalProof", Case(proof, certificate.FinalProof)


def _registers() -> Iterator[tuple[str, Case]]:
    for value in VALUES:
        signed = registers.sign_register(RUN, ME, 3, 9, 45.0, value)
        yield f"register: {type(value).__name__}", Case(signed, registers.Register)
    yield "KnownVersions", Case(KnownVersions(((ME.peer_id, "lease", 3, 9),)), KnownVersions)
    yield "RegisterBatch", Case(RegisterBatch(((1.5, b"register"),)), RegisterBatch)


def _runs() -> Iterator[tuple[str, Case]]:
    for name, spec in {
        "plain": _run(),
        "dense": DENSE,
        "mixture": MIXTURE,
        "audited": AUDITED,
        "guarded": GUARDED,
        "certifying": CERTIFYING,
        "with a term": WITH_TERM,
        "private": PRIVATE,
        "plugged": PLUGGED,
        "gossiping": GOSSIPING,
        "puzzled": PUZZLED,
        "muon": MUON,
        "decaying": DECAYING,
        "slow momentum, isotropic, arrival as a group": SLOW,
        "steps without gradients": SCALARS,
        "lora": LORA,
        "econtrol": ECONTROL,
        "stale": STALE,
        "dgc": DGC,
        "a k for each tensor": SIZED,
    }.items():
        spec.check()
        yield f"RunSpec: {name}", Case(spec, RunSpec)
    yield "SignedRun", Case(codec.decode(sign_run(_run(), ME), SignedRun), SignedRun)
    yield "Invite", Case(invite.read_invite(INVITED), invite.Invite)


def _nat() -> Iterator[tuple[str, Case]]:
    asks = nat.Look(RUN), nat.DialBack(RUN, (PLACE,)), PUNCH, nat.Summons(PUNCH, (PLACE,))
    answers = (
        nat.Seen((PLACE,), "public", True, 1.5), nat.Reached((PLACE,)), nat.Coming((PLACE,), (PLACE,)),
        nat.NatRefused("no"),
    )  # fmt: skip
    yield from ((type(ask).__name__, Case(ask, nat.Ask)) for ask in asks)
    yield from ((type(answer).__name__, Case(answer, nat.Answer)) for answer in answers)
    for message in (nat.Circuit(RUN, OTHER.peer_id), nat.Incoming(RUN, OTHER.peer_id), nat.OpenCircuit()):
        yield type(message).__name__, Case(message, type(message))


def _blobs() -> Iterator[tuple[str, Case]]:
    manifest = blobs.manifest_of_bytes(b"x" * blobs.BLOB_CHUNK_BYTES + b"tail")
    yield "BlobManifest", Case(manifest, blobs.BlobManifest)
    yield "blob: Ask", Case(blob_frames.Ask(A, 1), blob_frames.Ask)
    for wish in (blob_frames.Want(300), blob_frames.Cancel(7)):
        yield f"blob: {type(wish).__name__}", Case(wish, blob_frames.Wish)
    for answer in (blob_frames.BlobOffer(b"manifest", b"\x05"), blob_frames.BlobRefusal("busy")):
        yield f"blob: {type(answer).__name__}", Case(answer, blob_frames.Answer)
    for piece in (blob_frames.Have(b"\xff\x01"), blob_frames.Chunk(70000)):
        yield f"blob: {type(piece).__name__}", Case(piece, blob_frames.Piece)


def _reduction() -> Iterator[tuple[str, Case]]:
    for ask in (reduction.RowsAsk(A, Span(256, 272)), reduction.OpeningAsk(B, 300)):
        yield type(ask).__name__, Case(ask, reduction.Ask)
    yield "RowsAnswer", Case(reduction.RowsAnswer(b"rows", b"path"), reduction.RowsAnswer)
    yield "Opening", Case(OPENING, reduction.Opening)
    proof = reduction.FaultProof(reduction.PROOF_VERSION, b"entry", b"before", (b"work",), OPENING)
    yield "FaultProof", Case(proof, reduction.FaultProof)
    yield "PullQuestion", Case(PullQuestion(300, 7), PullQuestion)


def _others() -> Iterator[tuple[str, Case]]:
    yield "Hello", Case(call_frames.hello(RUN, ME.peer_id, "atoll/1.2"), call_frames.Hello)
    yield "Failure", Case(call_frames.Failure(error="PeerFault", message="too large"), call_frames.Failure)
    for name, key in {"members": dht_records.run_key(RUN), "runs": dht_records.RUNS_KEY}.items():
        record = codec.decode(dht_records.sign_record(ME, key, b"value", UNIX_S), dht_records.DhtRecord)
        yield f"DhtRecord: {name}", Case(record, dht_records.DhtRecord)
    yield "dht: Listing", Case(dht_records.Listing(b"run file", UNIX_S), dht_records.Listing)
    for ask in (dht_records.FindRecords(A, (PLACE,)), dht_records.StoreRecord(b"record")):
        yield f"dht: {type(ask).__name__}", Case(ask, dht_records.DhtRequest)
    found = dht_records.Found((b"record",), (dht_records.Contact(ME.peer_id, (PLACE,)),))
    yield "dht: Found", Case(found, dht_records.Found)


WORKER_ASKS: tuple[worker.Ask, ...] = (
    worker.StartRequest(
        b"spec",
        ME.peer_id,
        "/home",
        "/data",
        2,
        "cpu",
        "int8",
        True,
        "/tokenizer",
        ("/moments",),
        True,
        "host",
        4,
        True,
        quantized=True,
        average_rounds=4,
        base="/base",
        gpu_memory=60,
    ),
    worker.TrainRequest(ROUND, 1, 4, 15, 7, b"\x03", (Round(6),), 3, 2, 12.5, 4, 1),
    worker.SaveRequest(ROUND),
    worker.VerifyRequest("/payload", ROUND, b"\x03", A, (Span(0, 4),)),
    REDUCE,
    worker.OpenRequest(ROUND, 5, (worker.Published(REDUCE, "/reduced", A, B),)),
    worker.JudgeRequest("/proof", A),
    worker.FoldRequest(ROUND, (MEMBER,)),
    worker.CheckRequest(ROUND, (), (SLICE,), (worker.ExcisedRound(Round(7), (MEMBER,), (A,)),)),
    worker.FinalizeRequest(ROUND, (MEMBER,), (SLICE,), (worker.ExcisedRound(Round(7), (MEMBER,), (A,)),)),
    worker.AdoptRequest(ROUND, "/snapshot", A, (worker.Counted(B, (Span(0, 4),), ROUND),)),
    worker.SnapshotRequest("/snapshot"),
    worker.InheritRequest(3, "/moments"),
    worker.EvaluateRequest(),
    worker.AuditRequest(ROUND, 15360, 7, MEMBER, (MEMBER,), (MEMBER, MEMBER), ROUND, False),
    DifferenceRequest(ROUND, "/difference"),
    MixRequest(ROUND, "/difference"),
    worker.ReportRequest(),
    worker.StopRequest(),
)
WORKER_ANSWERS: tuple[worker.Answer | worker.TrainProgress | worker.StartProgress, ...] = (
    worker.StartProgress("building the model"),
    worker.StartReply(-1, A, (PENDING,), 1000, "cpu", b"\x03", 7, 12),
    worker.TrainProgress(ROUND, 3, 15, 2.5, 1234.5, 2),
    worker.TrainReply(PENDING, 3000, 1.5, 2, 0.25, (worker.ReleasedMoments(3, "/moments"),), 12, 5),
    worker.SaveReply(),
    worker.VerifyReply(),
    worker.ReduceReply(ROUND, A, "/payload", B, A, 7),
    worker.OpenReply(b"opening"),
    worker.JudgeReply(True),
    worker.FoldReply(ROUND, A),
    worker.CheckReply(ROUND, A),
    worker.FinalizeReply(ROUND, A),
    worker.AdoptReply(ROUND, A),
    worker.SnapshotReply(ROUND, A, "/snapshot", 4000),
    worker.EvaluateReply(A, 1.75, 2.5, 0.5),
    worker.AuditReply(40, 0.5, 6, True),
    worker.InheritReply(True),
    DifferenceReply(True),
    MixReply(True),
    worker.ReportReply(),
    worker.StopReply(),
    worker.FailureReply("DiskFault", "the disk is full", "make room"),
)
RANK_ASKS: tuple[ranks.RankAsk, ...] = (
    ranks.Begin(b"spec", 1, 2, "cuda:1", 4, "int8", True, False, "/home/meeting", 4, True, 60),
    ranks.Build(b"\x03"),
    ranks.Weights(),
    ranks.Moments(("model.norm.weight",)),
    ranks.StepRequest(40, 8),
    ranks.Agree(),
    ranks.GatherWeights(),
    ranks.GatherMoments(("model.norm.weight",)),
    ranks.LossRequest(16),
    ranks.Save("/home/parts", ("model.norm.weight",)),
)


def _local() -> Iterator[tuple[str, Case]]:
    for ask in WORKER_ASKS:
        yield f"worker: {type(ask).__name__}", Case(worker.RequestEnvelope(5, ask), worker.RequestEnvelope, True)
    spent = worker.TimeSpent(*range(1, 11))
    for answer in WORKER_ANSWERS:
        envelope = worker.ReplyEnvelope(5, answer, spent)
        yield f"worker: {type(answer).__name__}", Case(envelope, worker.ReplyEnvelope, True)
    for each in RANK_ASKS:
        yield f"rank: {type(each).__name__}", Case(each, ranks.RankAsk, True)
    for said in (ranks.RankReady(), ranks.RankRefused("no device", "use cpu")):
        yield f"rank: {type(said).__name__}", Case(said, ranks.RankAnswer, True)


def _disk() -> Iterator[tuple[str, Case]]:
    row = manifests.TensorRow("theta", "int32", (2, 4096))
    rare = manifests.TensorRow("exp_avg", "float32", (2, 4096))
    array = manifests.ArrayRow("final", "I32", (2, 4096), b"before", B)
    manifest = manifests.GenerationManifest(manifests.FORMAT, (row,), A, b"body", (array,), (rare,), B)
    yield "GenerationManifest", Case(manifest, manifests.GenerationManifest, True)
    second = manifests.SecondManifest(2, (row,), A, b"body", (array,))
    yield "SecondManifest", Case(second, manifests.SecondManifest, True)
    first = manifests.FirstManifest(1, (row,), A, b"body")
    yield "FirstManifest", Case(first, manifests.FirstManifest, True)
    kept, past = (local.KeptBody(7, B, Span(0, 4)),), (local.PastPayload(PENDING, (Span(0, 4),)),)
    body = local.LocalBody(RUN, 7, A, 120, (PENDING,), 8, b"\x03", kept, past, 9, 5, (A, B), ME.peer_id)
    yield "LocalBody", Case(body, local.LocalBody, True)
    first = local.FirstBody(RUN, 7, A, 120, (PENDING,), 8, b"\x03", kept, past, 9, 5, (A, B))
    yield "FirstBody", Case(first, local.FirstBody, True)
    yield "Month", Case(Month("2026-11-01", 5, 6), Month, True)
    yield "SeenLeases", Case(SeenLeases(2, (b"register",), 1.5), SeenLeases, True)


CASES: dict[str, Case] = {
    name: case
    for group in (_feed, _registers, _runs, _nat, _blobs, _reduction, _others, _local, _disk)
    for name, case in group()
}


SHARD = universal.signed(
    universal.Shard(
        version=universal.VERSION, run=RUN.hex(), round=8, state=A.hex(), peer=ME.peer_id,
        steps={"shared": 40, "1": 3}, left=(2,), bytes=1000, blake3=B.hex(), signature="",
    ),
    ME,
)  # fmt: skip
CHECKPOINT = universal.CheckpointManifest(
    version=universal.VERSION, run=RUN.hex(), round=8, state=A.hex(), shards=(SHARD,),
    holders={"shared": ME.peer_id}, votes=B.hex(), members=(ME.peer_id,), quorum=True,
)  # fmt: skip
JSON = (SHARD, CHECKPOINT)
"""Records that are JSON: the descriptions in a universal checkpoint."""
PEERS = tuple(Identity(bytes([number]) * 32).peer_id for number in range(1, 6))


def names() -> dict[str, list[str]]:
    """The protocol ids of each wire that is a stream, every version that this node speaks, oldest first."""
    found = {
        wire.name: [wire.protocol(version) for version in range(wire.oldest, wire.newest + 1)]
        for wire in vars(wires).values()
        if isinstance(wire, wires.Wire)
    }
    return found | {"hold": [held_circuits.HOLD_PROTOCOL]}


def control_tags() -> dict[str, str]:
    """Tags of the control socket's messages, whose fields may be added to at any time (docs/control.md)."""
    kinds = (kind for kind in vars(control_messages).values() if isinstance(kind, type))
    structs = (kind for kind in kinds if issubclass(kind, msgspec.Struct))
    return {kind.__name__: str(kind.__struct_config__.tag) for kind in structs if kind.__struct_config__.tag}


def golden() -> dict[str, Any]:
    """The content of `wires.json`."""
    raw = {
        "frame": framed(b"body"),
        "hold: beat": held_circuits._BEAT,
        "request": call_frames.request(7, "ping", b"\1"),
        "reply": call_frames.reply(7, b"\1"),
        "failure": call_frames.failure(7, "PeerFault", "too large"),
        "notice": call_frames.notice("gossip.entry", b"\1"),
        "pushed blob": call_frames.notice("blob.push", codec.encode(b"payload")),
        "cancel": call_frames.cancel(7),
        **{f"{type(each).__name__}, JSON": universal.to_json(each) for each in JSON},
    }
    plan = plan_of(RUN, frozenset(PEERS), frozenset(), 64, ReduceSpec(above=1))
    return {
        "protocol ids": names(),
        "tags on the control socket": control_tags(),
        "messages": {name: codec.encode(case.value).hex() for name, case in CASES.items()},
        "other bytes": {name: data.hex() for name, data in raw.items()},
        "invite": INVITED,
        "short invite": invite.shorten(invite.make_invite(ME, RUN, OWN_SEED, UNIX_S, TOKEN, b"r")),
        "voters": ballots.voter_order(RUN, ROUND, PEERS),
        "reducers": plan.reducers,
    }
