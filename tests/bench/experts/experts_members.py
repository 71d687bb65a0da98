"""Members of a run that share its experts, one worker session after the other, without a network.

Everything that the sessions do is what they do in a swarm; only who asks them is not a daemon. One session is
alive at a time, so that a machine needs memory for one member.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from atoll.node.runs.presets import preset
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.ownership import Announced, assigned, splits
from atoll.protocols.ledger.records import Contribution, PartContribution
from atoll.protocols.local.worker_messages import (
    FinalizeReply,
    FinalizeRequest,
    Member,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll_bench.experts.experts_ledger import Peer, decide

MEMBERS = 4
SOURCE = "synthetic:markov?size=262144"


def seed_of(number: int) -> bytes:
    """Of member `number`'s identity; always the same."""
    return digest(b"bench experts", bytes([number]))


def identity_of(number: int) -> Identity:
    """Member `number`."""
    return Identity(seed_of(number))


def spec_of(preset_name: str) -> RunSpec:
    """The preset's run with one holder per expert and rounds of one step of one sequence."""
    spec = preset(preset_name, identity_of(0).peer_id, 1, SOURCE)
    outer = replace(spec.outer, stages=(Stage(0, 1),), holders=1, overlap_steps=0)
    return replace(spec, name="bench", outer=outer, inner=replace(spec.inner, batch=1))


def shares_of(spec: RunSpec, count: int) -> list[frozenset[int]]:
    """Experts of each of `count` members that come to a run at the same time."""
    experts, peers = spec.model.expert_count, [identity_of(number).peer_id for number in range(count)]
    found = assigned(spec.id, experts, 1, {peer: Announced(frozenset(), experts) for peer in peers})
    return [found[peer] for peer in peers]


class Contributed(NamedTuple):
    """What a member sent in a round."""

    author: PeerId
    payload_bytes: int
    member: Member

    def body(self, at: int) -> tuple[PeerId, Contribution]:
        """The author, and what its feed says of it."""
        words = (Round(at), self.member.payload, self.member.payload, 1, 1, self.member.weight, 1.0)
        experts = self.member.experts
        return self.author, PartContribution(*words, experts) if experts else Contribution(*words)


class Members:
    """`count` members with a home each below `folder`; they encode on the host, wherever they train."""

    def __init__(
        self,
        folder: Path,
        spec: RunSpec,
        count: int,
        device: str = "cpu",
        frozen: str = "float32",
        quantized: bool = False,
    ) -> None:
        self.folder, self.spec, self.count = folder, spec, count
        self._device, self._frozen, self._quantized = device, frozen, quantized
        experts = splits(spec)
        self.shares = [bitmap_of(one, experts) for one in shares_of(spec, count)] if experts else [ALL] * count

    def home(self, number: int) -> Path:
        """Folder of a member's run."""
        return self.folder / f"member-{number}"

    @property
    def peers(self) -> list[Peer]:
        """Who they are, and where they keep the run."""
        return [Peer(identity_of(number), self.home(number)) for number in range(self.count)]

    def start(self, number: int) -> StartRequest:
        """What a member's worker is told first."""
        peer, home = identity_of(number).peer_id, str(self.home(number))
        return StartRequest(
            codec.encode(self.spec),
            peer,
            home,
            "",
            1,
            self._device,
            self._frozen,
            exchange_on="host",
            quantized=self._quantized,
        )

    @contextmanager
    def session(self, number: int) -> Iterator[Session]:
        """A member's worker, as it comes back from its disk; saved at the end."""
        session = Session(self.start(number))
        yield session
        session.close()

    def contribute(self, number: int, at: int, experts: bytes) -> Contributed:
        """Train a round with these experts; the payload stays in the shared folder."""
        with self.session(number) as session:
            steps = session.train(TrainRequest(Round(at), number, self.count, self.spec.steps(at), -1, experts))
            *_, trained = steps
        assert isinstance(trained, TrainReply)
        return self.contributed(number, trained)

    def contributed(self, number: int, trained: TrainReply) -> Contributed:
        """What a member trained, whose payload is on its disk; a copy goes to the shared folder."""
        pending, author = trained.pending, identity_of(number).peer_id
        kept = self.folder / f"{pending.payload.hex()}.payload"
        shutil.copy(pending.path, kept)
        entry = digest(author.encode(), pending.payload)
        member = Member(entry, author, pending.weight, pending.payload, str(kept), pending.experts)
        return Contributed(author, kept.stat().st_size, member)

    def finalize(self, at: int, contributed: Sequence[Contributed]) -> set[bytes]:
        """Everybody's state digests after the round is final; where there is one, all ledgers say so."""
        states: set[bytes] = set()
        for number in range(self.count):
            with self.session(number) as session:
                answer = session.answer(FinalizeRequest(Round(at), tuple(each.member for each in contributed)))
            assert isinstance(answer, FinalizeReply)
            states.add(answer.state)
        if len(states) == 1:
            decide(self.spec, self.peers, at, [each.body(at) for each in contributed], Digest(*states))
        return states
