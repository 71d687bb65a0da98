"""RunSpec: signed, canonical, and every number within its bounds."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, PeerFault, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import peer_id_of
from atoll.protocols.ledger.records import MAX_VERDICTS
from atoll.protocols.run.admission import AdmissionSpec
from atoll.protocols.run.model_spec import ExpertsSpec, RopeStretch
from atoll.protocols.run.run_spec import (
    SAME_KEYS_VERSION,
    SPEC_VERSION,
    RunSpec,
    SignedRun,
    Stage,
    open_run,
    sign_run,
)
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.history import HistorySpec
from atoll.protocols.run.sections.merging import MergeSpec
from atoll.protocols.run.sections.serving import SamplingSpec, ServingSpec, TokensSpec
from atoll.protocols.run.slices import ReduceSpec

OWNER_ID = Identity(bytes(range(32))).peer_id
CROWD = tuple(sorted(peer_id_of(bytes([a, b] * 16)) for a in range(27) for b in range(19)))
ILLEGAL = [
    ("name", ""), ("name", "x" * 65), ("name", "a\nb"), ("name", "\x1b[31m"), ("name", "\ud800"),
    ("seed", -1), ("seed", 2**63), ("seed", 10**400),
    ("data.source", ""), ("data.source", "x" * 1025), ("data.source", "file:\x1b[2J"), ("data.source", "\ud800"),
    ("data.tokenizer", "words"), ("data.digest", b"1"), ("data.digest", bytes(33)),
    ("model.dim", 0), ("model.dim", -40), ("model.dim", 41), ("model.heads", 3), ("model.kv_heads", 3),
    ("model.layers", 1025), ("model.vocab", 1 << 23), ("model.ffn", 10**400),
    ("model.rope_theta", math.nan), ("model.rope_theta", math.inf), ("model.rope_theta", 1.0),
    ("model.norm_eps", math.nan), ("model.norm_eps", 0.0), ("model.norm_eps", -1.0), ("model.norm_eps", 1.0),
    ("inner.lr", math.nan), ("inner.lr", math.inf), ("inner.lr", -1e-3), ("inner.lr", 0.0),
    ("inner.beta1", 1.0), ("inner.beta2", math.nan), ("inner.eps", 0.0), ("inner.clip", -math.inf),
    ("inner.expert_lr", 0.0), ("inner.expert_lr", math.nan), ("inner.expert_lr", 65.0), ("inner.expert_lr", 2.0),
    ("inner.optimizer", "sgd"), ("inner.muon_lr", 0.0), ("inner.muon_momentum", 1.0), ("inner.muon_lr", 2.0),
    ("inner.batch", 0), ("inner.total_steps", 10**400), ("inner.warmup_steps", -1),
    ("outer.rounds", 0), ("outer.rounds", 1 << 25), ("outer.alpha_256", 0), ("outer.alpha_256", 1025),
    ("outer.floor_256", -1), ("outer.floor_256", 257), ("outer.stages", ()),
    ("outer.stages", (Stage(1, 5),)), ("outer.stages", (Stage(0, 5), Stage(0, 6))),
    ("outer.stages", (Stage(0, 0),)), ("outer.stages", (Stage(0, 5), Stage(9, 1), Stage(3, 1))),
    ("outer.stages", tuple(Stage(at, 1) for at in range(65))),
    ("outer.overlap_most", 0), ("outer.overlap_most", -1), ("outer.overlap_most", (1 << 16) + 1),
    ("outer.holders", -1), ("outer.holders", 1), ("outer.holders", 1025),
    ("compress.codec", "dense"), ("compress.k", 0), ("compress.k", 4097),
    ("compress.feedback", math.nan), ("compress.feedback", 1.5), ("compress.feedback", -0.1),
    ("pace.quorum_256", 0), ("pace.quorum_256", 257), ("pace.grace_256", -1), ("pace.lease_s", math.inf),
    ("pace.min_members", 0), ("pace.min_members", 1025),
    ("reduce", ReduceSpec(gap=1)), ("reduce", ReduceSpec(above=0)), ("reduce", ReduceSpec(k=4097)),
    ("reduce", ReduceSpec(sample_256=-1)),
    ("serving", ServingSpec(eos=(1 << 22,))), ("serving", ServingSpec(chat_template="\ud800")),
    ("serving", ServingSpec(chat_template="x" * 16385)), ("serving", ServingSpec(tokens=TokensSpec(unk=-1))),
    ("serving", ServingSpec(sampling=SamplingSpec(top_p=math.nan))),
    ("model.rope_stretch", RopeStretch(factor=math.nan, low=1.0, high=4.0, original=64)),
    ("admission.members", (OWNER_ID,)), ("admission", AdmissionSpec(mode="invite", members=(OWNER_ID, OWNER_ID))),
    ("admission", AdmissionSpec(mode="allowlist", members=("b" * 52,))),
    ("admission", AdmissionSpec(mode="allowlist", members=CROWD)),
    ("admission", AdmissionSpec(mode="closed")),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ILLEGAL)
def test_illegal_values_are_config_errors_here_and_decode_errors_from_outside(changed, owner, key, value):
    bad = changed(key, value)
    with pytest.raises(ConfigError):
        sign_run(bad, owner)
    try:
        body = codec.encode(bad)
    except (UnicodeEncodeError, OverflowError):
        return  # it cannot even be written
    with pytest.raises(DecodeError):
        open_run(codec.encode(SignedRun(body, owner.sign("run/1", body))))


def test_round_trip_and_golden_id(spec, owner):
    data = sign_run(spec, owner)
    assert open_run(data) == spec
    assert open_run(data).id == spec.id
    assert spec.id.hex() == "6fe9d0b73e59fae056623e09a6e61946cbabaef9ca00f3fb5f72ce33f297f59c"


@pytest.mark.parametrize(("key", "value"), [("compress.codec", "sparse1"), ("outer.fragments", 2)])
def test_rounds_are_reduced_with_one_codec_and_whole_payloads_only(changed, key, value):
    changed(key, value).check()
    bad = msgspec.structs.replace(changed(key, value), reduce=ReduceSpec())
    with pytest.raises(ConfigError, match="reduce needs"):
        bad.check()


def test_a_run_that_shares_experts_does_not_reduce_rounds(changed, spec):
    model = msgspec.structs.replace(spec.model, experts=ExpertsSpec(count=8, per_token=2, ffn=50))
    mixture = msgspec.structs.replace(changed("outer.holders", 1), model=model)
    mixture.check()
    with pytest.raises(ConfigError, match="cannot go together"):
        msgspec.structs.replace(mixture, reduce=ReduceSpec()).check()


def test_slices_of_a_dense_model_have_holders_and_a_rate(changed, spec):
    dense = msgspec.structs.replace(spec.model, ffn=256, ffn_slices=4)
    shared = msgspec.structs.replace(changed("outer.holders", 2), model=dense)
    shared.check()
    msgspec.structs.replace(shared, inner=msgspec.structs.replace(shared.inner, expert_lr=2.0)).check()
    with pytest.raises(ConfigError, match="cannot go together"):
        msgspec.structs.replace(shared, reduce=ReduceSpec()).check()
    merged = msgspec.structs.replace(shared.outer, merge=MergeSpec(every=1, until=1, alpha_4096=1))
    with pytest.raises(ConfigError, match=r"outer\.merge is for runs whose model has experts"):
        msgspec.structs.replace(shared, outer=merged).check()


def test_a_run_without_slices_has_the_bytes_that_it_had_before_there_were_any(spec):
    assert b"ffn_slices" not in codec.encode(spec)


def test_only_the_owner_signs(spec):
    with pytest.raises(ConfigError):
        sign_run(spec, Identity(bytes(32)))


def test_anothers_signature_is_refused(spec):
    body = codec.encode(spec)
    with pytest.raises(SignatureFault):
        open_run(codec.encode(SignedRun(body, Identity(bytes(32)).sign("run/1", body))))
    with pytest.raises(DecodeError):
        open_run(codec.encode(SignedRun(body, b"")))


def test_an_owner_that_is_no_peer_is_refused(changed, owner):
    body = codec.encode(changed("owner", "me"))
    with pytest.raises(DecodeError):
        open_run(codec.encode(SignedRun(body, owner.sign("run/1", body))))


def test_a_rule_judges_whole_contributions_and_needs_a_floor(changed):
    judged = changed("outer.aggregate", "nnm")
    judged.check()
    with pytest.raises(ConfigError, match="cannot go together") as caught:
        msgspec.structs.replace(judged, reduce=ReduceSpec()).check()
    assert "set reduce to null" in caught.value.hint
    with pytest.raises(ConfigError, match=r"needs outer\.floor_256"):
        msgspec.structs.replace(judged, outer=msgspec.structs.replace(judged.outer, floor_256=0)).check()


def test_votes_by_weight_are_for_rules_that_have_medians(changed, owner):
    def made(rule):
        judged = changed("outer.aggregate", rule)
        return msgspec.structs.replace(judged, outer=msgspec.structs.replace(judged.outer, by_weight=True))

    assert open_run(sign_run(made("nnm"), owner)).outer.by_weight
    assert b"by_weight" not in codec.encode(changed("outer.aggregate", "nnm"))
    for rule in ("edit", msgspec.UNSET):
        with pytest.raises(ConfigError, match=r"outer\.by_weight is for runs with"):
            made(rule).check()


def test_audits_are_of_whole_contributions_with_their_own_weights(changed, spec):
    audited = msgspec.structs.replace(spec, audit=AuditSpec())
    with pytest.raises(ConfigError, match="cannot go together") as caught:
        msgspec.structs.replace(audited, reduce=ReduceSpec()).check()
    assert "set reduce to null" in caught.value.hint
    with pytest.raises(ConfigError, match="audit needs contributions to the whole model"):
        msgspec.structs.replace(audited, outer=changed("outer.fragments", 2).outer).check()
    model = msgspec.structs.replace(spec.model, experts=ExpertsSpec(count=8, per_token=2, ffn=50))
    shared = msgspec.structs.replace(audited, outer=changed("outer.holders", 1).outer, model=model)
    with pytest.raises(ConfigError, match="audit needs contributions to the whole model"):
        shared.check()


def test_a_share_of_the_weight_on_probation_needs_probation_and_whole_payloads(spec, owner):
    pace = msgspec.structs.replace(spec.pace, probation=8, probation_256=64)
    run = msgspec.structs.replace(spec, pace=pace)
    assert open_run(sign_run(run, owner)).pace.probation_256 == 64
    for more, said in (
        ({"reduce": ReduceSpec()}, "cannot go together"),
        ({"pace": msgspec.structs.replace(pace, probation=1)}, "needs pace.probation"),
        ({"pace": msgspec.structs.replace(pace, probation=msgspec.UNSET)}, "needs pace.probation"),
    ):
        body = codec.encode(msgspec.structs.replace(run, **more))
        with pytest.raises(DecodeError, match=said):
            open_run(codec.encode(SignedRun(body, owner.sign("run/1", body))))


@pytest.mark.parametrize("key", ["outer.liars_256", "outer.most_256"])
def test_what_a_rule_is_told_needs_a_rule(changed, key):
    with pytest.raises(ConfigError, match=r"for runs with outer\.aggregate"):
        changed(key, 64).check()


OLDER = "`atoll checkpoint save` with the version that made it, then `run new --from-checkpoint` with this"


@pytest.mark.parametrize(
    ("version", "hint"),
    [
        (1, OLDER),
        (SPEC_VERSION - 1, OLDER),
        (SPEC_VERSION + 1, "update atoll on this node"),
    ],
)
def test_a_run_of_other_rules_is_refused_by_its_version_and_not_by_its_keys(owner, version, hint):
    body = codec.encode({"version": version, "name": "other", "what": 1})
    with pytest.raises(DecodeError, match=f"version {version}; this node speaks {SPEC_VERSION}$") as caught:
        open_run(codec.encode(SignedRun(body, owner.sign("run/1", body))))
    assert caught.value.hint == hint


def test_the_run_of_a_checkpoint_may_have_an_older_version_with_the_same_keys(changed, owner):
    def signed(run: RunSpec) -> bytes:
        body = codec.encode(run)
        return codec.encode(SignedRun(body, owner.sign("run/1", body)))

    old = changed("version", SAME_KEYS_VERSION)
    assert open_run(signed(old), oldest=SAME_KEYS_VERSION).id == old.id, "votes are for that id"
    for bad in (changed("version", SAME_KEYS_VERSION - 1), changed("version", SPEC_VERSION + 1)):
        with pytest.raises(DecodeError, match="this node speaks"):
            open_run(signed(bad), oldest=SAME_KEYS_VERSION)
    with pytest.raises(DecodeError, match=r"inner\.lr"):
        open_run(
            signed(msgspec.structs.replace(old, inner=changed("inner.lr", -1.0).inner)), oldest=SAME_KEYS_VERSION
        )


@pytest.mark.parametrize("version", [SPEC_VERSION - 1, SPEC_VERSION + 1])
def test_no_run_of_other_rules_is_made(changed, version):
    with pytest.raises(ConfigError, match=f"version {version}; this node speaks {SPEC_VERSION}$"):
        changed("version", version).check()


def test_an_author_audits_one_contribution_a_round_and_at_most_as_many_as_an_entry_has_verdicts():
    assert AuditSpec().per_round == 1
    assert msgspec.json.schema(AuditSpec)["$defs"]["AuditSpec"]["properties"]["each"]["maximum"] == MAX_VERDICTS


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_raise_peer_faults_only(spec, owner, data):
    raw = bytearray(sign_run(spec, owner))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([len(raw), len(raw) - 1, len(raw) // 2]))
    try:
        assert open_run(bytes(raw[:cut])) == spec  # two flips may cancel
    except PeerFault:
        return


def test_the_bounds_of_the_overlap_are_equal_unless_the_run_says_more(changed, owner):
    assert changed("outer.overlap_steps", 3).outer.overlap_bounds == (3, 3)
    more = changed("outer.overlap_most", 5)
    assert msgspec.structs.replace(more.outer, overlap_steps=2).overlap_bounds == (2, 5)
    assert msgspec.structs.replace(more.outer, overlap_steps=0).overlap_bounds == (0, 0), "nothing overlaps"
    assert open_run(sign_run(more, owner)) == more
    with pytest.raises(ConfigError, match="overlap_most"):
        msgspec.structs.replace(more, outer=msgspec.structs.replace(more.outer, overlap_steps=6)).check()


def test_steps_follow_the_stages(spec):
    assert [spec.steps(number) for number in (0, 9, 10, 99)] == [5, 5, 15, 15]
    assert spec.steps_before(0) == 0
    for number in range(40):
        assert spec.steps_before(number) == sum(spec.steps(before) for before in range(number))


def test_without_probation_members_decide_at_once(changed):
    plain = changed("name", "plain")
    assert plain.probation == 1
    long = msgspec.structs.replace(plain, pace=msgspec.structs.replace(plain.pace, probation=8))
    long.check()
    assert long.probation == 8


def test_a_puzzle_is_for_open_runs(spec, owner):
    puzzle = AdmissionSpec(puzzle_bits=20)
    run = msgspec.structs.replace(spec, admission=puzzle)
    assert open_run(sign_run(run, owner)).admission == puzzle
    for more, said in (({"admission": msgspec.structs.replace(puzzle, mode="invite")}, "is for open runs"),):
        body = codec.encode(msgspec.structs.replace(run, **more))
        with pytest.raises(DecodeError, match=said):
            open_run(codec.encode(SignedRun(body, owner.sign("run/1", body))))


def test_work_can_be_taken_out_only_where_a_round_can_be_computed_again_without_it(spec, owner):
    def excising(run):
        return msgspec.structs.replace(run, pace=msgspec.structs.replace(run.pace, excise_rounds=8))

    run = excising(spec)
    assert open_run(sign_run(run, owner)).pace.excise_rounds == 8
    assert spec.pace.excise_rounds is msgspec.UNSET
    assert b"excise_rounds" not in codec.encode(spec)
    pace = msgspec.structs.replace(run.pace, probation=8, probation_256=64)
    outer = msgspec.structs.replace(run.outer, rule="nesterov")
    for more, said in (
        ({"reduce": ReduceSpec()}, "reduce cannot go together: a reducer"),
        ({"audit": AuditSpec()}, "audit cannot go together: the member's verdicts"),
        ({"outer": outer}, "momentum cannot go together: each step"),
        ({"pace": pace}, "probation_256 cannot go together: the member's work"),
    ):
        with pytest.raises(ConfigError, match=said):
            msgspec.structs.replace(run, **more).check()


def test_certified_summaries_are_a_key_that_other_runs_do_not_have(spec, owner):
    run = msgspec.structs.replace(spec, history=HistorySpec(every=64))
    assert open_run(sign_run(run, owner)).history.every == 64
    assert run.id != spec.id
    assert b"history" not in codec.encode(spec)
    assert [run.history.summarized(at) for at in (0, 1, 63, 64, 65, 128)] == [None, None, None, 63, None, 127]
    with pytest.raises(ConfigError, match=r"pace.excise_rounds and history cannot go together"):
        msgspec.structs.replace(run, pace=msgspec.structs.replace(run.pace, excise_rounds=8)).check()
    with pytest.raises(ConfigError, match=r"history\.every"):
        msgspec.structs.replace(run, history=HistorySpec(every=7)).check()
