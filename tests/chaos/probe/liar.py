"""A member that lies: its acks name sets that nobody made, and its steps climb the loss that others descend.

All that it says is legal. Its own process believes the lies that it wrote.
"""

import random

SHARE = 1 / 3
"""Of its acks that are lies."""


def lie_in_daemon() -> None:
    """Every third ack or so names a set that nobody made."""
    import msgspec

    from atoll.p2p.ledger.store import Ledger
    from atoll.protocols.ids import digest
    from atoll.protocols.ledger.records import Ack

    append = Ledger.append

    def lying(self, identity, body):
        if type(body) is Ack and random.random() < SHARE:
            body = msgspec.structs.replace(body, members=digest(b"lie", random.randbytes(8)))
        return append(self, identity, body)

    Ledger.append = lying


def lie_in_worker() -> None:
    """Each step goes up."""
    from atoll.node.learning.inner import loop

    rate = loop.learning_rate
    loop.learning_rate = lambda *args: -rate(*args)
