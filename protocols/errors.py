"""The error tree: each class says whose fault a failure is, and therefore what to do about it.

    AtollError
    ├── ConfigError      the user wrote something we cannot use            exit 78
    ├── LocalFault       this machine: disk full, port in use, corruption  exit 1
    │   ├── DiskFault
    │   ├── CorruptFault a file of ours does not verify
    │   ├── PrivacySpent a round would take this node's ε beyond the largest one of its run
    │   └── Superseded   a newer request took the place of this one
    ├── PeerFault        a peer broke the protocol; only these move a score
    │   ├── DecodeError  bytes that are not a legal value
    │   │   └── OtherChain a snapshot with another state than its round has here
    │   ├── SignatureFault
    │   └── RunMismatch  the peer trains another run
    ├── Unreachable      the network: refused, timed out, reset; retried, never fatal
    └── Divergence       our own fold left its legal range, or a digest disagreed

`hint` is one line that says what the user does next; it may be empty for faults no user sees.
"""


class AtollError(Exception):
    """Root of every error that atoll raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def line(self) -> str:
        """What happened and what to do next, on one line."""
        text = " ".join(str(self).split())
        return f"{text}; {self.hint}" if self.hint else text


class ConfigError(AtollError):
    """The user's configuration, arguments or files cannot be used as they are."""

    exit_code = 78


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError, with the key's name, unless `low` <= `value` <= `high`. NaN is refused."""
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value} is outside {low} … {high}")


class LocalFault(AtollError):
    """This machine failed: a port in use, a missing file, a dead child."""


class DiskFault(LocalFault):
    """The disk refused: full, read-only, failing."""


class CorruptFault(LocalFault):
    """A file of ours does not verify."""


class Superseded(LocalFault):
    """A newer request took the place of this one; nobody needs its result."""


class PrivacySpent(LocalFault):
    """A round would take the ε of this node beyond `privacy.most`: it trains no more."""


class NotRunning(LocalFault):
    """No daemon answers on this home's control socket."""

    exit_code = 3


class PeerFault(AtollError):
    """A peer broke the protocol."""


class DecodeError(PeerFault):
    """Bytes from outside that are not a legal value. Decoders raise nothing else."""


class OtherChain(DecodeError):
    """A snapshot of the round asked for with another state: of a chain that its peer had not left, or a lie."""


class SignatureFault(PeerFault):
    """A signature, an author or a hash link that does not verify."""


class RunMismatch(PeerFault):
    """The peer trains another run than we do."""


class VersionMismatch(RunMismatch):
    """The peer speaks no version of a wire that we speak; one of us has to be upgraded."""


class Unreachable(AtollError):
    """The network failed us: refused, timed out, reset."""

    exit_code = 75


class Divergence(AtollError):
    """The fold left its legal range, training gave NaN, or two digests that must be equal are not."""


def counted(count: int, noun: str) -> str:
    """`1 seed`, `2 seeds`: a count with its noun, for messages."""
    return f"{count} {noun}{'s' * (count != 1)}"


def first_fault(faults: BaseExceptionGroup[AtollError]) -> AtollError:
    """The first error of a group of groups."""
    inner: BaseException = faults
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    assert isinstance(inner, AtollError)
    return inner


TRAIN_AGAIN = (
    "start again: it goes on from the last saved round; if this comes again, the run needs a lower inner.lr"
)
MODEL_LOST = "all members see the same: train a new run, with a lower inner.lr or outer.alpha_256"
"""Hints for Divergence of one member's training (TRAIN_AGAIN) and of the shared model (MODEL_LOST)."""
