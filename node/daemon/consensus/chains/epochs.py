"""Epochs: the chain of voter groups that decides a run's rounds, as the ledger tells it. Pure.

A round is decided by the authors of the final set before it. When too many of these are gone, the others open an
epoch: they decide alone from the first round that is not final on. Two sides of a partition may both do so; then
the chain forks, and `rank` tells every node which side to follow. Rules in words: docs/epochs.md.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from atoll.node.daemon.consensus.chains.looks import ChainLook, places_at
from atoll.protocols.ids import PeerId
from atoll.protocols.layered_map import put
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import Body, Epoch, Excise, Exclude, Follow, Leave, Vote, epoch_id
from atoll.protocols.remembered import remembered

EpochId: TypeAlias = bytes
ROOT: EpochId = b""
"""The run's first epoch: its owner decides round 0."""


class EpochBook(msgspec.Struct, frozen=True, dict=True):
    """What the entries of all authors, each feed in order, tell of epochs."""

    bodies: Mapping[EpochId, Epoch] = msgspec.field(default_factory=dict)
    signers: Mapping[EpochId, frozenset[PeerId]] = msgspec.field(default_factory=dict)
    """Members of an epoch that have its body in their feed."""
    chosen: Mapping[PeerId, EpochId] = msgspec.field(default_factory=dict)
    """The epoch that an author signed or followed last; ROOT if it is not here."""
    left: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """Round of an author's newest Leave: it does not vote in rounds up to the one after."""
    back: Mapping[PeerId, frozenset[EpochId]] = msgspec.field(default_factory=dict)
    """The epochs that an author signed since it left: it came back, and votes there again."""
    voted: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """Newest round in which an author voted since it made its choice."""
    places: Mapping[tuple[EpochId, int], tuple[EpochId, ...]] = msgspec.field(default_factory=dict)
    """Complete epochs by the epoch that they continue and their first round."""
    owner: PeerId = PeerId("")
    """The run's owner, who excludes alone."""
    excluded: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """The first round without an author that the run's owner excluded. Only lawful entries must come here."""
    votes_against: Mapping[PeerId, Mapping[PeerId, int]] = msgspec.field(default_factory=dict)
    """By author: the members that it voted to exclude so far, and from which round on."""
    voted_out: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """The first round without a member that a final proposal of our chain excluded (exclusion.py)."""
    excise_votes: Mapping[PeerId, Mapping[PeerId, int]] = msgspec.field(default_factory=dict)
    """By author: the members of `votes_against` whose work it wants taken out, and since which round."""
    to_excise: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """The members whose work the run's owner wants taken out, and since which round."""

    def choice(self, author: PeerId) -> EpochId:
        """The epoch that an author signed or followed last."""
        return self.chosen.get(author, ROOT)

    def has_left(self, author: PeerId, number: int, epoch: EpochId) -> bool:
        """Whether an author left before round `number` was decided, and so does not vote in it in this epoch."""
        return number <= self.left.get(author, -2) + 1 and epoch not in self.back.get(author, ())

    def excluded_from(self, number: int) -> frozenset[PeerId]:
        """The authors that are excluded from round `number`, or from one before it."""
        if not self.excluded and not self.voted_out:
            return frozenset()  # nearly always, and this is asked at every event
        by_votes = (peer for peer, first in self.voted_out.items() if first <= number)
        return frozenset(peer for peer, first in self.excluded.items() if first <= number).union(by_votes)

    def is_complete(self, name: EpochId) -> bool:
        """Whether all members of the epoch signed it."""
        # All, not a quorum of them: a member that did not sign votes in the epoch before, and may decide there.
        body = self.bodies.get(name)
        return body is not None and len(self.signers[name]) == len(body.members)

    def waits_at(self, author: PeerId, place: tuple[EpochId, int]) -> bool:
        """Whether an author signed an epoch that leaves another one at a round, and that did not begin yet."""
        body = self.bodies.get(name := self.choice(author))
        return body is not None and (body.parent, body.round) == place and not self.is_complete(name)

    def begun(self, name: EpochId) -> EpochId:
        """The epoch, or the newest one before it that began; ROOT where one of them is unknown."""
        # Who signed an epoch that waits for others is where it was before. Anybody can follow what nobody knows.
        return next((each for each in self.ancestors(name) if self.is_complete(each)), ROOT)

    def children(self, parent: EpochId, number: int) -> tuple[EpochId, ...]:
        """The complete epochs that leave `parent` at round `number`."""
        return self.places.get((parent, number), ())

    def path(self, name: EpochId) -> tuple[EpochId, ...]:
        """The epochs from the first after ROOT to this one; empty if one of them is unknown or incomplete."""
        names = tuple(self.ancestors(name))[::-1]
        rounds = [self.bodies[each].round for each in names if each in self.bodies]
        # An epoch begins no earlier than the one that it continues.
        return names if all(map(self.is_complete, names)) and rounds == sorted(rounds) else ()

    def branch(self, parent: EpochId, name: EpochId) -> EpochId | None:
        """The epoch by which the path to `name` leaves `parent`: `parent` if it ends there, None if never."""
        # An epoch that waits for its members counts too: who signs one goes on from where it was.
        return parent if name == parent else self.leaves(name, frozenset([parent]))

    def ancestors(self, name: EpochId) -> Iterator[EpochId]:
        """The epoch, the one that it continues and so on, without ROOT; the last one may be unknown."""
        # Ids are hashes of bodies that name the parent, so there is no circle.
        while name != ROOT:
            yield name
            if name not in self.bodies:
                return
            name = self.bodies[name].parent

    def lacking(self, equivocators: frozenset[PeerId]) -> list[EpochId]:
        """The first of each chosen way that did not begin, if equivocators alone lack; the most chosen first."""
        # One of a way at a time: no later one begins before it, and no author asks for a chain that it made up.
        found: Counter[EpochId] = Counter()
        for choice, many in Counter(self.chosen.values()).items():
            for name in [each for each in self.ancestors(choice) if not self.is_complete(each)][-1:]:
                if name not in self.bodies or set(self.bodies[name].members) - self.signers[name] <= equivocators:
                    found[name] += many
        return sorted(found, key=lambda name: (-found[name], name))

    def on_side(self, name: EpochId, among: Collection[PeerId]) -> set[PeerId]:
        """Those of some peers whose choice is this epoch, or one that continues it."""
        # Of some peers: anybody can make up choices.
        chosen, trunk = {peer: self.chosen[peer] for peer in among if peer in self.chosen}, frozenset([name])
        # Many authors, few choices: the way of each is walked once.
        choices = {choice for choice in {*chosen.values()} if choice == name or self.leaves(choice, trunk)}
        return {peer for peer, choice in chosen.items() if choice in choices}

    def leaves(self, choice: EpochId, trunk: frozenset[EpochId]) -> EpochId | None:
        """The first epoch of `ancestors` that continues one of the trunk; None if none does that is known."""
        # Each is walked once: anybody can make up a long way, and an author has room for hundreds more each round.
        if trunk not in self._ways and len(self._ways) >= TRUNKS_KEPT:
            self._ways.clear()
        known, way = self._ways.setdefault(trunk, {}), list[EpochId]()
        found, end = None, ROOT
        for name in self.ancestors(choice):
            body, (found, end) = self.bodies.get(name), known.get(name, (None, name))
            way.append(name)
            if body is not None and body.parent in trunk:
                found = name
            # What was found stays true. What was not may be found once the epoch is here at which the look ended.
            if found is not None or (name in known and (end == ROOT or end not in self.bodies)):
                break
            end = name if body is None else ROOT
        known.update(dict.fromkeys(way, (found, end)))
        return found

    @remembered
    def _ways(self) -> dict[frozenset[EpochId], dict[EpochId, tuple[EpochId | None, EpochId]]]:
        """By trunk what `leaves` found of an epoch, and where its look ended: at ROOT, or at one not here."""
        return {}

    def rivals(self, chain: Sequence["Segment"]) -> Collection[int]:
        """The places in a chain at which other epochs began as well, or its own one is not known here."""

        def find(at: int) -> bool | None:
            return self.children(chain[at - 1].epoch, chain[at].first) != (chain[at].epoch,) or None

        self._rivals[0] = self._rivals[0].along(chain, len(chain), find)
        return self._rivals[0].found

    @remembered
    def _rivals(self) -> list[ChainLook[bool]]:
        """What `rivals` found last, with all books of the same places."""
        return [ChainLook()]

    @remembered
    def found_here(self) -> dict[tuple[object, ...], frozenset[PeerId]]:
        """What `here_of` found with these epochs, by what it was asked (presence.py). Changes no action."""
        return {}

    @remembered
    def unvoted(self) -> "EpochBook":
        """The book without votes in rounds and against members: the same object until something else changes."""
        return replace(self, voted={}, votes_against={}, excise_votes={})

    @remembered
    def meetings(self) -> dict[tuple[EpochId, int], list[tuple[EpochId, int]]]:
        """Where forks.py found that deciders left a chain, by its newest epoch and round. Changes no action."""
        return {}

    @remembered
    def progress(self) -> frozenset[tuple[int, PeerId, int]]:
        """How far each author voted on from each round at which an epoch begins, as coarse as forks are weighed.

        A vote changes it only where the order of two chains may change: the others need no new look at all forks.
        """
        if not self.places:
            return frozenset()
        votes = self.voted.items()
        return frozenset((at, peer, many) for peer, newest in votes for at, many in self._progress_of(newest))

    def _progress_of(self, newest: int, begins: Iterable[int] | None = None) -> list[tuple[int, int]]:
        begins = self._begins if begins is None else begins
        # Of the round after its vote, too: `length` may count up to there.
        return [(at, _length(newest, at) + _length(newest + 1, at)) for at in begins if newest > at]

    @remembered
    def _begins(self) -> tuple[int, ...]:
        """The rounds at which epochs begin, rising."""
        return tuple(sorted({number for _, number in self.places}))

    def _passed(self, old: int, new: int) -> set[int]:
        """Those of these rounds of which `_progress_of` tells more after a vote in round `new` than in `old`."""
        found, far = set[int](), LONG
        begins, ahead = self._begins, 1
        while begins and new - ahead >= begins[0]:
            found.update(begins[bisect_right(begins, old - ahead) : bisect_right(begins, new - ahead)])
            ahead, far = (far - 2, far) if ahead != far - 2 else (far - 1, 2 * far)
        return found

    def with_vote(self, author: PeerId, number: int) -> "EpochBook":
        """The book after a newer vote. What it found before is kept where the vote changes none of it."""
        after = replace(self, voted={**self.voted, author: number})
        # Votes are most of what comes here, and say of nobody where it works.
        self._tell(after)
        if "progress" in vars(self):
            old = self.voted.get(author, -1)
            passed = self._passed(old, number)
            gone, come = ({(at, author, x) for at, x in self._progress_of(n, passed)} for n in (old, number))
            vars(after).update(progress=self.progress - gone | come if passed else self.progress)
        return after

    def _tell(self, after: "EpochBook") -> None:
        """Give a book that differs in votes alone what was found in this one."""
        vars(after).update(
            found_here=self.found_here,
            unvoted=self.unvoted,
            meetings=self.meetings,
            _rivals=self._rivals,
            _ways=self._ways,
            _begins=self._begins,
        )

    def with_cast(self, author: PeerId, cast: Mapping[PeerId, int], wanted: Mapping[PeerId, int]) -> "EpochBook":
        """The book in which an author voted against these members, and wants the work of some taken out."""
        excise_votes = {**self.excise_votes, author: wanted} if wanted else self.excise_votes
        after = replace(self, votes_against={**self.votes_against, author: cast}, excise_votes=excise_votes)
        self._tell(after)
        vars(after).update(progress=self.progress)
        return after

    def length(self, side: Iterable[PeerId], since: int, voters: int) -> int:
        """About how many rounds this side of a fork has voted on from `since` on, as `_length` counts them.

        `voters`: of the fork. As many of them as may lie lengthen no side.
        """
        # Coarse, so that two sides that come together do not overtake each other again and again. Only voters of
        # the fork lengthen a side, so no stranger can. The author of the newest vote knows the true length of its
        # own side and never leaves it by mistake, so one side keeps a node with its state: it saw that a quorum
        # voted in the round before. A liar may vote in any round. By the newest vote alone it would win a tie for
        # a side that cannot do without it, and then vote no more.
        votes = sorted((self.voted.get(peer, -1) for peer in side), reverse=True)
        honest = votes[min((voters - 1) // 3, len(votes) - 1)] if votes else -1
        return _length(min(votes[0], honest + 1), since) if votes else 0


def _length(newest: int, since: int) -> int:
    """0 for less than LONG rounds up to the newest, else the number of bits of how many times LONG there are."""
    return (max(0, newest - since + 1) // LONG).bit_length()


TRUNKS_KEPT = 8
"""Trunks for which `EpochBook.leaves` remembers what it found."""
MAX_VOTES = 16
"""Members that one author may vote to exclude: the first ones in its feed, so all nodes count the same votes."""
LONG = 16
"""Rounds that make one side of a fork longer than the other."""


def add_entry(book: EpochBook, author: PeerId, body: Body) -> EpochBook:
    """The book with one more entry of this author."""
    after = _added(book, author, body)
    if type(body) is not Vote and after is not book:  # what a vote leaves as it is, `with_vote` hands on
        rivals = book._rivals if after.places is book.places else [book._rivals[0].but(int(body.round))]
        vars(after).update(_ways=book._ways, _rivals=rivals)
        if after.places is book.places:
            vars(after).update(_begins=book._begins)
            if "progress" in vars(book):
                newest = -1 if after.voted is book.voted else book.voted.get(author, -1)
                gone = {(at, author, many) for at, many in book._progress_of(newest)}  # of a Follow
                vars(after).update(progress=book.progress - gone if gone else book.progress)
    return after


def _added(book: EpochBook, author: PeerId, body: Body) -> EpochBook:
    match body:
        case Vote(round=number):  # first, because most entries are votes
            return book.with_vote(author, number) if number > book.voted.get(author, -1) else book
        case Exclude() if author != book.owner:
            return _add_vote(book, author, body)
        case Exclude(round=number, peer=peer):
            # The lowest, so that the order of arrival leaves no trace.
            first = min(number, book.excluded.get(peer, number))
            return replace(
                book, excluded={**book.excluded, peer: first}, to_excise=_since_of(book.to_excise, body)
            )
        case Leave():
            left = {**book.left, author: max(body.round, book.left.get(author, -1))}
            return replace(book, left=left, back={**book.back, author: frozenset[EpochId]()})
        case Follow(epoch=name):
            # What it voted before belongs to the chain that it leaves.
            return replace(book, chosen={**book.chosen, author: name}, voted={**book.voted, author: -1})
        # An Epoch without its author signs nothing: nobody can put words into others' feeds.
        case Epoch() if author in body.members:
            name = epoch_id(body)
            if author in book.left:
                book = replace(book, back={**book.back, author: book.back[author] | {name}})
            return _sign(replace(book, chosen={**book.chosen, author: name}), name, author, body)
    return book


def add_orphan(book: EpochBook, author: PeerId, body: Epoch) -> EpochBook:
    """The book with an epoch that an equivocator signed in a history that is not here; what it chose stays."""
    return _sign(book, epoch_id(body), author, body) if author in body.members else book


def _sign(book: EpochBook, name: EpochId, author: PeerId, body: Epoch) -> EpochBook:
    signers = book.signers.get(name, frozenset()) | {author}
    if signers == book.signers.get(name):
        return book
    book = replace(book, bodies=put(book.bodies, name, body), signers=put(book.signers, name, signers))
    return _begin(book, name) if book.is_complete(name) else book


def _add_vote(book: EpochBook, author: PeerId, body: Exclude) -> EpochBook:
    cast = book.votes_against.get(author, {})
    if len(cast) >= MAX_VOTES and body.peer not in cast:
        return book
    cast = {**cast, body.peer: min(body.round, cast.get(body.peer, body.round))}
    wanted = _since_of(book.excise_votes.get(author, {}), body)
    return book.with_cast(author, cast, wanted)


def _since_of(wanted: Mapping[PeerId, int], body: Exclude) -> Mapping[PeerId, int]:
    """The first rounds by member with what a record says; the lowest, so that the order leaves no trace."""
    if not isinstance(body, Excise):
        return wanted
    return {**wanted, body.peer: min(body.since, wanted.get(body.peer, body.since))}


def without(book: EpochBook, author: PeerId, deciders: Collection[PeerId]) -> EpochBook:
    """The book without an author whose feed is gone. It may come again, from its begin.

    Its signatures stay under epochs that one of `deciders` signed too: others may work in these. Of one of the
    deciders only its votes to exclude are gone.
    """
    if author in book.votes_against:
        votes = {one: cast for one, cast in book.votes_against.items() if one != author}
        wanted = {one: cast for one, cast in book.excise_votes.items() if one != author}
        book = replace(book, votes_against=votes, excise_votes=wanted)
    if author in deciders:
        return book
    signed = {name for name, who in book.signers.items() if author in who and who.isdisjoint(deciders)}
    book = _unsign(book, signed, author)
    if author not in book.chosen.keys() | book.left.keys() | book.voted.keys():
        return book
    return replace(
        book,
        chosen={who: name for who, name in book.chosen.items() if who != author},
        left={who: number for who, number in book.left.items() if who != author},
        back={who: names for who, names in book.back.items() if who != author},
        voted={who: number for who, number in book.voted.items() if who != author},
    )


def _unsign(book: EpochBook, names: Collection[EpochId], author: PeerId) -> EpochBook:
    """The book without an author's signature under these epochs."""
    # All at once: an author signs hundreds, and each of these maps has the epochs of all authors.
    if not names:
        return book
    begun = {at: tuple(one for one in each if one not in names) for at, each in book.places.items()}
    signers = {name: who - {author} if name in names else who for name, who in book.signers.items()}
    return replace(
        book,
        bodies={name: body for name, body in book.bodies.items() if signers[name]},
        signers={name: who for name, who in signers.items() if who},
        places={at: each for at, each in begun.items() if each},
    )


def _begin(book: EpochBook, name: EpochId) -> EpochBook:
    body = book.bodies[name]
    place = body.parent, int(body.round)
    return replace(book, places=put(book.places, place, (*book.children(*place), name)))


class Electorate(NamedTuple):
    """Who may take part in what happens to a round: the same for all nodes that know the rounds before it."""

    voters: tuple[PeerId, ...]
    """Voters of the round, in the order of their ballots."""
    recent: frozenset[PeerId] = frozenset()
    """Authors of the newest final sets before the round."""

    def without(self, peers: frozenset[PeerId]) -> "Electorate":
        return Electorate(tuple(peer for peer in self.voters if peer not in peers), self.recent - peers)


@dataclass(frozen=True, slots=True)
class Segment:
    """One epoch of the chain that this node follows."""

    epoch: EpochId
    first: int
    """First round that it decides."""
    electorate: Electorate
    """Of `first` in the epoch before."""
    tally: Tally
    """Before `first`."""


def exempt_of(chain: Sequence[Segment], number: int, voters: Collection[PeerId]) -> frozenset[PeerId]:
    """Voters of a round, and of the epochs that could have decided it before the last one of the chain."""
    # What an epoch before may have made final stays final, so its voters must not be newcomers afterwards.
    before = (chain[at].electorate.voters for at in places_at(chain, number))
    return frozenset(voters).union(*before)


Rank: TypeAlias = tuple[int, int, int, tuple[int, ...], bytes]


def rank(book: EpochBook, electorate: Electorate, name: EpochId) -> Rank:
    """The order of epochs that begin in one place: all nodes must find the same one greatest.

    By voters of its first round, then recent members, then rounds decided, then ballot order.
    """
    # Voters and recent members only, because anybody can make up other members; and only those that are still on
    # this side. The order of ballots is a hash of things that were fixed before. The id, which can be made to fit,
    # decides only between two epochs of the same voters: these signed both.
    body = book.bodies[name]
    side = book.on_side(name, _weighing(book, electorate, body.round))
    places = [at for at, peer in enumerate(electorate.voters) if peer in side]
    length = book.length(side, body.round, len(electorate.voters))
    return len(places), len(side & electorate.recent), length, tuple(-at for at in places), name


def best_of(book: EpochBook, electorate: Electorate, names: Collection[EpochId]) -> EpochId | None:
    """The greatest of these epochs that begin in one place; None where there is none."""
    if len(names) == 1:
        return next(iter(names))  # nearly always, and this is asked at every vote
    number = max((book.bodies[name].round for name in names), default=0)
    chosen = {book.chosen[peer] for peer in _weighing(book, electorate, number) if peer in book.chosen}
    # Those that nobody who weighs works in come last, by their ids: anybody can open any number of them.
    trunk = frozenset(book.bodies[name].parent for name in names)
    found = {book.leaves(choice, trunk) for choice in chosen}
    on_ways = [name for name in names if name in found]
    return max(on_ways, key=lambda name: rank(book, electorate, name)) if on_ways else max(names, default=None)


def _weighing(book: EpochBook, electorate: Electorate, number: int) -> frozenset[PeerId]:
    """Who weighs where epochs begin at a round."""
    return electorate.recent.union(electorate.voters) - book.excluded_from(number)
