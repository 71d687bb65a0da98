"""Every wire that peers speak: name, newest and oldest version, and what each version changed.

A wire's version is not the package's version. `docs/wires/` has one page per wire.
"""

import msgspec

from atoll.protocols.errors import VersionMismatch


class Wire(msgspec.Struct, frozen=True):
    """A family of protocol ids, `/atoll/<name>/<version>`."""

    name: str
    newest: int
    """Newest version that this node speaks."""
    oldest: int
    """Oldest version that this node speaks."""

    def protocol(self, version: int | None = None) -> str:
        """libp2p protocol id of one version, by default the newest."""
        return f"{self.family}{version or self.newest}"

    @property
    def family(self) -> str:
        """Prefix of the protocol ids of all versions."""
        return f"/atoll/{self.name}/"


CALLS = Wire("calls", newest=2, oldest=2)
"""Hello, then multiplexed requests and replies. 2: gossip announces ids. 1: never released."""
BLOB = Wire("blob", newest=2, oldest=2)
"""Verified chunks of one blob. 2: bitmaps of partial holders, cancel, first chunk at once. 1: never released."""
FEED = Wire("feed", newest=4, oldest=4)
"""Format of ledger entries. 4: proposals exclude members. 3: exclusions, verdicts, unanswered openings. 2: epochs,
in ballots too. None of 3, 2 and 1 was released."""
REGISTER = Wire("register", newest=6, oldest=6)
"""Format of ephemeral registers. 6: audits by evaluators. 5: a lease may have a name. 4: it may say `leaving`. 3:
it has loss and pace. 2: validations. None of 5 to 1 was released."""
PAYLOAD = Wire("payload", newest=1, oldest=1)
"""Format of pseudo-gradient payloads. 1: first."""
SIZED_PAYLOAD = Wire("sized-payload", newest=1, oldest=1)
"""Format of what lies around the parts of a payload with a k for each tensor. 1: first."""
REDUCTION = Wire("reduction", newest=3, oldest=3)
"""Rows of payloads, openings of reductions, proofs of faults. 3: `planned`. 2: neighbours open together.
None of 2 and 1 was released."""
PULL = Wire("pull", newest=1, oldest=1)
"""What a neighbour trained in the round at hand so far. 1: first."""
NAT = Wire("nat", newest=1, oldest=1)
"""Observed addresses, dial-back, punching through a rendezvous. 1: first."""
RELAY = Wire("relay", newest=1, oldest=1)
"""A peer asks a relay for a circuit to another. 1: first."""
CIRCUIT = Wire("circuit", newest=1, oldest=1)
"""A relay extends a circuit to its target; the two ends speak TLS. 1: first."""
RUN = Wire("run", newest=1, oldest=1)
"""The signed RunSpec of a run id, for peers that are not members yet. 1: first."""
INVITE = Wire("invite", newest=1, oldest=1)
"""The whole invite that a short link names, for peers that are not members yet. 1: first."""
DHT = Wire("dht", newest=1, oldest=1)
"""Lookups and records of the DHT, between peers of all runs. 1: first."""
WORKER = Wire("worker", newest=1, oldest=1)
"""Daemon <-> worker pipe. 1: first."""
CONTROL = Wire("control", newest=1, oldest=1)
"""Operator <-> daemon socket. 1: first."""


def pick(ours: Wire, newest: int, oldest: int) -> int:
    """Newest version that both sides speak. Raises VersionMismatch if there is none."""
    version = min(ours.newest, newest)
    if version < max(ours.oldest, oldest):
        raise VersionMismatch(
            f"wire {ours.name}: we speak {ours.oldest} to {ours.newest}, the peer {oldest} to {newest}; "
            "upgrade the older node"
        )
    return version
