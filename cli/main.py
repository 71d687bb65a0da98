"""The console script `atoll`. A signal ends it without a word while modules load, for nothing has begun yet.

Python's own answer to Ctrl-C would be a traceback from the middle of an import.
"""

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, *, name: str = "atoll") -> int:
    """Load the commands and run one; the exit code is the answer."""
    _leave_to_kernel()
    from atoll.cli.command_group import run

    try:
        return run(argv, name=name)
    finally:
        _leave_to_kernel()  # the end of the interpreter prints tracebacks too
        # The event loop of `start` took its handler along. All has ended: a late request must not change the code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave_to_kernel() -> None:
    """Let SIGINT end the process, unless the user has it ignored (nohup)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
