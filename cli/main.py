"""The console script `atoll`. A signal ends it without a word while modules load, for nothing has begun yet.

Python's own answer to Ctrl-C would be a traceback from the middle of an import.
"""

import io
import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, *, name: str = "atoll") -> int:
    """Load the commands and run one; the exit code is the answer."""
    _leave_to_kernel()
    _settle_streams()
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


def _settle_streams() -> None:
    """Lead streams that are closed (`>&-`) nowhere, and write `?` for what the terminal's encoding has not."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the next file that is opened, a lock or a database, would be this stream
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
