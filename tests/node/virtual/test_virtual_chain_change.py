"""Whole nodes with real workers are cut apart and meet again: no member's work is lost, and none counts twice."""

import asyncio

import pytest
import torch

from atoll.node.config.roles import Work
from atoll.node.daemon.rounds.queries import reason
from atoll.node.daemon.rounds.state import Phase
from atoll.node.daemon.standing_still.stillness import FROZEN_ROUNDS
from atoll.node.worker.error_feedback import share_of_left
from atoll.node.worker.local_weights import LocalWeights
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.coverage import cover_of
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.local.worker_messages import Answer, Ask, FinalizeRequest, StartReply
from tests.node.virtual.real_worker import RealWorker, Seen
from tests.node.worker.session_home import blocked

ROUND_S = 10.0


class Accountant(RealWorker):
    """Notes what each round gave, before the codec, and what its payload holds."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given, seen=Seen({}, {}, {}, {}))
        self.given: dict[int, torch.Tensor] = {}
        self.sent: dict[int, torch.Tensor] = {}
        self.final_work: set[int] = set()
        """Rounds of the node's chain whose final set holds its work."""
        self.left: set[int] = set()
        """The same, of a chain that it left."""

    def started(self) -> StartReply:
        found = super().started()
        assert self.session is not None
        feedback = self.session._feedback
        encode, spec = feedback.encode, feedback._spec
        self.given = {
            at: delta for at, delta in self.given.items() if at <= feedback.newest
        }  # others were not saved

        def listen(number: int, weights: LocalWeights) -> bytearray:
            delta = torch.zeros_like(feedback.residual_C4096)
            for span in cover_of(spec, number):
                rows = slice(span.start, span.stop)
                delta[rows] = weights.anchor_C4096[rows] - weights.rows(span)
            payload = encode(number, weights)
            self.given[number], self.sent[number] = delta, torch.zeros_like(delta)
            feedback._codec_of(number).give_back(self.sent[number], bytes(payload))
            return payload

        feedback.encode = listen
        return found

    def leave_chain(self, first: int) -> None:
        super().leave_chain(first)
        self.left |= {at for at in self.final_work if at >= first}
        self.final_work -= self.left
        self._seen = Seen({}, {}, {}, {})  # of one chain

    def _answer(self, ask: Ask) -> Answer:
        if isinstance(ask, FinalizeRequest) and any(one.author == self._start.peer for one in ask.members):
            self.final_work.add(ask.round)
        return super()._answer(ask)

    def _look(self, view: Digest) -> None:
        """What was final before an adopted snapshot is not known here."""

    def owed(self, counted: set[int], beta: float) -> torch.Tensor:
        """What the error feedback holds if these rounds count, and no other was ever sent.

        Of what counted in a chain that was left, all but a share was.
        """
        rest = torch.zeros_like(next(iter(self.given.values())))
        for number in sorted(self.given):
            gone = 1.0 if number in counted else 1 - share_of_left(beta) if number in self.left else 0.0
            rest = beta * rest + self.given[number] - gone * self.sent[number]
        return rest


def counted(node) -> set[int]:
    """Rounds of this node's chain whose final set holds its work."""
    own = {
        entry.id: entry.body.round
        for _, entry in node.swarm.ledger.since(0, 1 << 20)
        if entry.author == node.peer and isinstance(entry.body, Contribution)
    }
    finalizer = node.driver.finalizer
    done = [action for at, action in finalizer._applied_rounds.items() if at <= finalizer.applied]
    return {own[name] for action in done for name in action.contributions if name in own}


def check_feedback(node) -> None:
    """All work of this node counts once, or is in its error feedback once."""
    feedback = node.worker.session._feedback
    sent = counted(node) | {pending.round for pending in feedback.pending}
    owed = node.worker.owed(sent, node.driver.context.spec.compress.feedback)
    assert torch.allclose(feedback.residual_C4096, owed, atol=2e-6), f"node {node.number}"


def finals(w) -> list[int]:
    return [node.worker.final for node in w.nodes.values()]


SLOW = pytest.mark.slow(slice=("test_the_work_of_both_sides_counts_or_is_in_its_authors_error_feedback"))


@pytest.mark.parametrize("sizes", [(1, 1), *(pytest.param(sizes, marks=SLOW) for sizes in [(2, 1), (2, 2)])])
def test_the_work_of_both_sides_counts_or_is_in_its_authors_error_feedback(world, sizes):
    torch.set_num_threads(1)

    async def story() -> None:
        count = sum(sizes)
        async with world(200, 1, worker=Accountant) as w:
            for number in range(count):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w)) >= 4)
            peers = [w.nodes[number].peer for number in range(count)]
            w.network.cut(peers[: sizes[0]], peers[sizes[0] :])
            before = max(finals(w))
            await asyncio.sleep(w.spec.pace.lease_s + 20 * ROUND_S)
            apart = min(finals(w))
            assert apart > before + 8
            w.network.heal()
            healed = max(finals(w))
            await w.until(lambda: min(finals(w)) > healed + 3)
            w.check_agreement()
            await w.check_feeds()
            assert len(w.changes) == min(sizes), "one side leaves its chain, once"
            for number, node in w.nodes.items():
                ours = counted(node)
                check_feedback(node)
                if number in {leaver for leaver, _ in w.changes}:
                    alone = {at for at in node.worker.given if before + 4 < at <= apart} - ours
                    assert len(alone) > 4, "its work of these rounds is only in the error feedback"
                    assert len(alone & node.worker.left) > 4, "a share of it"

    run_virtual(story())


@pytest.mark.parametrize("members", [1, 2])
def test_a_disk_that_takes_no_work_for_rounds_on_end_costs_none(world, members):
    """The node's round closes without it, and the next begins while its work waits in memory for the disk."""
    torch.set_num_threads(1)

    async def story() -> None:
        async with world(200, 1, worker=Accountant) as w:
            for number in range(members):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w)) >= 4)
            sick = w.nodes[0]
            life, mend = sick.worker.lives, blocked(sick.home / "spool")
            await asyncio.sleep(5 * w.spec.pace.lease_s)
            assert len(sick.driver.round.saving) == 2, "it trained on, as far as memory is bounded"
            assert len(sick.worker.session._async_save.payloads()) == 2
            mend()
            newest = w.newest()
            await w.until(lambda: min(finals(w)) > newest + 3, 900.0)
            w.check_agreement()
            await w.check_feeds()
            assert sick.worker.lives == life or w.changes, "nothing ended it"
            assert len(sick.worker.trained) == len(set(sick.worker.trained)), "no round is trained twice"
            for node in w.nodes.values():
                check_feedback(node)

    run_virtual(story())


class Plain(RealWorker):
    """Notes nothing."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given, seen=Seen({}, {}, {}, {}))

    def leave_chain(self, first: int) -> None:
        super().leave_chain(first)
        self._seen = Seen({}, {}, {}, {})

    def _look(self, view: Digest) -> None:
        """It sees views of two chains."""


def test_a_member_that_was_rounds_ahead_and_gave_way_waits_until_the_others_are_there(world):
    """Rounds that it worked in are open again: the others train them, and all go on together."""
    torch.set_num_threads(1)

    async def story() -> None:
        async with world(1000, 1, worker=Plain) as w:
            nodes = [w.start(number, pace) for number, pace in enumerate((ROUND_S, ROUND_S, 0.5 * ROUND_S))]
            await w.until(lambda: w.all_final(4))
            w.network.cut([n.peer for n in nodes[:2]], [n.peer for n in nodes[2:]])
            await asyncio.sleep(w.spec.pace.lease_s + 9 * ROUND_S)
            first, ahead = nodes[0].driver.round.round, nodes[2].driver.round.round
            assert ahead > first + 4
            w.network.heal()
            await asyncio.sleep(2 * ROUND_S)
            told = []
            for _ in range(ahead - first + 2):
                state, frozen = nodes[2].driver.round, nodes[2].driver.view().frozen
                told.append((state.phase, reason(state), frozen))
                await asyncio.sleep(ROUND_S)
            joins = [each for each in told if each[0] is Phase.JOIN]
            assert len(joins) * ROUND_S > FROZEN_ROUNDS * ROUND_S + w.spec.pace.lease_s
            assert all(why.startswith("waiting for 2 members behind: …") for _, why, _ in joins), joins
            assert not any(frozen for *_, frozen in told), "its user starts it again who reads that"
            assert w.all_final(ahead), "a round of the others each"
            assert [number for number, _ in w.changes] == [2]
            assert authors_of(nodes[0], range(first + 1, ahead)) == {n.peer for n in nodes[:2]}
            await asyncio.sleep(3 * ROUND_S)
            assert authors_of(nodes[0], [ahead + 2]) == {n.peer for n in nodes}

    run_virtual(story())


def authors_of(node, numbers) -> set[str]:
    """The authors of each of these final sets, which must all have the same ones."""
    entries = {entry.id: entry.author for _, entry in node.swarm.ledger.since(0, 1 << 20)}
    applied = node.driver.finalizer._applied_rounds
    found = {frozenset(entries[name] for name in applied[number].contributions) for number in numbers}
    assert len(found) == 1, found
    return set(found.pop())


def test_a_side_whose_old_work_is_gone_says_so_once_the_others_are_gone_too(world):
    """It was further ahead than payloads are kept: what only it worked on waits for others."""

    async def story() -> None:
        async with world(1000, 1) as w:
            # The fake worker keeps no payload of a chain that it leaves.
            nodes = [w.start(number, pace) for number, pace in enumerate((ROUND_S, ROUND_S, 0.3 * ROUND_S))]
            await w.until(lambda: w.all_final(4))
            w.network.cut([n.peer for n in nodes[:2]], [n.peer for n in nodes[2:]])
            await asyncio.sleep(w.spec.pace.lease_s + 6 * ROUND_S)
            assert nodes[2].driver.round.round > nodes[0].driver.round.round + 6
            w.network.heal()
            await w.until(lambda: bool(w.changes) and nodes[2].worker.final >= 4)
            final = nodes[2].worker.final
            assert not nodes[2].driver.view().trouble, "the others train these rounds"
            for number in range(2):
                await w.kill(number)
            w.start(4, ROUND_S, Work(trains=False))  # it looks on, and has none of that work
            await asyncio.sleep(2 * w.spec.pace.lease_s)
            view = nodes[2].driver.view()
            assert view.trouble.startswith(f"round {final + 1} waits for others: this node lost its own work")
            assert view.trouble in view.frozen, "to restart it would not help"
            w.start(3, ROUND_S)
            await w.until(lambda: nodes[2].worker.final > final + 3)
            assert not nodes[2].driver.view().trouble, "one that joins anew trains these rounds"

    run_virtual(story())


def test_two_that_lost_the_same_work_do_not_hide_it_from_each_other(world):
    """Each is an author of the open round, and so might have sent what it lacks."""

    async def story() -> None:
        async with world(1000, 1) as w:
            paces = (*[ROUND_S] * 3, *[0.3 * ROUND_S] * 2)
            nodes = [w.start(number, pace) for number, pace in enumerate(paces)]
            await w.until(lambda: w.all_final(4))
            w.network.cut([n.peer for n in nodes[:3]], [n.peer for n in nodes[3:]])
            await asyncio.sleep(w.spec.pace.lease_s + 8 * ROUND_S)
            first = nodes[0].worker.final
            w.network.heal()
            await w.until(lambda: len(w.changes) == 2 and all(node.worker.final >= first for node in nodes[3:]))
            for number in range(3):
                await w.kill(number)
            await w.until(lambda: all(node.driver.view().trouble for node in nodes[3:]), 6 * w.spec.pace.lease_s)
            for node, other in (nodes[3:], nodes[:2:-1]):
                view, number = node.driver.view(), node.driver.finality.deciding
                lost = f"round {number} waits for others: this node lost its own work on it, and none came from"
                assert view.trouble.startswith(f"{lost} …{other.peer[-6:]}; ")
                assert view.trouble in view.frozen, "to restart it would not help"

    run_virtual(story())
