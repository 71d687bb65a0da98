"""Asks the daemon over its control socket. Plain blocking sockets: `atoll status` must be quick to start."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from atoll.node.config.home import Home, is_locked, socket_address
from atoll.protocols.errors import DecodeError, LocalFault, NotRunning
from atoll.protocols.local import control_messages
from atoll.protocols.local.control_lines import REPLY_MAX_BYTES, decode_answer, encode_ask, fault_of

ANSWER_S = 15.0
EVALUATE_S = 1800.0
"""A validation waits for the inner step at hand, on any model and machine."""
STREAM_S = 60.0
"""Streams send something at least every few seconds, or the daemon hangs."""

_MUTE = "the node does not answer"
_LOGS = "look at its log with `atoll logs`"
_ASKS: dict[str, control_messages.Ask] = {
    "status": control_messages.GetStatus(),
    "peers": control_messages.GetPeers(),
    "rounds": control_messages.GetRounds(),
    "resume": control_messages.ResumeNode(),
    "pause": control_messages.PauseNode(),
    "stop": control_messages.StopNode(),
    "eval": control_messages.EvaluateModel(),
}

A = TypeVar("A")


class NoAnswer(LocalFault):
    """The daemon is there but did not answer in time."""

    exit_code = 5


def ask(root: Path, what: str) -> dict[str, Any]:
    """The answer to a plain ask (`status`, `peers`, `rounds`, …) of the node in `root`, as `--json` shows it."""
    answer: dict[str, Any] = msgspec.to_builtins(call(Home(root), _ASKS[what], msgspec.Struct))
    return answer


def call(home: Home, request: control_messages.Ask, kind: type[A]) -> A:
    """One answer. Raises NotRunning, NoAnswer, or the fault that the daemon named."""
    wait_s = EVALUATE_S if isinstance(request, control_messages.EvaluateModel) else ANSWER_S
    with _connection(home, request, wait_s) as lines:
        return _next(lines, kind)


def stream(home: Home, request: control_messages.Ask, kind: type[A], *, wait_s: float = STREAM_S) -> Iterator[A]:
    """Answers, each within `wait_s`, until the caller stops, or the daemon ends. Raises as `call`."""
    with _connection(home, request, wait_s) as lines:
        while True:
            try:
                yield _next(lines, kind)
            except NotRunning:
                return


def start_hint(home: Home) -> str:
    """How a node of this home is started; where it has no run, how it gets one."""
    if any(home.runs.glob("*.run")):
        return "start it with `atoll start`"
    return "it has no run: join one with `atoll start INVITE`, or make one with `atoll run new NAME`"


def _no_node(home: Home) -> NotRunning:
    if is_locked(home):
        return NotRunning(
            f"the node in {home.root} starts or ends, and does not answer", hint="ask again in a moment"
        )
    return NotRunning(f"no node runs in {home.root}", hint=start_hint(home))


def _next(lines: BinaryIO, kind: type[A]) -> A:
    try:
        line = lines.readline(REPLY_MAX_BYTES + 1)
    except TimeoutError as error:
        raise NoAnswer(_MUTE, hint=_LOGS) from error
    except OSError as error:
        raise NotRunning(f"the node ended: {error.strerror}") from error
    if not line:
        raise NotRunning("the node ended before it answered", hint="start it with `atoll start`")
    answer = decode_answer(line)
    if isinstance(answer, control_messages.CommandRefused):
        raise fault_of(answer)
    if not isinstance(answer, kind):
        raise DecodeError(f"the node answered {type(answer).__name__}")
    return answer


@contextmanager
def _connection(home: Home, request: control_messages.Ask, wait_s: float) -> Iterator[BinaryIO]:
    path = home.control_socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(wait_s)
        try:
            with socket_address(path) as address:
                link.connect(address)
        except BlockingIOError as error:
            raise NoAnswer(_MUTE, hint=_LOGS) from error  # so many wait for it that the kernel lets nobody else in
        except (FileNotFoundError, ConnectionError) as error:
            raise _no_node(home) from error
        except OSError as error:
            raise LocalFault(f"cannot reach the node at {path}: {error.strerror}", hint="check --home") from error
        with suppress(ConnectionError, TimeoutError):  # the answer says why: it may have been sent before the end
            link.sendall(encode_ask(request))
        with link.makefile("rb") as lines:
            yield lines
