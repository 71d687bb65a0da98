"""What an idle worker waits for: bytes on their way (`transfer`), or something else (`wait`)."""

from atoll.node.daemon.rounds.types import Phase, RoundState
from atoll.node.daemon.telemetry.goodput import Idle

_MOVING = (Phase.CATCH_UP, Phase.TRAIN, Phase.COLLECT)


def idle_as(state: RoundState, *, unsent: bool) -> Idle | None:
    """None: the worker folds and is not idle. `unsent`: nobody can have our newest payload yet.

    A payload that is announced and not held is being fetched. In a pause, or while members gather, transfers
    may be under way too, but nothing waits for them.
    """
    if state.phase is Phase.FOLD:
        return None
    if state.phase not in _MOVING:
        return "wait"
    upload = unsent and bool(state.members) and state.phase is not Phase.CATCH_UP
    return "transfer" if upload or _fetching(state) else "wait"


def _fetching(state: RoundState) -> bool:
    """Payloads of rounds that are still open here; those of closed rounds hold nothing up."""
    every = state.phase is Phase.CATCH_UP
    return any(
        not known.held
        for number, book in state.books.items()
        if every or number > state.closed
        for known in book.values()
    )


class UploadState:
    """Whether our newest payload can have reached anybody, judged by the bytes of payloads that went up."""

    def __init__(self) -> None:
        self._round = -1
        self._before_bytes = self._seen_bytes = 0

    def unsent(self, newest: tuple[int, int] | None, up_bytes: int) -> bool:
        """`newest`: round and bytes of our newest payload; `up_bytes`: of all payloads since the start.

        Look often: what goes up between two looks counts for a payload that is new at the second one.
        """
        if newest is not None and newest[0] != self._round:
            self._round, self._before_bytes = newest[0], self._seen_bytes
        self._seen_bytes = up_bytes
        return newest is not None and up_bytes - self._before_bytes < newest[1]
