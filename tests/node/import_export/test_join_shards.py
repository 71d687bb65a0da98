"""A run's state in files: saved by four nodes, joined, gone on with by any number; bad folders are one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atoll.node.checkpoint.local import KeptBody, load_local
from atoll.node.checkpoint.universal import (
    CheckpointManifest,
    Shard,
    check_signature,
    from_json,
    joined,
    signed,
    to_json,
)
from atoll.node.daemon.certificates.certificate import PROOF_MAX_BYTES, VERSION, FinalProof
from atoll.node.import_export.import_run import importing, store_run
from atoll.node.import_export.join_shards import MANIFEST, VOTES, join_shards, open_checkpoint, part_of
from atoll.node.import_export.save_shard import _unsent, save_shard
from atoll.node.import_export.source_options import CheckpointSource
from atoll.node.learning.compress.codecs import OnHost, codec_of
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.initial_moments import InitialMoments
from atoll.node.worker.learner import Learner
from atoll.node.worker.session import Session
from atoll.p2p.ledger.history import Cut
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, ConfigError, DecodeError, SignatureFault
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.coverage import cover_of, size_of, slabs
from atoll.protocols.local.worker_messages import AdoptRequest, EvaluateRequest, StartRequest, TrainRequest
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.experts import bitmap_of, experts_in
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, expert_of
from atoll.protocols.run.moments import file_of_expert, files_for
from atoll.protocols.run.payload import VALUE_BITS
from atoll.protocols.run.run_spec import Stage, sign_run
from atoll_bench.experts.experts_members import Members, identity_of
from atoll_bench.experts.resumed import differing
from tests.node.worker.session_home import SPEC
from tests.plain.arena import scatter

torch.set_num_threads(1)
E = 8
MODEL = ModelSpec(
    dim=64, layers=2, heads=2, kv_heads=1, ffn=128, vocab=256, context=16, tied=True, rope_theta=1e4,
    norm_eps=1e-5, experts=ExpertsSpec(count=E, per_token=2, ffn=64, bias_rate=0.01),
)  # fmt: skip
OUTER = replace(SPEC.outer, stages=(Stage(0, 2), Stage(3, 4)), holders=1, rounds=10)
RUN = replace(SPEC, owner=identity_of(0).peer_id, model=MODEL, outer=OUTER)
SIGNED = sign_run(RUN, identity_of(0))


def trained(folder, spec=RUN, count=4, rounds=2, *, quantized=False):
    """Members after some final rounds."""
    folder.mkdir()
    members = Members(folder, spec, count, quantized=quantized)
    for at in range(rounds):
        sent = [members.contribute(number, at, share) for number, share in enumerate(members.shares)]
        assert len(members.finalize(at, sent)) == 1
    return members


def saved(members, to, run=SIGNED):
    for number in range(members.count):
        save_shard(run, members.home(number), identity_of(number), to)
    return to


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("four") / "homes")


@pytest.fixture(scope="module")
def shards(four, tmp_path_factory):
    return saved(four, tmp_path_factory.mktemp("shards") / "all")


@pytest.fixture
def folder(shards, tmp_path):
    """A copy, to be spoilt."""
    return shutil.copytree(shards, tmp_path / "copy")


def words(folder, number):
    return folder / f"{identity_of(number).peer_id}.json"


def tensors(folder, number):
    return folder / f"{identity_of(number).peer_id}.safetensors"


def change(path, **changes):
    """Words changed by somebody who can sign them."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    number = next(n for n in range(10) if words(path.parent, n) == path)
    try:
        path.write_bytes(to_json(signed(from_json(path.read_bytes(), Shard), identity_of(number))))
    except AtollError:
        return  # nobody can


def forge(path, **changes):
    """Words changed by somebody who cannot."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reproved(folder, alter):
    """Other entries in the proof."""
    path = folder / VOTES
    rounds = codec.decode(path.read_bytes(), FinalProof, max_bytes=PROOF_MAX_BYTES).rounds
    path.write_bytes(codec.encode(FinalProof(VERSION, alter(rounds), ())))


def by_a_stranger(folder):
    """A shard of somebody who signs well, and whom no final set names."""
    mine = from_json(words(folder, 1).read_bytes(), Shard)
    forged = signed(replace(mine, peer=identity_of(8).peer_id), identity_of(8))
    words(folder, 8).write_bytes(to_json(forged))


def without_shared(path):
    return {part: count for part, count in json.loads(path.read_text())["steps"].items() if part != "shared"}


def begun(folder, home):
    """The run that goes on, with its files in a home."""
    home.mkdir()
    with importing(CheckpointSource(folder), home, 1) as found:
        spec = found.applied(replace(SPEC, name="onward", owner=identity_of(9).peer_id, seed=7), 16)
        spec.check()
        found.check(spec)
        store_run(found, home / "run", lambda: None)
    return spec, home / "run"


def paths_of(spec, home):
    """Of the moments files."""
    return tuple(str(home / "blobs" / f"{blob.hex()}.blob") for blob in spec.start.moment_blobs)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_goes_on_with_the_same_bits(folder, tmp_path, count):
    checkpoint = join_shards(folder)
    spec, home = begun(folder, tmp_path / "runs")
    assert spec.start.state.hex() == checkpoint.manifest.state
    members = Members(tmp_path, spec, count)
    assert sum(len(experts_in(share, E)) for share in members.shares) == E
    for share in members.shares:
        assert differing(checkpoint, spec, home, share) == []


def test_they_go_on_at_the_loss_where_the_others_were(four, folder, tmp_path):
    """A worker adopts the weights, evaluates as the old ones did, and trains round 0 from the moments."""
    join_shards(folder)
    spec, home = begun(folder, tmp_path / "runs")
    blobs = home / "blobs"
    moments = paths_of(spec, home)
    session = Session(
        StartRequest(codec.encode(spec), identity_of(9).peer_id, str(home), "", 1, "cpu", moments=moments)
    )
    weights = str(blobs / f"{spec.start.weights.hex()}.blob")
    adopted = session.answer(AdoptRequest(Round(-1), weights, Digest(spec.start.state), ()))
    assert adopted.state == spec.start.state
    with four.session(0) as old:
        assert session.answer(EvaluateRequest()).val_loss == old.answer(EvaluateRequest()).val_loss
    *_, done = session.train(TrainRequest(Round(0), 0, 1, 2, -1, bitmap_of({1, 2}, E)))
    session.close()
    saved_state = load_local(home / "state", spec.id)
    steps = {float(value) for name, value in saved_state.tensors.items() if name.startswith("step/")}
    assert steps == {4.0 + done.pending.steps}


def test_an_expert_that_comes_while_round_0_is_asked_again_has_its_moments(folder, tmp_path):
    join_shards(folder)
    spec, home = begun(folder, tmp_path / "runs")
    learner, sending = Learner(spec, "cpu"), ErrorFeedback(spec, home / "spool", OnHost())
    brought = InitialMoments(spec, paths_of(spec, home))
    learner.set_trained_experts(bitmap_of({1, 2}, E))
    brought.load_into(learner, sending)
    before = {name: value.clone() for name, value in learner.inner.state().items()}
    learner.set_trained_experts(bitmap_of({2, 5}, E))
    brought.load_into(learner, sending)
    after = learner.inner.state()
    assert all(float(value) == 4 for name, value in after.items() if name.startswith("step/"))
    for name, value in after.items():
        if expert_of(name) == 5:
            assert name.startswith("step/") or value.any(), "what comes later in round 0 has its moments too"
        else:
            assert torch.equal(value, before[name])


def test_moments_are_those_of_the_holder_and_errors_a_mean(four, folder):
    checkpoint = join_shards(folder)
    states = {
        identity_of(n).peer_id: load_local(four.home(n) / "state", RUN.id).tensors for n in range(four.count)
    }
    arena = arena_of(MODEL)
    errors = {peer: scatter(state["residual"], arena) for peer, state in states.items()}
    for place in arena.placements:
        holder = checkpoint.manifest.holders[part_of(place.name)]
        if f"exp_avg/{place.name}" in states[holder]:
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                name = f"{kind}/{place.name}"
                assert torch.equal(checkpoint.merged(name), states[holder][name])
        mean = sum(errors[peer][place.name].double() for peer in sorted(errors))
        mean /= 4 if expert_of(place.name) is None else 1
        assert torch.equal(checkpoint.merged(f"error/{place.name}"), mean.float())
    assert any(error["model.embed_tokens.weight"].any() for error in errors.values())


def test_what_is_on_its_way_is_not_lost(tmp_path):
    """A payload of a round that is not final is in nobody's weights: it returns to what was not said."""
    members = trained(tmp_path / "homes", count=2, rounds=1)
    sent = members.contribute(0, 1, members.shares[0])
    state = load_local(members.home(0) / "state", RUN.id)
    assert [pending.round for pending in state.body.pending] == [1]
    checkpoint = join_shards(saved(members, tmp_path / "shards"))
    unsaid, cover = state.tensors["residual"].clone(), cover_of(RUN, 1, members.shares[0])
    said = torch.zeros((size_of(cover), unsaid.shape[1]))
    codec_of(RUN.compress.codec, RUN.compress.k).give_back(said, Path(sent.member.path).read_bytes())
    for at, span in slabs(cover, 64):
        unsaid[span.start : span.stop] += said[at : at + span.stop - span.start]
    mine = {str(expert) for expert in experts_in(members.shares[0], E)}
    names = [place.name for place in arena_of(MODEL).placements if part_of(place.name) in mine]
    expected = scatter(unsaid, arena_of(MODEL))
    assert len(names) == 2 * 3 * E // 2
    assert all(torch.equal(checkpoint.merged(f"error/{name}"), expected[name]) for name in names)


def test_the_rest_of_the_run_is_what_goes_on(folder, tmp_path):
    join_shards(folder)
    spec, _ = begun(folder, tmp_path / "runs")
    assert (spec.outer.rounds, spec.outer.stages) == (8, (Stage(0, 2), Stage(1, 4)))
    assert spec.inner.first_step == 4
    assert (spec.name, spec.owner, spec.seed) == ("onward", identity_of(9).peer_id, 7)
    assert spec.model == MODEL


@pytest.mark.parametrize(
    ("optimizer", "quantized"), [("adamw", False), ("muon", False), ("adamw", True), ("muon", True)]
)
def test_a_dense_run_too_with_any_optimizer(tmp_path, optimizer, quantized):
    spec = replace(SPEC, owner=identity_of(0).peer_id, inner=replace(SPEC.inner, optimizer=optimizer))
    members = trained(tmp_path / "homes", spec, count=2, rounds=1, quantized=quantized)
    checkpoint = join_shards(saved(members, tmp_path / "shards", sign_run(spec, identity_of(0))))
    assert set(checkpoint.manifest.holders) == {"shared"}
    onward, home = begun(checkpoint.folder, tmp_path / "runs")
    assert differing(checkpoint, onward, home, b"") == []


def spoil(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def rewritten(folder, number, alter):
    """A shard whose tensors were changed by somebody who knows how to write its words."""
    path = tensors(folder, number)
    found = load_file(path)
    with safe_open(path, framework="pt") as file:
        note = file.metadata()
    alter(found)
    save_file(found, path, metadata=note)
    data = path.read_bytes()
    change(words(folder, number), bytes=len(data), blake3=blake3(data).hexdigest())


ATOM = "model.layers.0.self_attn.q_proj.weight"
BAD = {
    "nothing": (lambda f: [p.unlink() for p in f.glob("12D3*")], "there are no shards"),
    "no votes": (lambda f: (f / VOTES).unlink(), "has no file `votes`"),
    "half of the votes": (lambda f: (f / VOTES).write_bytes((f / VOTES).read_bytes()[:-9]), "is no proof of"),
    "votes for the round before": (lambda f: reproved(f, lambda rounds: rounds[:1]), "voted was for round 0"),
    "a vote too few": (
        lambda f: reproved(f, lambda rounds: (rounds[0], rounds[1][:-1])), "does not prove that round 1 is final",
    ),
    "votes that skip a round": (
        lambda f: reproved(f, lambda rounds: rounds[1:]), "does not prove that round 0 is final",
    ),
    "an unsigned shard": (lambda f: forge(words(f, 3), signature=""), "is not the words of a shard"),
    "a shard that another signed": (
        lambda f: forge(words(f, 3), signature=json.loads(words(f, 2).read_text())["signature"]),
        "is not what …",
    ),
    "words changed after they were signed": (lambda f: forge(words(f, 3), bytes=7), "is not what …"),
    "a stranger's shard": (by_a_stranger, "is in no final set of the run"),
    "no run": (lambda f: (f / "run").unlink(), "it has no file `run`; `atoll checkpoint save` writes one"),
    "another file as run": (lambda f: (f / "run").write_bytes(b"\x92\xc4"), "is not a run"),
    "a missing shard": (lambda f: [words(f, 1).unlink(), tensors(f, 1).unlink()], "nobody's shard has expert"),
    "a missing file": (lambda f: tensors(f, 1).unlink(), "is missing"),
    "a flipped bit": (lambda f: spoil(tensors(f, 2), -100), "does not have the hash"),
    "cut off": (lambda f: tensors(f, 2).write_bytes(tensors(f, 2).read_bytes()[:-4]), "does not have the hash"),
    "another round": (lambda f: change(words(f, 3), round=5), "not of one round"),
    "another run": (lambda f: change(words(f, 3), run="00" * 32), "not of one run"),
    "another state": (lambda f: change(words(f, 3), state="00" * 32), "not of one state"),
    "a foreign run": (lambda f: [change(words(f, n), run="00" * 32) for n in range(4)], "another run than"),
    "a renamed shard": (lambda f: words(f, 3).rename(f / "x.json"), "somebody renamed it"),
    "no words": (lambda f: words(f, 3).write_text("{}"), "is not the words of a shard"),
    "an older version": (lambda f: forge(words(f, 3), version=1), "version 1; this program reads 2"),
    "a newer version": (lambda f: forge(words(f, 3), version=3), "version 3"),
    "a path as a peer": (lambda f: forge(words(f, 3), peer="../../x"), "is not the words of a shard"),
    "words without what all train": (
        lambda f: change(words(f, 3), steps=without_shared(words(f, 3))), "is not the count that its words name",
    ),
    "an expert too many": (lambda f: change(words(f, 3), steps={"shared": 4, "8": 4}), "shard has expert"),
    "other steps": (
        lambda f: change(words(f, 3), steps=dict.fromkeys(json.loads(words(f, 3).read_text())["steps"], 9)),
        "is not the count that its words name",
    ),
    "a missing atom": (lambda f: rewritten(f, 1, lambda t: t.pop(f"weight/{ATOM}")), f"weight/{ATOM} is missing"),
    "an extra atom": (lambda f: rewritten(f, 1, lambda t: t.update(more=torch.zeros(2))), "more does not belong"),
    "a turned atom": (
        lambda f: rewritten(f, 1, lambda t: t.update({f"exp_avg/{ATOM}": torch.zeros(64, 65)})),
        f"exp_avg/{ATOM} is F32 [64, 65], not F32 [64, 64]",
    ),
    "other weights": (lambda f: rewritten(f, 1, lambda t: t[f"weight/{ATOM}"].add_(1)), "other weights for"),
    "other weights everywhere": (
        lambda f: [rewritten(f, n, lambda t: t[f"weight/{ATOM}"].add_(1)) for n in range(4)],
        "do not have the digest",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_joined_is_one_line_and_writes_nothing(folder, name):
    spoiled, said = BAD[name]
    spoiled(folder)
    there = sorted(folder.iterdir())
    with pytest.raises(ConfigError) as error:
        join_shards(folder)
    assert said in error.value.line()
    assert "\n" not in error.value.line()
    assert sorted(folder.iterdir()) == there


def test_a_joined_checkpoint_is_verified_again_when_it_is_opened(folder, tmp_path):
    with pytest.raises(ConfigError, match="no manifest"):
        open_checkpoint(folder)
    join_shards(folder)
    assert open_checkpoint(folder).manifest.round == 1
    with pytest.raises(ConfigError, match="joined already"):
        join_shards(folder)
    spoil(tensors(folder, 0), -5)
    for attempt in (open_checkpoint, lambda f: begun(f, tmp_path / "runs")):
        with pytest.raises(ConfigError, match="does not have the hash"):
            attempt(folder)
    assert list((tmp_path / "runs").iterdir()) == []


def test_moments_that_no_optimiser_has_are_refused(folder, tmp_path):
    for number in range(4):
        rewritten(folder, number, lambda t: t[f"exp_avg_sq/{ATOM}"].fill_(-1.0))
    join_shards(folder)
    with pytest.raises(ConfigError, match="not finite, or out of range"):
        begun(folder, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_node_saves_once_and_only_what_it_has(four, folder, tmp_path):
    me = identity_of(0)
    with pytest.raises(ConfigError, match="is there already"):
        save_shard(SIGNED, four.home(0), me, folder)
    with pytest.raises(ConfigError, match="no state"):
        save_shard(SIGNED, tmp_path / "empty", me, tmp_path / "to")
    shutil.copytree(four.home(0) / "state", tmp_path / "bare/state")
    with pytest.raises(ConfigError, match="the ledger of"):
        save_shard(SIGNED, tmp_path / "bare", me, tmp_path / "to")
    Ledger(tmp_path / "bare" / LEDGER_FILE, RUN.id).close()
    with pytest.raises(ConfigError, match="does not prove that round 0 is final"):
        save_shard(SIGNED, tmp_path / "bare", me, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    other = replace(RUN, name="other")
    with pytest.raises(AtollError):
        save_shard(sign_run(other, identity_of(0)), four.home(0), me, tmp_path / "to")


def test_a_node_that_cut_its_ledger_saves_where_another_one_proved_the_round(four, folder, tmp_path):
    home = shutil.copytree(four.home(0), tmp_path / "cut")
    ledger = Ledger(home / LEDGER_FILE, RUN.id)
    ledger.cut(Cut(b"summary", last=0))
    ledger.close()
    for path in (words(folder, 0), tensors(folder, 0)):
        path.unlink()
    save_shard(SIGNED, home, identity_of(0), folder)
    assert join_shards(folder).proof.round == 1
    with pytest.raises(ConfigError, match="ledger_history"):
        save_shard(SIGNED, home, identity_of(0), tmp_path / "to")
    older = shutil.copytree(folder, tmp_path / "older")
    reproved(older, lambda rounds: rounds[:1])
    words(older, 0).unlink()
    tensors(older, 0).unlink()
    with pytest.raises(ConfigError, match="ledger_history"):
        save_shard(SIGNED, home, identity_of(0), older)


def test_nothing_is_saved_before_a_round_is_final(tmp_path):
    members = trained(tmp_path / "homes", count=1, rounds=0)
    members.contribute(0, 0, members.shares[0])
    with pytest.raises(ConfigError, match="no round"):
        save_shard(SIGNED, members.home(0), identity_of(0), tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_folder_holds_one_round(four, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "copy")
    for path in (words(folder, 0), tensors(folder, 0)):
        path.unlink()
    reproved(folder, lambda rounds: rounds[:1])
    with pytest.raises(ConfigError, match="another round"):
        save_shard(SIGNED, four.home(0), identity_of(0), folder)


def test_less_than_a_quorum_is_joined_only_by_who_gives_the_others_up(tmp_path):
    """Dense: one shard has all weights and moments, and says nothing of what the others had not sent."""
    spec = replace(SPEC, owner=identity_of(0).peer_id)
    members, signed_run = trained(tmp_path / "homes", spec, count=4, rounds=1), sign_run(spec, identity_of(0))
    for number in (0, 2):
        save_shard(signed_run, members.home(number), identity_of(number), tmp_path / "to")
    with pytest.raises(
        ConfigError, match="signed by 2 of the 4 members of the newest rounds, a quorum is 3"
    ) as error:
        join_shards(tmp_path / "to")
    assert all(f"…{identity_of(number).peer_id[-8:]}" in error.value.line() for number in (1, 3))
    assert not (tmp_path / "to" / MANIFEST).exists()
    found = join_shards(tmp_path / "to", without_quorum=True)
    assert not found.manifest.quorum
    assert not open_checkpoint(tmp_path / "to").manifest.quorum
    assert "what the others had not sent is lost" in found.manifest.who_signed()
    (tmp_path / "runs").mkdir()
    told = []
    source, report = CheckpointSource(tmp_path / "to"), lambda done, of: told.append((done, of))
    with importing(source, tmp_path / "runs", 1, report) as imports:
        assert told[-1][0] == told[-1][1] > 0, "all bytes are verified"
        assert "less than a quorum" in imports.warning
    path = tmp_path / "to" / MANIFEST
    path.write_bytes(to_json(replace(found.manifest, quorum=True)))
    with pytest.raises(ConfigError, match="is not what its shards say"):
        open_checkpoint(tmp_path / "to")
    path.unlink()
    save_shard(signed_run, members.home(3), identity_of(3), tmp_path / "to")
    assert join_shards(tmp_path / "to").manifest.quorum


def test_a_moments_file_that_cannot_be_used_is_a_line_in_the_log(folder, tmp_path, caplog):
    join_shards(folder)
    spec, home = begun(folder, tmp_path / "runs")
    paths = paths_of(spec, home)
    learner, sending = Learner(spec, "cpu"), ErrorFeedback(spec, home / "spool", OnHost())
    learner.set_trained_experts(bitmap_of({1, 2}, E))
    InitialMoments(spec, [f"{path}.absent" for path in paths]).load_into(learner, sending)
    assert learner.inner.state() == {}
    shared, one = Path(paths[0]), Path(paths[file_of_expert(MODEL, 1)])
    shared.write_bytes(shared.read_bytes()[:-4])
    brought = InitialMoments(spec, paths)
    brought.load_into(learner, sending)
    steps = {name: float(v) for name, v in learner.inner.state().items() if name.startswith("step/")}
    assert all(steps[name] == (0 if expert_of(name) is None else 4) for name in steps), "one file is left out"
    assert {expert_of(name) for name in steps} == {None, 1, 2}
    assert "are not used" in caplog.text
    caplog.clear()
    one.unlink()
    brought.load_into(learner, sending)
    assert caplog.text == "", "it is said once"


def test_a_member_needs_the_files_of_its_experts_alone(folder, tmp_path):
    """Together the files have every tensor once; without those of others a member begins with the same bits."""
    checkpoint = join_shards(folder)
    spec, home = begun(folder, tmp_path / "runs")
    paths = paths_of(spec, home)
    sizes = [Path(path).stat().st_size for path in paths]
    assert len(paths) == 1 + E
    assert 12 * MODEL.parameters <= sum(sizes) < 12 * MODEL.parameters + (1 << 17)
    needed = files_for(MODEL, (3, 6))
    for number, path in enumerate(paths):
        if number not in needed:
            Path(path).unlink()
    assert differing(checkpoint, spec, home, bitmap_of({3, 6}, E)) == []
    assert differing(checkpoint, spec, home, bitmap_of({3, 7}, E)) != []


PEER = identity_of(0).peer_id
SHARD = Shard(
    version=2, run="ab" * 32, round=7, state="cd" * 32, peer=PEER, steps={"shared": 12, "0": 12}, left=(3,),
    bytes=99, blake3="ef" * 32, signature="01" * 64,
)  # fmt: skip
GOLDEN = f"""{{
 "blake3": "{"ef" * 32}",
 "bytes": 99,
 "left": [
  3
 ],
 "peer": "{PEER}",
 "round": 7,
 "run": "{"ab" * 32}",
 "signature": "{"01" * 64}",
 "state": "{"cd" * 32}",
 "steps": {{
  "0": 12,
  "shared": 12
 }},
 "version": 2
}}
"""


GOLDEN_SIGNATURE = (
    "5fb13f99d4e7ee6273938575295a0f7cee8bc2895a9d1483a05fc50db70c9ec3"
    "ebf690576295fce55296205aeca77e745bd9ced12d0a7eac8bf76e9d45cffe0b"
)
GOLDEN_MANIFEST = "84cab40caf1c40753231de5b193ab0d4a64a8178c21b91a4ce9964d2a2cf0155"


def test_the_words_have_one_form():
    assert to_json(SHARD).decode() == GOLDEN
    assert from_json(GOLDEN.encode(), Shard) == SHARD
    manifest = joined([replace(SHARD, left=())], 1, "12" * 32, [PEER], 1)
    assert manifest.holders == {"shared": PEER, "0": PEER}
    assert from_json(to_json(manifest), CheckpointManifest) == manifest
    inner = GOLDEN.replace("[\n  3\n ]", "[]").strip()
    assert json.loads(to_json(manifest)) == {
        "version": 2, "run": "ab" * 32, "round": 7, "state": "cd" * 32, "shards": [json.loads(inner)],
        "holders": {"0": PEER, "shared": PEER}, "votes": "12" * 32, "members": [PEER], "quorum": True,
    }  # fmt: skip
    assert blake3(to_json(manifest)).hexdigest() == GOLDEN_MANIFEST


def test_a_signature_is_over_all_words_and_of_their_peer():
    """Golden: Ed25519 signatures are a function of key and words."""
    found = signed(SHARD, identity_of(0))
    assert found.signature == GOLDEN_SIGNATURE
    check_signature(found)
    for changes in ({"round": 8}, {"blake3": "00" * 32}, {"peer": identity_of(1).peer_id}, {"left": ()}):
        with pytest.raises(SignatureFault):
            check_signature(replace(found, **changes))


def test_of_several_holders_the_one_with_most_steps_counts():
    peers = sorted(identity_of(n).peer_id for n in range(3))
    many = [replace(SHARD, peer=peer, left=(), steps={"shared": 5, "0": at}) for at, peer in enumerate(peers)]
    found = joined(reversed(many), 1, "12" * 32, peers, 2)
    assert found.holders["0"] == peers[2]
    assert found == joined(many, 1, "12" * 32, peers, 2)
    assert [shard.peer for shard in found.shards] == peers


@pytest.mark.parametrize(
    "changes",
    [
        {"blake3": "XX" * 32}, {"run": "ab"}, {"steps": {"01": 1}}, {"steps": {"-1": 1}}, {"steps": {"x": 1}},
        {"left": [3, 3]}, {"left": [-1]}, {"round": -1}, {"signature": "01"}, {"bytes": -1},
        {"steps": {"shared": -1}}, {"more": 1}, {"version": 0}, {"peer": "x"}, {"round": "7"},
    ],
)  # fmt: skip
def test_words_that_no_node_writes_are_refused(changes):
    with pytest.raises(DecodeError):
        from_json(json.dumps(json.loads(GOLDEN) | changes).encode(), Shard)


def test_the_manifest_is_written_last_and_whole(folder):
    join_shards(folder)
    assert not list(folder.glob("*.part"))
    assert (folder / MANIFEST).read_bytes() == to_json(open_checkpoint(folder).manifest)


def test_what_a_reducer_kept_is_not_said_yet(four):
    run = four.home(0)
    found = load_local(run / "state", RUN.id)
    plain, span = _unsent(RUN, run, found), Span(3, 5)
    words = replace(found.body, kept=(KeptBody(0, Digest(bytes(32)), span),))
    kept = torch.full((2, 4096), 1 << VALUE_BITS - 1, dtype=torch.int32)
    more = _unsent(RUN, run, found._replace(body=words, tensors={**found.tensors, "kept": kept}))
    assert torch.equal(more[3:5], plain[3:5] + 0.5)
    assert torch.equal(more[:3], plain[:3])
    assert torch.equal(more[5:], plain[5:])


def test_names_of_a_file_are_made_once(folder):
    file = join_shards(folder).file_of(identity_of(0).peer_id)
    assert file.names is file.names
    assert all(file.read(name) is not None for name in file.names)
