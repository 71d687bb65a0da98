"""What a leaving node holds for the others, read from its state."""

from types import SimpleNamespace

from atoll.node.daemon.consensus.chains.early_ballots import wait
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.leaving.holders import Needs
from atoll.node.daemon.leaving.node_needs import needs_of
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.ballots import Book
from atoll.protocols.ledger.records import Ballot, Contribution, Proposal, Vote

ME, OTHER = PeerId("me"), PeerId("other")


def name(number, author):
    return Digest(bytes([number, author == ME]) + bytes(30))


def payload(number, author):
    return Digest(bytes([number, author == ME, 1]) + bytes(29))


OWN = {number: frozenset({payload(number, ME)}) for number in (6, 7)}


class State:
    """Rounds 4 to 7 with a contribution of two members each; rounds up to 5 are final and folded."""

    def __init__(self):
        self.held = {payload(number, author) for number in range(4, 8) for author in (ME, OTHER)}
        fetcher = SimpleNamespace(is_held=lambda record: record.payload in self.held, trust=lambda record: None)
        self.index = ContributionIndex(ME, fetcher)
        for number in range(4, 8):
            for author in (ME, OTHER):
                record = Contribution(Round(number), b"", payload(number, author), 1, 1, 255, 1.0)
                self.index.add(name(number, author), author, record)
        self.finalizer = SimpleNamespace(has_model=True, applied=5, final_sets={4: self.set(4), 5: self.set(5)})
        self.reduced, self.books, self.waiting = set(), {}, {}

    def set(self, number):
        return name(number, ME), name(number, OTHER)

    def propose(self, number, *, voted):
        ballot = Ballot(0, OTHER)
        proposal = Digest(bytes([number]) * 32)
        votes = {ballot: {OTHER: (Digest(bytes(32)), Vote(Round(number), ballot, proposal))}} if voted else {}
        body = Proposal(Round(number), ballot, self.set(number), Digest(bytes(32)))
        self.books[number] = Book(proposals={proposal: body}, votes=votes)

    def needs(self):
        reducer = SimpleNamespace(is_reduced=self.reduced.__contains__)
        finality = SimpleNamespace(books=self.books, waiting=self.waiting)
        return needs_of(finality, self.finalizer, self.index, reducer)


def both(number):
    return frozenset({payload(number, ME), payload(number, OTHER)})


def test_final_sets_and_own_work_of_open_rounds():
    assert State().needs() == Needs(Round(5), {4: both(4), 5: both(5)}, OWN)


def test_what_a_vote_names_binds_the_next_voters():
    state = State()
    state.propose(6, voted=True)
    state.propose(7, voted=False)
    assert state.needs().open_payloads == {6: both(6), 7: frozenset({payload(7, ME)})}


def test_so_does_a_vote_of_a_round_that_this_node_did_not_reach():
    state = State()
    for number, voted in ((6, True), (7, False)):
        state.propose(number, voted=voted)
        book = state.books.pop(number)
        early = {entry: (body, False) for entry, body in book.proposals.items()}
        early |= {Digest(bytes(32)): (vote, False) for given in book.votes.values() for _, vote in given.values()}
        state.waiting = wait_all(state.waiting, early)
    assert state.needs().open_payloads == {6: both(6), 7: frozenset({payload(7, ME)})}


def wait_all(waiting, early):
    for entry, (body, has_left) in early.items():
        waiting = wait(waiting, entry, OTHER, body, has_left=has_left)
    return waiting


def test_what_is_not_here_nobody_can_get_from_here():
    state = State()
    state.propose(6, voted=True)
    state.held -= {payload(6, OTHER), payload(4, OTHER)}
    needs = state.needs()
    assert needs.open_payloads == OWN
    assert needs.final_sets == {5: both(5)}


def test_a_round_that_became_final_after_the_last_fold_counts_if_its_payloads_are_here():
    state = State()
    state.finalizer.final_sets |= {6: state.set(6)}
    needs = state.needs()
    assert (needs.newest, needs.open_payloads) == (6, {7: OWN[7]})
    state.held.discard(payload(6, OTHER))
    needs = state.needs()
    assert (needs.newest, needs.open_payloads) == (5, OWN)


def test_of_reduced_rounds_nobody_wants_whole_payloads():
    state = State()
    state.reduced |= {5, 6, 7}
    assert state.needs() == Needs(Round(5), {4: both(4)})


def test_a_relay_has_nothing():
    state = State()
    state.finalizer.has_model = False
    assert state.needs() == Needs()
