"""Readings of a RoundState: which members it waits for, until when, where the others are, and what comes next.

Pure; node/daemon/rounds/machine.py moves by them. Rules in words: docs/rounds.md.
"""

from collections.abc import Collection
from statistics import median_high, median_low

from atoll.node.daemon.rounds.leaps import SHOWN, ahead_s, is_ahead, newest_left, whereabouts, why_ahead
from atoll.node.daemon.rounds.participants import MemberView, RoundBook, expected
from atoll.node.daemon.rounds.state import (
    BRIEF_ROUNDS,
    CATCH_UP_ROUNDS,
    FREE_ROUNDS,
    FREE_STALLS,
    LATE_LEAST_S,
    LATE_ROUNDS,
    LOST_LEAST_S,
    STALL_ROUNDS,
    UNREACHABLE_ROUNDS,
    UNSAVED_ROUNDS,
    WORKING,
    Absence,
    Phase,
    RoundState,
    absence_s,
    stall_s,
)
from atoll.node.runs.capacity.open_rounds import MOST_PAYLOADS
from atoll.protocols.errors import counted
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.local.worker_messages import TrainProgress

_NO_WORK = RoundBook()
_REMEMBERED = ", with as many contributions as a node remembers"
REST_TICK_S = 1.0
"""Time between two ticks in a pause and after the last round: only leases are due, and an event ends the rest."""
SOON_S = 0.01
"""The least time between two ticks: of two times that are nearly equal no clock passes the later one at once."""
AGAIN_ROUNDS = 4
"""Half of the rounds after which a member that held up one round in vain is waited for again."""
MOST_DOUBLINGS = 40
"""More would be after the end of any run."""
_AT_REST = (Phase.OBSERVE, Phase.PAUSED, Phase.FINISHED)
MORE_ROOM = "invite more members, or set a higher `experts` in config.toml"
"""Advice where the members have no room for all experts."""


def book_of(state: RoundState, number: int) -> RoundBook:
    """The contributions to a round; none for one that is final."""
    return state.books.get(number, _NO_WORK)


def is_excluded(state: RoundState, author: PeerId, number: int) -> bool:
    """Whether an author is excluded from round `number`, or from one before it."""
    return number >= state.excluded.get(author, number + 1)


def awaited_book(state: RoundState, number: int) -> RoundBook:
    """The contributions that a round waits for: those of excluded authors only alone."""
    book = book_of(state, number)
    if not state.excluded:
        return book
    barred = {peer for peer, first in state.excluded.items() if number >= first}
    # Mostly they write nothing any more, and this is asked at every event.
    if barred.isdisjoint(book.authors.values()):
        return book
    return _narrowed(book, {entry for entry, who in book.authors.items() if who in barred})


def counted_book(state: RoundState, number: int) -> RoundBook:
    """The contributions that count in this node's own set of a round.

    Those of excluded authors, and those that were made in another chain, only alone.
    """
    book = awaited_book(state, number)
    # It was trained from a model that this chain does not have. But its authors train the round no more.
    return book if state.apart.isdisjoint(book.authors) else _narrowed(book, state.apart)


def _narrowed(book: RoundBook, without: Collection[Digest]) -> RoundBook:
    """The book without some contributions, if others are held."""
    left = {entry: who for entry, who in book.authors.items() if entry not in without}
    # A round in which nobody else worked could never become final without them.
    has_other = not book.held.isdisjoint(left)
    return RoundBook(left, book.held & left.keys()) if has_other and len(left) < len(book.authors) else book


def own_set(state: RoundState, number: int) -> tuple[Digest, ...]:
    """This node's own set of a round: what counts and can be folded now, and no more than a set may name."""
    return counted_book(state, number).first(state.config.run, number, state.set_rules)


def attendance(state: RoundState) -> tuple[set[PeerId], frozenset[PeerId]]:
    """The authors that the collected round expects, and those of them whose contribution is held."""
    number = state.collecting
    book = counted_book(state, number)
    awaited = expected(state.config.me, number, book, state.members, state.just_left)
    if not state.apart.isdisjoint(authors := awaited_book(state, number).authors):
        # Who contributed what does not count trains the round no more; perhaps its payload is gone for good.
        awaited -= {*authors.values()} - {*book.authors.values()}
    return awaited, book.there


def closes_at(state: RoundState, lacking: Collection[PeerId]) -> float:
    """When the collected round closes without these authors, if they stay missing."""
    closing = [stalls_until(state)]
    if state.quorum_at is not None:
        closing.append(max(state.quorum_at, idle_at(state)) + state.config.grace_256 / 256 * state.train_s)
    # Two or three members have no quorum without each other. One that was killed must not cost a lease, which is
    # many round times: its lost connection says so at once. Nor one that lives and delivers nothing, each time.
    given_up = _given_up_at(state, lacking)
    if given_up is not None:
        closing.append(max(idle_at(state), given_up))
    return min(closing)


def stalls_until(state: RoundState) -> float:
    """Until when the collected round waits for a member that lives and is not absent."""
    # One that never delivers would hold up a round without quorum for ever. The limit counts in own round times,
    # because only a slow swarm may take long.
    return state.collecting_since + stall_s(state, state.train_s)


def next_tick_s(state: RoundState, now: float, tick_s: float) -> float:
    """Seconds from `now` to the next tick: `tick_s`, sooner where a round closes by the clock, later at rest."""
    if state.phase not in WORKING or state.collecting <= state.closed:
        return REST_TICK_S if state.phase in _AT_REST else tick_s
    awaited, there = attendance(state)
    closes_s = closes_at(state, awaited - there) - now
    return max(SOON_S, closes_s) if 0 < closes_s < tick_s else tick_s


def _is_absent(state: RoundState, peer: PeerId) -> bool:
    """Whether the collected round waits one round time only for a member, because rounds closed without it."""
    was = state.missed.get(peer, Absence())
    # Where rounds are final before its work comes, a slow member cannot show that it works. So it is waited for
    # again after 8, 16, 32 … rounds: a liar holds up as many rounds as these fit in, and no more.
    tries_again = was.stalls > 0 and state.collecting >= was.newest + (
        AGAIN_ROUNDS << min(was.stalls, MOST_DOUBLINGS)
    )
    return peer in state.owing or (peer in state.absent and not tries_again)


def is_irregular(state: RoundState, peer: PeerId) -> bool:
    """Whether a member that has shown work was in time in less than a quarter of the newest rounds, or never."""
    view, came = state.members.get(peer), state.attended.get(peer, 0).bit_count()
    return view is not None and not view.untried and (came == 0 or 4 * came < state.rounds_seen)


def _given_up_at(state: RoundState, lacking: Collection[PeerId]) -> float | None:
    """When the collected round waits no more for those it lacks; None while it lacks a reliable one."""
    given_up = []
    least_s = absence_s(state)
    # Fresh keys come without end, and legal noise costs little: what is waited for all in vain is bounded, too.
    brief_s = least_s * (BRIEF_ROUNDS if state.in_vain_s > FREE_ROUNDS * least_s else 1.0)
    is_used_up = state.stalled_s > FREE_STALLS * STALL_ROUNDS * least_s
    for peer in lacking:
        view, ends = state.members.get(peer), []
        # Its own work that this node announced and does not have any more is lost with the disk that it was on.
        is_gone = peer == state.config.me and contributed(state, state.collecting)
        if view is not None and view.untried:
            # It may be absent because its first round, at an unknown speed, came too late.
            ends.append(idle_at(state) + max(brief_s, _trial_s(state, peer, view)))
        elif is_gone or _is_absent(state, peer) or (is_used_up and is_irregular(state, peer)):
            ends.append(idle_at(state) + least_s)
        if view is not None and view.lost_at is not None:
            # A loss alone is no proof: a relay may have dropped the circuit. That no dial succeeds is more, and
            # however short rounds are, that dial is over.
            is_dead = view.is_unreachable and state.quorum_at is not None
            ends.append(view.lost_at + (UNREACHABLE_ROUNDS * state.train_s if is_dead else least_s))
        if not ends:
            return None
        given_up.append(min(ends))
    return max(given_up, default=None)


def _trial_s(state: RoundState, peer: PeerId, view: MemberView) -> float:
    """Seconds for which a member on trial is waited for: until its lease says that it is done, if that is soon."""
    # A slow one whose work comes when its round is final shows none, and would never be more than on trial. But
    # keys cost nothing, so all of them together may hold up few rounds in vain.
    if state.lent_s > 0 or view.round != state.collecting or view.round_s <= 0:
        return 0.0
    # With fewer steps it is done sooner than its lease says.
    done_s = state.entered.get(peer, state.since) + view.round_s - idle_at(state)
    return min(STALL_ROUNDS * absence_s(state), done_s + absence_s(state))


def late_by(state: RoundState, number: int) -> float:
    """Seconds since most others began round `number`; 0 where that is not long ago, or they do not train it."""
    took_s, late_s, _ = _at_work(state, number)
    least_s = max(LATE_LEAST_S, LATE_ROUNDS * took_s)
    # Who needs more than a round and its grace is not as fast as it says: its round may last for long.
    return late_s if least_s < late_s < (1 + state.config.grace_256 / 256) * took_s else 0.0


def has_joined_in_vain(state: RoundState) -> bool:
    """Whether the others began no further round while this node waited to join them."""
    return state.joins_at is not None and state.now >= state.joins_at


def comes_too_late(state: RoundState, number: int) -> bool:
    """Without overlap: whether the others are so far in round `number` that this node begins with the next one."""
    # Where work may be of an older base it does not come too late.
    if state.config.overlap_steps or state.config.most_age or has_joined_in_vain(state):
        return False
    took_s, _, count = _at_work(state, number)
    # They would close it before this node's work is there. After a start the node can choose: it begins if the
    # others lose less by waiting for it than it loses by not working. Of its steps it may leave out a share.
    share = state.config.grace_256 / 256 if state.train_s else 1 / (count + 1)
    return late_by(state, number) > max(share, 1 - state.config.least_256 / 256) * took_s


def _at_work(state: RoundState, number: int) -> tuple[float, float, int]:
    """Of the members that train a round: the seconds that it takes them and since half of all began; how many."""
    # Who says that it trains and shows no work is not looked at.
    shown = {peer: view for peer, view in state.members.items() if not (view.untried or peer in state.absent)}
    here = {peer: view for peer, view in shown.items() if view.activity == "training"}
    # Leases come before records: those that just went on are in this round until their work on it is here.
    took = [view.round_s for view in here.values() if 0 <= view.round - number <= 1 and view.round_s > 0]
    count = sum(view.round == number for view in here.values())
    if not took:
        return 0.0, 0.0, count
    # Who has not begun counts as one that begins now: nobody is late because a few say that they began long ago.
    began = [
        state.entered[peer] - (view.round - number) * view.round_s if view.round >= number else state.now
        for peer, view in here.items()
    ]
    return median_low(took), state.now - median_high(began), count


def idle_at(state: RoundState) -> float:
    """When the collected round begins to keep this node idle; its grace does not begin before.

    While the next round is trained, that is when the steps that may be ahead of the fold are done. The same time
    is given where no next round is trained (at the end, before a pause): members may be so far apart.
    """
    if state.phase is Phase.COLLECT and in_flight(state):
        return state.since  # both rounds are trained: nothing is left to do meanwhile
    # Waiting costs nothing before: so a slow member has as much time as without overlap.
    return state.since + min(state.ahead.chosen * state.step_s, state.train_s)


def must_wait(state: RoundState) -> bool:
    """Whether the steps that may be ahead of the fold are done, by the pace of the last round; False before it."""
    return in_flight(state) and state.step_s > 0 and state.now >= idle_at(state)


def is_held(state: RoundState, progress: TrainProgress | None) -> bool:
    """The same by the steps that the worker has told of, which count in the first round of a start, too."""
    if not in_flight(state) or progress is None or progress.round != state.round:
        return False
    return progress.step >= min(state.ahead.chosen, progress.steps)


def in_flight(state: RoundState) -> bool:
    """Whether a round is collected behind the one at hand."""
    return 0 <= state.collecting < state.round


def may_do_more(state: RoundState) -> bool:
    """Whether a step may do more than close the round that is collected: without overlap nothing else waits."""
    if state.config.overlap_steps or state.config.most_age or state.phase not in WORKING:
        return True
    return state.phase is Phase.TRAIN and state.collecting >= 0


def is_resolving(state: RoundState) -> bool:
    """Whether the set of a closed, reduced round is still unknown."""
    return bool(state.resolving) and any(state.reduced.get(number, ()) is None for number in state.resolving)


def next_round(state: RoundState) -> int:
    """The round to train next: the one after ours, or after the newest one that half of all left without us."""
    first = max(state.final, state.closed) + 1
    newest = newest_left(state, first)
    while newest >= first and worked_in(state, newest):
        newest -= 1  # our work is done: it is collected, not skipped
    return max(first, newest + 1)


def may_train_on(state: RoundState) -> bool:
    """With overlap: whether the next round may be trained while ours, the newest, is collected."""
    number, config = state.round + 1, state.config
    # One round at most is in flight: all before ours is folded.
    ours = state.phase is Phase.COLLECT and state.collecting == state.round
    if not config.overlap_steps or not ours:
        return False
    # Ours is in the ledger, or on its way to the disk and then there: no round is skipped by training ahead.
    contributes = state.round in state.saving or contributed(state, state.round)
    # A node that came late closes its round first, and then goes where the others are.
    rests = state.resting or state.held or state.refused
    free = not (rests or state.folding or state.late or is_resolving(state) or waits_for_disk(state, number))
    is_next = number < config.rounds and not worked_in(state, number)
    return contributes and free and is_next and number <= newest_open(state) and not is_ahead(state, number)


def newest_open(state: RoundState) -> int:
    """The newest round that may be open on this node, by what it gives to payloads of open rounds."""
    bound = state.config.open_rounds
    # All that are known count, also those that are not here yet: else work on far rounds, announced before that
    # on near ones, would be fetched beyond the bound.
    known = sum(len(book.authors) for at, book in state.books.items() if at <= state.final + bound.most)
    return state.final + (bound.most if known <= bound.payloads else bound.least)


def waits_for_disk(state: RoundState, number: int) -> bool:
    """Whether so much work waits in the worker's memory for the disk that round `number` may not add to it."""
    return len(state.saving - {number}) >= UNSAVED_ROUNDS


def present(state: RoundState) -> list[MemberView]:
    """Leases of the others that train, or have trained all rounds."""
    return [view for view in state.members.values() if view.activity in ("training", "done")]


def untrained(state: RoundState) -> str:
    """Why some experts have fewer holders than the run asks for, after round 0; empty where they have enough."""
    return (
        f"some experts lack holders: {state.shortage}; {MORE_ROOM}" if state.shortage and state.round > 0 else ""
    )


def few_members(state: RoundState) -> bool:
    """Whether round 0 needs more members."""
    return len(present(state)) + 1 < state.config.min_members


def contributed(state: RoundState, number: int) -> bool:
    """Whether our contribution to round `number` is in the ledger."""
    return state.config.me in book_of(state, number).authors.values()


def worked_in(state: RoundState, number: int) -> bool:
    """Whether our work on round `number` is done, its contribution in the ledger or on the way there."""
    if number in state.saving:
        return True
    written = all(pending.round != number for pending in state.unannounced)
    return not written or contributed(state, number)


def missing_payloads(state: RoundState) -> int:
    """How many contributions to open rounds cannot be folded yet."""
    return sum(len(book.missing) for book in state.books.values())


def catches_up_until(state: RoundState) -> float:
    """Until when a node that has just started waits for payloads of open rounds, if none comes any more.

    Without them its own sets would be narrow. But who withholds one must not hold up each start by a lease.
    """
    said = [view.round_s for view in state.members.values() if view.round_s > 0 and not view.untried]
    round_s = state.train_s or (median_low(said) if said else state.config.lease_s)
    newest = max(state.since, state.payload_at)
    return min(state.since + state.config.lease_s, newest + max(LOST_LEAST_S, CATCH_UP_ROUNDS * round_s))


def reason(state: RoundState, progress: TrainProgress | None = None) -> str:
    """One line on why the node does not train now, and what ends that; empty while it trains.

    `progress`: what its worker told of the round at hand.
    """
    match state.phase:
        case Phase.SYNC:
            return "waiting for a peer to compare ledgers with"
        case Phase.CATCH_UP:
            return state.syncing or _catch_up_reason(state)
        case Phase.GATHER:
            here = f"{len(present(state)) + 1} of {state.config.min_members} are here"
            return f"waiting for members: {here if few_members(state) else f'{state.shortage}; {MORE_ROOM}'}"
        case Phase.JOIN:
            far = f"waiting for round {state.round + 1}: the others are far in round {state.round}"
            return why_ahead(state) or ("folding contributions" if state.folding else far)
        case Phase.COLLECT:
            return _collect_reason(state)
        case Phase.TRAIN if must_wait(state) or is_held(state, progress):
            return _collect_reason(state)
        case Phase.FOLD:
            return "waiting for reduced slices" if is_resolving(state) else "folding contributions"
        case Phase.OBSERVE:
            return state.config.observes
        case Phase.PAUSED:
            return state.resting or state.held or f"waiting to be admitted: {state.refused}"
        case Phase.FULL if waits_for_disk(state, state.round):
            numbers = " and ".join(map(str, sorted(state.saving)))
            return f"waiting for the disk: rounds {numbers} are trained, and not saved yet"
        case Phase.FULL:
            open_rounds = state.round - state.final - 1
            bound, full = state.config.open_rounds, ""
            if state.round - state.final <= bound.most:
                # The user is told to raise a setting only where that helps.
                of_disk, of_memory = ", and their payloads take what open_rounds_bytes allows", _REMEMBERED
                full = of_disk if bound.payloads < MOST_PAYLOADS else of_memory
            return f"waiting for finality: {open_rounds} rounds are open{full}"
        case Phase.DONE:
            return f"all rounds trained; waiting for finality ({state.final + 1} of {state.config.rounds})"
        case Phase.FINISHED:
            return "the run is complete; serving it to others"
        case _:
            return ""


def pause_line(state: RoundState, end: str) -> str:
    """What a pause that begins now means to this node, for its user; `end`: of the pause, in words."""
    if state.phase in (Phase.DONE, Phase.FINISHED):
        return "all rounds are trained: there is nothing to pause"
    is_at_hand = state.phase in (Phase.TRAIN, Phase.COLLECT, Phase.FOLD)
    return (
        f"{'the round at hand is finished, then' if is_at_hand else 'no round is at hand:'} the node pauses{end}"
    )


def resume_line(state: RoundState) -> str:
    """What the end of a pause means to this node, for its user."""
    if state.resting:
        return "going on at the round where the others are"
    return f"the node was not paused{f'; it rests: {state.held}' if state.held else ''}"


def waits_s(state: RoundState) -> float | None:
    """Seconds until what keeps the node from training is expected to end, by what members say of their pace.

    None where nobody knows: the return of a member, finality, the end of a fold.
    """
    match state.phase:
        case Phase.COLLECT if state.collecting not in state.folding:
            return _until_here_s(state)
        case Phase.TRAIN if must_wait(state) and state.collecting not in state.folding:
            return _until_here_s(state)
        case Phase.JOIN if is_ahead(state, state.round):
            return ahead_s(state)
        case Phase.JOIN:
            took_s, late_s, _ = _at_work(state, state.round)
            return max(0.0, took_s - late_s) if took_s else None
        case Phase.PAUSED if state.resting and not state.held and state.rest_until is not None:
            return max(0.0, state.rest_until - state.now)
        case _:
            return None


def waits_for_others(state: RoundState) -> bool:
    """Whether a trained round waits for work of others alone."""
    is_idle = state.phase is Phase.COLLECT or (state.phase is Phase.TRAIN and must_wait(state))
    if not is_idle or state.collecting <= state.closed:
        return False
    awaited, there = attendance(state)
    return bool(missing := awaited - there) and state.config.me not in missing


def _until_here_s(state: RoundState) -> float | None:
    """Seconds until the last missing contribution is expected, or until the round closes without it."""
    awaited, there = attendance(state)
    missing = awaited - there
    if not missing or state.collecting <= state.closed:
        return None
    due_s = [
        state.entered[peer] + view.round_s - state.now
        for peer in missing
        if (view := state.members.get(peer)) and view.round_s > 0 and peer in state.entered
        if (view.activity, view.round) == ("training", state.collecting)
    ]
    # Who is late by its own pace, or says none, comes when it comes: the reason has the latest time.
    if len(due_s) < len(missing) or min(due_s) <= 0:
        return None
    return min(max(due_s), max(0.0, closes_at(state, missing) - state.now))


def _catch_up_reason(state: RoundState) -> str:
    what = f"fetching {counted(missing_payloads(state), 'payload')} of open rounds"
    if not state.ready:
        return what  # its worker is waited for as well, and nobody knows for how long
    ends_s = max(0.0, state.since + state.config.lease_s - state.now)
    quiet_s = max(0.0, catches_up_until(state) - state.now)
    return f"{what}; goes on without them in {quiet_s:.0f} s if none comes, in {ends_s:.0f} s at the latest"


def _collect_reason(state: RoundState) -> str:
    before = f"round {state.collecting}: " if in_flight(state) else ""
    if state.collecting in state.folding:
        return before + "folding contributions"
    if state.collecting <= state.closed and is_resolving(state):
        return before + "waiting for reduced slices"
    awaited, there = attendance(state)
    missing = sorted(awaited - there)
    if state.collecting <= state.closed or not missing:
        return before + "folding contributions"  # not begun yet: the worker is at an earlier fold, or loads
    who = ", ".join(whereabouts(state, peer) for peer in missing[:SHOWN])
    left_s = max(0.0, closes_at(state, missing) - state.now)
    return f"{before}waiting for {len(missing)} of {len(awaited)}: {who}; goes on in {left_s:.0f} s at the latest"
