"""A small swarm's worth of payloads, records and reductions, made by the real codec."""

import torch

from atoll.node.learning.reduction.reducer import Reducer
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, RunId, digest
from atoll.protocols.ledger.records import Reduction, SlicedContribution, encode_entry, sign_entry
from atoll.protocols.ledger.reduction import PROOF_VERSION, Claim, FaultProof, Offer, ReductionRules, cover
from atoll.protocols.ledger.rows import RowTree, checked_rows
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.slices import ReduceSpec, plan_of
from tests.plain.mean import PLAIN
from tests.plain.sparse2 import encode

torch.set_num_threads(1)

K, REDUCED_K, CHUNKS = 8, 16, 7
RULES = ReductionRules(RunId(digest(b"run")), CHUNKS, K, REDUCED_K, 64)


class World:
    """Members that contribute to rounds and reduce their slices, in feeds of their own."""

    def __init__(self, members, chunks=CHUNKS, seed=0):
        self.rules = ReductionRules(RULES.run, chunks, K, REDUCED_K, 64)
        self.names = [Identity(digest(bytes([seed, number]))) for number in range(members)]
        self.peers = [name.peer_id for name in self.names]
        self.plan = plan_of(
            RULES.run, frozenset(self.peers), frozenset(), chunks, ReduceSpec(above=1, k=REDUCED_K)
        )
        self.feeds = {peer: [] for peer in self.peers}
        self.entries, self.trees, self.payloads = {}, {}, {}
        self.reducers = [Reducer(self.rules, PLAIN) for _ in self.names]
        self.luck = torch.Generator().manual_seed(seed)

    def write(self, number, body):
        """The next entry of a member's feed."""
        feed = self.feeds[self.peers[number]]
        entry = sign_entry(RULES.run, self.names[number], len(feed), feed[-1].id if feed else b"", body)
        feed.append(entry)
        self.entries[entry.id] = entry
        return entry

    def offer(self, number, round_=0, weight=64, payload=None):
        """A contribution with a payload of heavy tails."""
        if payload is None:
            values = torch.randn((self.rules.chunks, 4096), generator=self.luck) ** 3 * 1e-3
            payload = encode(values, K)
        tree = RowTree(payload, Layout("sparse2", self.rules.chunks, K))
        blob = manifest_of_bytes(payload).id
        entry = self.write(
            number, SlicedContribution(Round(round_), Digest(bytes(32)), blob, 1, 1, weight, 1.0, tree.root)
        )
        self.trees[entry.id], self.payloads[entry.id] = tree, payload
        return Offer(entry.id, entry.author, weight, entry.seq)

    def part(self, offer, span):
        tree = self.trees[offer.entry]
        return checked_rows(tree.root, self.rules.chunks, K, span, *tree.part(span))

    def rows(self, entry, span):
        """Raw rows for the fold."""
        return self.trees[entry].part(span)[0]

    def reduce(self, number, offers, round_=0, twist=None, body_of=None):
        """Publish a Reduction of `offers`; `twist` changes what was made, `body_of` what is said about it."""
        span = self.plan.span_of(self.peers[number])
        made, _ = self.reducers[number].reduce(span, {offer: self.part(offer, span) for offer in offers})
        if twist is not None:
            made = twist(made)
        bits, more, members = cover(offers, self.plan)
        blob = manifest_of_bytes(made.payload).id
        body = Reduction(
            Round(round_), span, bits, more, members, blob, made.tree.root, made.kept_root, made.previous
        )
        entry = self.write(number, body if body_of is None else body_of(body))
        self.reducers[number].published(entry.id, made)
        self.payloads[entry.id] = made.payload
        return Claim(entry.id, entry.author, entry.body)

    def proof(self, claim, offers, chunk, opening=None):
        """An opening with its entries, whether it proves something or not."""
        reducer = self.reducers[self.peers.index(claim.author)]
        previous = claim.body.previous
        return FaultProof(
            PROOF_VERSION,
            encode_entry(self.entries[claim.entry]),
            encode_entry(self.entries[previous]) if previous else b"",
            tuple(encode_entry(self.entries[offer.entry]) for offer in sorted(offers)),
            opening or reducer.open(claim.entry, chunk),
        )
