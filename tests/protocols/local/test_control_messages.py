"""Control messages: golden lines, laws, and that fields are only ever added."""

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.errors import AtollError, ConfigError, DecodeError, LocalFault, NotRunning
from atoll.protocols.local import control_lines as lines
from atoll.protocols.local.control_messages import (
    CommandDone,
    CommandRefused,
    EvaluateModel,
    EvaluationResult,
    ExcludePeer,
    GetLogs,
    GetPageToken,
    GetPeers,
    GetRounds,
    GetStatus,
    PageToken,
    PauseNode,
    ResumeNode,
    SetLimits,
    StopNode,
    Watch,
)

GOLDEN = {
    b'{"v":1,"ask":{"type":"status"}}\n': GetStatus(),
    b'{"v":1,"ask":{"type":"watch","interval_s":1.0}}\n': Watch(),
    b'{"v":1,"ask":{"type":"peers"}}\n': GetPeers(),
    b'{"v":1,"ask":{"type":"rounds","last":20}}\n': GetRounds(20),
    b'{"v":1,"ask":{"type":"logs","tail":5,"follow":true}}\n': GetLogs(5, True),
    b'{"v":1,"ask":{"type":"stop","finish":true}}\n': StopNode(finish=True),
    b'{"v":1,"ask":{"type":"pause","reason":"games","for_s":null}}\n': PauseNode("games"),
    b'{"v":1,"ask":{"type":"pause","reason":"games","for_s":7200.0}}\n': PauseNode("games", 7200.0),
    b'{"v":1,"ask":{"type":"resume"}}\n': ResumeNode(),
    b'{"v":1,"ask":{"type":"limit","up":"20mbit","down":null}}\n': SetLimits("20mbit"),
    b'{"v":1,"ask":{"type":"page"}}\n': GetPageToken(),
    b'{"v":1,"ask":{"type":"eval"}}\n': EvaluateModel(),
    b'{"v":1,"ask":{"type":"exclude","peer":"abcdef","first":7,"reason":"noise","since":3}}\n': ExcludePeer(
        "abcdef", 7, "noise", 3
    ),
}


@pytest.mark.parametrize("line", GOLDEN)
def test_golden_asks(line):
    assert lines.encode_ask(GOLDEN[line]) == line
    assert lines.decode_ask(line) == GOLDEN[line]


def test_golden_answers():
    assert lines.encode_answer(CommandDone("ok")) == b'{"v":1,"answer":{"type":"done","message":"ok"}}\n'
    line = b'{"v":1,"answer":{"type":"eval","round":3,"val_bpb":2.5,"val_loss":1.75}}\n'
    assert lines.encode_answer(EvaluationResult(3, 2.5, 1.75)) == line
    assert lines.decode_answer(line) == EvaluationResult(3, 2.5, 1.75)
    line = b'{"v":1,"answer":{"type":"page","token":"abc","lasts_s":600.0}}\n'
    assert lines.encode_answer(PageToken("abc", 600.0)) == line
    assert lines.decode_answer(line) == PageToken("abc", 600.0)


def test_a_reader_skips_fields_that_a_newer_daemon_adds():
    line = b'{"v":1,"new":1,"answer":{"type":"done","message":"ok","since":3}}'
    assert lines.decode_answer(line) == CommandDone("ok")


def test_numbers_that_json_lacks_become_null():
    sent = json.loads(lines.encode_answer(EvaluationResult(0, float("nan"), float("inf"))))
    assert sent["answer"]["val_bpb"] is None


def test_another_version_says_what_to_do():
    with pytest.raises(DecodeError) as caught:
        lines.decode_answer(b'{"v":9,"answer":{"type":"hologram"}}')
    assert "control version 9" in caught.value.line()
    assert "upgrade" in caught.value.line()


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_line_is_a_message_or_a_decode_error(line):
    for decode in (lines.decode_ask, lines.decode_answer):
        with suppress(DecodeError):
            assert isinstance(decode(line), msgspec.Struct)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([line.split(b'"')[7] for line in GOLDEN]), st.dictionaries(st.text(max_size=9), json_values)
)
def test_any_arguments_are_legal_or_refused(kind, arguments):
    request = {"v": 1, "ask": {**arguments, "type": kind.decode()}}
    with suppress(DecodeError):
        lines.decode_ask(json.dumps(request).encode())


def test_lines_are_capped_before_they_are_parsed():
    with pytest.raises(DecodeError, match="bytes where at most"):
        lines.decode_ask(b" " * (lines.REQUEST_MAX_BYTES + 1))


@pytest.mark.parametrize(
    "error", [ConfigError("a", hint="b"), LocalFault("x"), NotRunning("y", hint="z"), DecodeError("d")]
)
def test_errors_keep_their_kind_over_the_socket(error: AtollError):
    back = lines.fault_of(lines.refusal(error))
    assert (type(back), back.line(), back.exit_code) == (type(error), error.line(), error.exit_code)


@pytest.mark.parametrize("name", ["NoSuchFault", "msgspec", "annotations", ""])
def test_unknown_faults_are_local(name):
    assert type(lines.fault_of(CommandRefused(name, "m", ""))) is LocalFault
