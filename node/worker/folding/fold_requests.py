"""The worker's answers to requests about the fold: payloads are verified, sets are applied, checked and made
final.

A request has two parts. Its work changes nothing and may run beside the inner steps, in another thread; the commit
that the work returns makes the change between two steps, and answers.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from atoll.node.checkpoint.disk import map_payload
from atoll.node.checkpoint.snapshot import Snapshot, read_snapshot, write_snapshot
from atoll.node.checkpoint.tensorfile import write_atom
from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.model.genesis import genesis_atom
from atoll.node.learning.model.merging import merge_after_round
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.learning.outer.fold import ApplyUpdate, Fold, InOnePass, Shrunk, round_set
from atoll.node.learning.outer.rules.choice import rule_of
from atoll.node.learning.zeroth_order.scalar_fold import read_scalars
from atoll.node.worker.error_feedback import LOST_FEEDBACK, ErrorFeedback, MissedPayload
from atoll.node.worker.folding.reduction_work import SliceWork
from atoll.node.worker.folding.set_update import SetUpdate, require_slices
from atoll.node.worker.sizes.codec import codec_of_round
from atoll.node.worker.sizes.table import table_after
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import DecodeError, LocalFault, OtherChain, Superseded
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.coverage import Cover, cover_of, size_of
from atoll.protocols.ledger.rows import check_root
from atoll.protocols.local import worker_messages
from atoll.protocols.run.arena import CHUNK, Arena, Span, arena_of, state_arena_of
from atoll.protocols.run.model_spec import atoms
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sized_payload import table_numbers

log = logging.getLogger(__name__)


def fold_of(
    spec: RunSpec, apply_update: ApplyUpdate, threads: int = 1, fresh: Fresh = fresh_like, *, begins: bool = True
) -> Fold:
    """A fold at Θ₀; zeros that nobody may use where Θ₀ is given by a file, or until `begin_fold` or a saved state.

    `fresh` makes the arrays of its states. `begins`: at once.
    """
    arena, table_rows = arena_of(spec.model), -(-table_numbers(spec) // CHUNK)
    nothing_S4096 = torch.zeros((1, CHUNK), dtype=torch.int32).expand(_rows(spec), CHUNK)
    covers, moves = partial(cover_of, spec), partial(merge_after_round, spec)
    rule = rule_of(spec.outer, threads, fresh) if spec.outer.momenta else None
    more: dict[str, InOnePass] = {}
    if rule is not None and isinstance(apply_update, SetUpdate):
        more["in_one_pass"] = partial(apply_update.in_one_pass, rule)
    fold = Fold(
        nothing_S4096,
        arena,
        apply_update,
        covers,
        worker_messages.NOTHING_YET,
        after=moves,
        rule=rule,
        fresh=fresh,
        table_after=partial(table_after, spec),
        table_rows=table_rows,
        **more,
    )
    if begins:
        begin_fold(spec, fold, fresh)
    return fold


def begin_fold(spec: RunSpec, fold: Fold, fresh: Fresh = fresh_like) -> None:
    """Make Θ₀, 25 ns a value, which only a worker without a state needs; nothing where a file gives it."""
    if spec.start:
        return
    # Every momentum is zero at the start, and so is a table of k: each tensor has that of the run.
    state_S4096 = fresh(torch.empty((1, CHUNK), dtype=torch.int32).expand(_rows(spec), CHUNK)).zero_()
    places = {place.name: place for place in arena_of(spec.model).placements}
    for atom in atoms(spec.model):  # one of them is in memory
        write_atom(state_S4096, places[atom.name], torch.from_numpy(genesis_atom(atom, spec.model, spec.seed)))
    fold.adopt(state_S4096, -1, state_digest(state_S4096))


def _rows(spec: RunSpec) -> int:
    """Rows of a state: Θ, its momenta, and the table of k."""
    return arena_of(spec.model).chunks * (1 + spec.outer.momenta) + -(-table_numbers(spec) // CHUNK)


@dataclass(slots=True)
class FoldRequests:
    """Answers for one run. Between a request's work and its commit only inner steps and saves may happen."""

    spec: RunSpec
    peer: PeerId
    fold: Fold
    feedback: ErrorFeedback
    slices: SliceWork | None
    unsafe_payloads: Callable[[], Mapping[Digest, bytearray]]
    """Returns payloads of ours that may not be files yet."""

    def check_begun(self) -> None:
        """Raise LocalFault where the run's start weights are not here yet."""
        if self.fold.final_round == worker_messages.NOTHING_YET:
            raise LocalFault("this node does not have the start weights of the run yet")

    def prepare(
        self, ask: worker_messages.FoldAsk, finalized: Callable[[], None]
    ) -> Callable[[], worker_messages.Answer]:
        """Do the work of a request; the result commits it. `finalized` is called by the commit of a Finalize.

        Both raise AtollError.
        """
        if not isinstance(ask, worker_messages.VerifyRequest):
            self.check_begun()
        match ask:
            case worker_messages.VerifyRequest():
                verified = self._verify(ask)
                return lambda: verified
            case worker_messages.FoldRequest():
                return self._prepare_fold(ask)
            case worker_messages.CheckRequest():
                checked = self._check(ask)
                return lambda: checked
            case worker_messages.FinalizeRequest():
                return self._prepare_final(ask, finalized)

    def recognise(self, rounds: Iterable[int]) -> None:
        """These rounds, none final here, have contributions of ours: see `ErrorFeedback.recognise`."""
        if not self.feedback.recognise(max(rounds, default=-1)):
            log.info("%s", LOST_FEEDBACK)

    def adopt(self, ask: worker_messages.AdoptRequest) -> worker_messages.AdoptReply:
        """Replace everything by a verified snapshot. Raises DecodeError for another one than asked for."""
        if ask.round != self.fold.final_round:  # else: it was done, but could not be saved
            found = read_snapshot(Path(ask.path), self._state_arena, state_digest)
            if found.round != ask.round or found.state != ask.state:
                kind = OtherChain if found.round == ask.round else DecodeError
                raise kind(f"the snapshot is of round {found.round}, {found.state.hex()[:8]}; asked was another")
            counted = {one.payload: one.spans for one in ask.included}
            self.recognise(one.round for one in ask.included if one.spans)
            missed = self.feedback.missed(ask.round, counted, self.unsafe_payloads())
            self.fold.adopt(found.theta_C4096, ask.round)
            self._close_rounds(ask.round, missed, counted)
        return worker_messages.AdoptReply(ask.round, ask.state)

    def write_snapshot(self, path: Path) -> worker_messages.SnapshotReply:
        """Write Θ_final as a safetensors file. Raises DiskFault."""
        number, state = self.fold.final_round, self.fold.state_digest()
        with disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        size = write_snapshot(path, Snapshot(self.fold.final_state_S4096, number, state), self._state_arena)
        return worker_messages.SnapshotReply(Round(number), state, str(path), size)

    @property
    def _state_arena(self) -> Arena:
        return state_arena_of(self.spec.model, self.spec.outer.momenta, table_numbers(self.spec))

    def _verify(self, ask: worker_messages.VerifyRequest) -> worker_messages.VerifyReply:
        if ask.reduced:
            require_slices(self.slices).check(map_payload(ask.path), ask.rows, *ask.reduced)
            return worker_messages.VerifyReply()
        payload, layout = map_payload(ask.path), self.feedback.layout(ask.round, ask.experts)
        if layout.is_scalar:
            read_scalars(payload, layout)
        else:
            codec_of_round(self.spec, ask.round).check(payload, layout.chunks)
        if ask.rows:
            check_root(payload, layout, ask.rows)
        return worker_messages.VerifyReply()

    def _prepare_fold(self, ask: worker_messages.FoldRequest) -> Callable[[], worker_messages.Answer]:
        number = ask.round
        if number <= self.fold.final_round:  # a Finalize may have overtaken this request
            return lambda: worker_messages.FoldReply(number, self.fold.view_digest())
        commit = self.fold.prepare_round(round_set(number, ask.members, ask.slices))

        def finish() -> worker_messages.Answer:
            self._recognise_own(ask)
            return worker_messages.FoldReply(number, commit())

        return finish

    def _check(self, ask: worker_messages.CheckRequest) -> worker_messages.CheckReply:
        if ask.round <= self.fold.final_round:
            # Its payloads had to be fetched again, and meanwhile the round became final without this node.
            raise Superseded(f"round {ask.round} is final already")
        fresh = round_set(ask.round, ask.members, ask.slices)
        return worker_messages.CheckReply(ask.round, self.fold.check(fresh, _shrunk(ask.excised)))

    def _prepare_final(
        self, ask: worker_messages.FinalizeRequest, finalized: Callable[[], None]
    ) -> Callable[[], worker_messages.Answer]:
        number, fresh = ask.round, round_set(ask.round, ask.members, ask.slices)
        # If it is this round's state already, it was done, but could not be saved.
        is_new = number != self.fold.final_round
        commit = self.fold.prepare_final(fresh, _shrunk(ask.excised)) if is_new else None

        def finish() -> worker_messages.Answer:
            if commit is not None:
                self._recognise_own(ask)
                counted = self._counted(ask)
                # Read from the disk before anything changes: where that fails, the request can be asked again.
                missed = self.feedback.missed(number, counted, self.unsafe_payloads())
                commit()
                self._close_rounds(number, missed, counted)
            finalized()
            return worker_messages.FinalizeReply(number, self.fold.state_digest())

        return finish

    def _recognise_own(self, ask: worker_messages.FoldRequest | worker_messages.FinalizeRequest) -> None:
        """Recognise the round if a contribution of ours is in the set."""
        named = (*ask.members, *(member for part in ask.slices for member in part.raw))
        ours = any(member.author == self.peer for member in named) or any(part.ours for part in ask.slices)
        self.recognise([ask.round] if ours else [])

    def _counted(self, ask: worker_messages.FinalizeRequest) -> dict[Digest, Cover]:
        """Our payloads in a final set, with the rows that count; Reductions of ours, too."""
        if not ask.slices:
            return {
                member.payload: (Span(0, size_of(cover_of(self.spec, ask.round, member.experts))),)
                for member in ask.members
                if member.author == self.peer
            }
        spans = tuple(part.span for part in ask.slices if part.ours)
        ours = {pending.payload: spans for pending in self.feedback.pending if pending.round == ask.round}
        reduced = (member for part in ask.slices for member in part.reduced)
        return ours | {member.payload: () for member in reduced if member.author == self.peer}

    def _close_rounds(self, number: Round, missed: list[MissedPayload], counted: Mapping[Digest, Cover]) -> None:
        self.feedback.close_rounds(number, missed)
        if self.slices is not None:
            self.slices.close_rounds(number, counted, self.feedback.residual_C4096)


def _shrunk(excised: Iterable[worker_messages.ExcisedRound]) -> list[Shrunk]:
    """The final rounds whose sets become smaller, as the fold reads them."""
    return [
        (
            round_set(one.round, one.members),
            round_set(one.round, (member for member in one.members if member.entry not in one.gone)),
        )
        for one in excised
    ]
