"""A run that starts from a published folder: its first loss is that of the folder, and failures leave nothing."""

import json
import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from atoll.node.checkpoint.snapshot import read_snapshot
from atoll.node.import_export.export_run import export_run
from atoll.node.import_export.import_run import importing, store_run
from atoll.node.import_export.source_options import HuggingFaceSource, UpcycleOptions
from atoll.node.learning.data.dataset import measured
from atoll.node.learning.inner.evaluate import VAL_WINDOWS
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.model.decoder import loss_of as decoder_loss
from atoll.node.learning.outer.fixed import state_digest, to_float
from atoll.node.worker.session import Session
from atoll.p2p.blobs.store import BLOBS
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    NOTHING_YET,
    AdoptRequest,
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    SnapshotRequest,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import atoms
from atoll.protocols.run.run_spec import open_run, sign_run
from tests.later import GROUP, transformers
from tests.node.daemon.published import CONTEXT, publish, qwen_like
from tests.node.worker.session_home import ME, SPEC
from tests.plain.arena import scatter

pytestmark = GROUP

OWNER = Identity(bytes(32))


@pytest.fixture
def hf(tmp_path):
    return publish(tmp_path / "hf")


def made(tmp_path, upcycle=None):
    """The spec of the folder's run, and its home with the files in it."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    with importing(HuggingFaceSource(tmp_path / "hf", upcycle), tmp_path / "runs", 1) as found:
        spec = found.applied(SPEC, 32)
        spec = replace(spec, data=measured(spec.data, "", tmp_path, found.tokenizer))
        spec.check()
        found.check(spec)
        home = tmp_path / "runs" / spec.id.hex()
        store_run(found, home, lambda: None)
    return spec, home


def test_how_much_of_the_weights_is_read_is_told(tmp_path, hf):
    told = []
    (tmp_path / "runs").mkdir()
    source = HuggingFaceSource(tmp_path / "hf", None)
    with importing(source, tmp_path / "runs", 1, lambda done, of: told.append((done, of))) as found:
        count = len(atoms(found.model))
    assert told == [(number, count) for number in range(1, count + 1)]


def blob(home, name):
    return str(home / BLOBS / f"{name.hex()}.blob")


def session_of(spec, home):
    return Session(
        StartRequest(
            codec.encode(spec), ME, str(home), "", 1, "cpu", tokenizer=blob(home, spec.data.tokenizer_blob)
        )
    )


def adopt(spec, home):
    return AdoptRequest(Round(-1), blob(home, spec.start.weights), spec.start.state, ())


def loss_of(model, windows):
    """Mean cross-entropy of a transformers model, nats per token."""
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.from_numpy(one[:, :-1])).logits for one in (windows,)])
    return float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(windows[:, 1:]).flatten())
    )


def test_the_first_evaluation_is_the_loss_of_the_published_model(tmp_path, hf):
    spec, home = made(tmp_path)
    session = session_of(spec, home)
    assert session.started().final == NOTHING_YET
    assert session.answer(adopt(spec, home)).state == spec.start.state
    found = session.answer(EvaluateRequest())
    data = session._data
    windows = data.validation(VAL_WINDOWS)
    expected = loss_of(hf, windows)
    assert found.val_loss == pytest.approx(expected, abs=1e-5)
    text = qwen_like()
    spelled = sum(len(text.decode([int(t)]).encode()) for t in windows[:, 1:].flatten())
    assert data.validation_bytes(VAL_WINDOWS) == spelled, "a text of ASCII: each token spells its bytes"
    assert found.val_bpb == pytest.approx(expected / math.log(2) * windows[:, 1:].size / spelled, abs=1e-5)


def test_upcycled_without_noise_it_is_the_loss_of_the_dense_model(tmp_path, hf):
    spec, home = made(tmp_path, UpcycleOptions(4, 2, None))
    arena = arena_of(spec.model)
    found = read_snapshot(Path(blob(home, spec.start.weights)), arena, state_digest)
    assert (found.round, found.state) == (-1, spec.start.state)
    assert spec.model.experts is not None
    assert spec.model.experts.count == 4
    model, theta = Decoder(spec.model), scatter(found.theta_C4096, arena)
    write_atoms(model, ((name, to_float(value)) for name, value in theta.items()))
    windows = torch.randint(0, 200, (4, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float(decoder_loss(model, windows)) == pytest.approx(loss_of(hf, windows.numpy()), abs=1e-5)


def test_until_the_weights_are_there_the_worker_does_nothing(tmp_path, hf):
    spec, home = made(tmp_path)
    session = session_of(spec, home)
    for ask in (
        EvaluateRequest(),
        SnapshotRequest(str(tmp_path / "s")),
        FoldRequest(Round(0), ()),
        FinalizeRequest(Round(0), ()),
    ):
        with pytest.raises(LocalFault, match="start weights"):
            session.answer(ask)
    with pytest.raises(LocalFault, match="start weights"):
        next(session.train(TrainRequest(Round(0), 0, 1, 2, -1)))
    with pytest.raises(DecodeError):
        session.answer(AdoptRequest(Round(-1), blob(home, spec.data.tokenizer_blob), spec.start.state, ()))
    assert session_of(spec, home).started().final == NOTHING_YET


def test_a_restart_needs_the_file_no_more(tmp_path, hf):
    spec, home = made(tmp_path)
    session_of(spec, home).answer(adopt(spec, home))
    (home / BLOBS / f"{spec.start.weights.hex()}.blob").unlink()
    again = session_of(spec, home)
    assert (again.started().final, again.started().state) == (-1, spec.start.state)
    *_, trained = again.train(TrainRequest(Round(0), 0, 1, 2, -1))
    assert isinstance(trained, TrainReply)
    again.close()


def test_what_goes_out_is_what_came_in(tmp_path, hf):
    spec, home = made(tmp_path)
    session_of(spec, home).answer(adopt(spec, home))
    export_run(spec, home, tmp_path / "out", None, "")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float((back(input_ids=tokens).logits - hf(input_ids=tokens).logits).abs().max()) <= 1e-5
    text = "The cat, 1234 of them <end> 你好"
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
        == qwen_like().encode(text).ids
    )


def test_an_upcycled_llama_goes_out_as_mixtral(tmp_path):
    llama = publish(
        tmp_path / "hf", transformers.LlamaConfig, rope_parameters={"rope_type": "default", "rope_theta": 3e4}
    )
    spec, home = made(tmp_path, UpcycleOptions(4, 2, None))
    session_of(spec, home).answer(adopt(spec, home))
    assert export_run(spec, home, tmp_path / "out", None, "").class_name == "MixtralForCausalLM"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = back(input_ids=tokens).logits - llama(input_ids=tokens).logits
    assert float(difference.abs().max()) <= 1e-5, "equal experts compute what the dense model did"


CHAT = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"


def chatty(folder, model):
    """Make the folder one of a model that is spoken to: it ends where greedy words go on after four tokens."""
    start = torch.tensor([[5, 6, 7]])
    how = {"do_sample": False, "repetition_penalty": 1.3}
    said = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=4, **how)[0, 3:]
    ids = {"bos_token_id": 0, "eos_token_id": [int(said[3]), 0], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids | how))
    words = {"bos_token": "<end>", "eos_token": "<end>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(words | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))


def answer(folder):
    """What a program that loads a folder writes, and how it writes a conversation."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    start = torch.tensor([[5, 6, 7]])
    said = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=20)[0, 3:].tolist()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "The cat"}], tokenize=False)
    named = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    drawn = {
        key: getattr(model.generation_config, key) for key in ("do_sample", "repetition_penalty", "eos_token_id")
    }
    return said, chat, named, tokenizer("The cat")["input_ids"], drawn


def test_the_model_that_goes_out_stops_and_chats_like_the_one_that_came_in(tmp_path, hf):
    chatty(tmp_path / "hf", hf)
    spec, home = made(tmp_path)
    session_of(spec, home).answer(adopt(spec, home))
    export_run(spec, home, tmp_path / "out", None, "")
    said, chat, named, ids, drawn = answer(tmp_path / "hf")
    assert len(said) <= 4, "it stops"
    assert chat == "<end>The cat<end>"
    assert answer(tmp_path / "out") == (said, chat, named, ids, drawn)
    assert open_run(sign_run(replace(spec, owner=OWNER.peer_id), OWNER)).serving == spec.serving


def test_an_export_becomes_a_run_of_bytes_again(tmp_path):
    """A tokenizer that is `bytes` needs no file."""
    spec = replace(SPEC, model=replace(SPEC.model, qk_norm=True))
    home = tmp_path / "first"
    Session(StartRequest(codec.encode(spec), ME, str(home), "", 1, "cpu"))._save()
    done = export_run(spec, home, tmp_path / "hf", None, "")
    again, _ = made(tmp_path)
    assert again.data.tokenizer == "bytes"
    assert again.given == (again.start.weights,)
    assert again.model == spec.model, "the context is the checkpoint's, which is the shorter one"
    assert again.start.state == done.state, "gains of 1 and what is below are exact"


@pytest.mark.parametrize(
    "upcycle", [UpcycleOptions(4, 5, None), UpcycleOptions(0, 1, None), UpcycleOptions(4, 2, 99)]
)
def test_experts_that_cannot_be_are_refused(tmp_path, hf, upcycle):
    with pytest.raises(ConfigError):
        made(tmp_path, upcycle)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_longer_context_than_the_checkpoints_is_refused(tmp_path, hf):
    (tmp_path / "runs").mkdir()
    with importing(HuggingFaceSource(tmp_path / "hf", None), tmp_path / "runs", 1) as found:
        assert found.applied(SPEC, 4096).model.context == CONTEXT
        spec = found.applied(SPEC, 16)
        found.check(spec)
        for changes in ({"context": CONTEXT + 1}, {"rope_theta": 5.0}, {"layers": 1}):
            with pytest.raises(ConfigError, match=r"only model\.context"):
                found.check(replace(spec, model=replace(spec.model, **changes)))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    publish(tmp_path / "hf", vocab_size=900)
    with pytest.raises(ConfigError, match="the model has 900"):
        made(tmp_path)


def test_the_worker_refuses_another_tokenizer_than_the_runs(tmp_path, hf):
    spec, home = made(tmp_path)
    other = tmp_path / "other.json"
    other.write_bytes((tmp_path / "hf/tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="not the text of this run"):
        Session(StartRequest(codec.encode(spec), ME, str(home), "", 1, "cpu", tokenizer=str(other)))
