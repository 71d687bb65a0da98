"""The nemesis: faults at random times, drawn from the world's seed; then a quiet end, in which all must meet."""

from collections.abc import Callable
from functools import partial

from atoll.protocols.ids import Round
from atoll.protocols.ledger.ballots import quorum
from atoll.protocols.ledger.records import Exclude
from atoll_bench.simulator.member import Member
from atoll_bench.simulator.world import START_S, World

EVERY_S = 25.0
"""Mean seconds between two faults."""
LONGEST_S = 240.0
MEET_S = 240.0
"""After the other faults; then all have met again."""
FLAP_S = 5.0


class Nemesis:
    """Breaks things until `quiet_from`; then it heals all links and brings back who did not go for good."""

    def __init__(self, world: World, quiet_from: float) -> None:
        self.world, self.quiet_from = world, quiet_from
        self.done: list[str] = []
        """What it did, for people."""
        self._cut = 0
        self._kinds: tuple[tuple[Callable[[], None], int], ...] = (
            (self._kill, 6),
            (self._stop, 3),
            (self._freeze, 3),
            (self._split, 5),
            (self._flap, 1),
            (self._lose, 2),
            (self._slow, 2),
            (self._kill_many, 2),
            (self._join, 3),
            (self._exclude, 1),
            (self._vote_out, 3),
        )
        self.last_s = quiet_from
        """When the last fault is, in virtual seconds."""
        self._condemned: list[Member] = []
        """Whom honest members want to exclude."""

    def begin(self) -> None:
        """Strike for the first time soon after the start, and plan the end."""
        rng = self.world.rng
        self.world.clock.after(START_S + rng.uniform(0.0, 120.0), self._strike)
        self.world.clock.after(self.quiet_from, self._end)
        if self.world.setting.plan:
            self.last_s += MEET_S
            self.world.clock.after(self.last_s, self._leave_a_quorum)

    def _strike(self) -> None:
        world = self.world
        if world.clock.now >= self.quiet_from - 1.0:
            return
        world.rng.choices([kind for kind, _ in self._kinds], [weight for _, weight in self._kinds])[0]()
        world.clock.after(world.rng.expovariate(1 / EVERY_S), self._strike)

    def _note(self, what: str, *who: int) -> None:
        names = " ".join(map(str, who))
        self.done.append(f"{self.world.clock.now:7.1f} {what} {names}".rstrip())
        self.world.trace(what, -1, who)

    def _until_quiet(self, seconds: float, call: Callable[[], None]) -> None:
        left_s = self.quiet_from - self.world.clock.now
        self.world.clock.after(min(seconds, max(0.0, left_s - 0.1)), call)

    def _running(self) -> list[Member]:
        return [member for member in self.world.members if member.is_up]

    def _one(self) -> Member | None:
        running = self._running()
        return self.world.rng.choice(running) if running else None

    def _may_go(self) -> bool:
        """Whether somebody would be left if one more went for good."""
        members = [member for member in self.world.members if member not in self._condemned]
        return sum(not member.is_gone and not member.is_liar for member in members) > 2

    # --- faults -----------------------------------------------------------------------------------

    def _kill(self) -> None:
        member, rng = self._one(), self.world.rng
        if member is None:
            return
        if rng.random() < 0.25 and self._may_go():
            member.is_gone = True
        else:
            self.world.return_later(member, rng.uniform(1.0, 180.0))
        self._note("kill for good" if member.is_gone else "kill", member.number)
        member.crash()

    def _stop(self) -> None:
        member, rng = self._one(), self.world.rng
        if member is None:
            return
        stays_away = rng.random() < 0.5 and self._may_go()
        self._note("stop for good" if stays_away else "stop", member.number)
        member.leave()
        if stays_away:
            member.is_gone = True
        else:
            self.world.return_later(member, rng.uniform(5.0, 240.0))

    def _freeze(self) -> None:
        member, rng = self._one(), self.world.rng
        if member is None or member.frozen is not None:
            return
        seconds = rng.uniform(5.0, 150.0)
        self._note(f"freeze for {seconds:.0f} s", member.number)
        member.freeze()
        self._until_quiet(seconds, member.thaw)

    def _split(self) -> None:
        world, rng = self.world, self.world.rng
        share = rng.choice((0.5, 0.5, 0.7, 0.9, rng.random()))
        sides = [int(rng.random() < share) for _ in world.members]
        if rng.random() < 0.15:
            sides[rng.randrange(len(sides))] = 2  # a bridge: it reaches both
        ways = rng.choice((((0, 1), (1, 0)), ((0, 1), (1, 0)), ((0, 1), (1, 0)), ((0, 1),)))
        seconds = rng.uniform(10.0, LONGEST_S)
        what = "split" if len(ways) == 2 else "one-way split"
        self._note(f"{what} {sides.count(0)}/{sides.count(1)} for {seconds:.0f} s")
        self._block(sides, frozenset(ways))
        self._until_quiet(seconds, partial(self._heal, self._cut))

    def _block(self, sides: list[int], ways: frozenset[tuple[int, int]]) -> None:
        self._cut += 1
        self.world.links.block(sides, ways, self.world.clock.now)
        self.world.change_topology()

    def _heal(self, cut: int) -> None:
        if cut == self._cut:
            self._note("heal")
            self._join_sides()

    def _flap(self) -> None:
        rng = self.world.rng
        sides = [rng.randrange(2) for _ in self.world.members]
        times = rng.randint(3, 10)
        self._note(f"flap {times} times")
        for each in range(times):
            self._until_quiet(2 * each * FLAP_S, partial(self._block, sides, frozenset({(0, 1), (1, 0)})))
            self._until_quiet((2 * each + 1) * FLAP_S, self._join_sides)

    def _join_sides(self) -> None:
        self.world.links.heal()
        self.world.change_topology()

    def _lose(self) -> None:
        links, rng = self.world.links, self.world.rng
        links.loss = rng.choice((0.01, 0.05, 0.2))
        self._note(f"lose {links.loss:.0%} of pushes")
        self._until_quiet(rng.uniform(20.0, 120.0), partial(setattr, links, "loss", 0.0))

    def _slow(self) -> None:
        rng, slowness = self.world.rng, self.world.links.slowness
        number = rng.randrange(len(slowness))
        slowness[number] = rng.uniform(2.0, 10.0)
        self._note(f"slow by {slowness[number]:.1f}", number)
        self._until_quiet(rng.uniform(30.0, 180.0), partial(slowness.__setitem__, number, 1.0))

    def _kill_many(self) -> None:
        rng, running = self.world.rng, self._running()
        victims = rng.sample(running, rng.randint(0, len(running)))
        self._note("kill many", *(member.number for member in victims))
        for member in victims:
            member.crash()
            self.world.return_later(member, rng.uniform(1.0, 150.0))

    def _join(self) -> None:
        fresh = [member for member in self.world.members if member.life == 0]
        if fresh:
            self._note("join", fresh[0].number)
            fresh[0].boot()

    def _exclude(self) -> None:
        """The run's owner excludes a member."""
        owner, target = self.world.members[0], self._condemn()
        if target is not None and self._writes(owner):
            number = Round(owner.finality.deciding + self.world.rng.randint(0, 2))
            self._note(f"exclude from round {number}", target.number)
            owner.write(Exclude(number, target.peer, ""))

    def _vote_out(self) -> None:
        """Enough honest members vote against another one, or too few, each in its own time."""
        rng, target = self.world.rng, self._condemn()
        if target is None:
            return
        share = rng.choice((0.3, 1.0, 1.0))
        # Not the run's owner: what it writes is no vote.
        others = [one for one in self._running() if one.number and not one.is_liar and one is not target]
        voters = [member for member in others if rng.random() < share]
        self._note(f"{len(voters)} votes against", target.number)
        for member in voters:
            self._until_quiet(rng.uniform(0.0, 60.0), partial(self._vote, member, target))

    def _vote(self, member: Member, target: Member) -> None:
        if self._writes(member):
            member.write(Exclude(Round(member.finality.deciding), target.peer, ""))

    def _condemn(self) -> Member | None:
        """A member to exclude: mostly one that lies, first of all one that forked its feed; few in all."""
        rng, members = self.world.rng, [member for member in self.world.members if member.is_up]
        forked = set[str]().union(*(member.feeds.forked for member in members))
        liars = [member for member in members if member.is_liar]
        honest = [member for member in members if member.number and not member.is_liar] if self._may_go() else []
        wanted = [member for member in liars if member.peer in forked] or liars
        target = rng.choice(honest if honest and (not wanted or rng.random() < 0.25) else wanted or [None])
        if target is None or target in self._condemned:
            return target
        if len(self._condemned) >= max(1, len(self.world.members) // 10):
            return None
        self._condemned.append(target)
        return target

    def _leave_a_quorum(self) -> None:
        """Kill honest voters for good, until just a quorum is left with all that lie."""
        running = {member.peer: member for member in self._running()}
        honest = [member for member in running.values() if not member.is_liar]
        voters = max(honest, key=lambda member: member.finality.last_final).finality.voters
        here = [running[peer] for peer in voters if peer in running]
        victims = [member for member in here if not member.is_liar][: max(0, len(here) - quorum(len(voters)))]
        self._note(f"kill for good, {len(here)} of {len(voters)} here", *(one.number for one in victims))
        for member in victims:
            member.is_gone = True
            member.crash()

    @staticmethod
    def _writes(member: Member) -> bool:
        return member.is_up and member.frozen is None and member.is_synced

    def _end(self) -> None:
        self._note("quiet")
        links = self.world.links
        self._join_sides()
        links.loss = 0.0
        links.slowness[:] = [1.0] * len(links.slowness)
        for member in self.world.members:
            if member.frozen is not None:
                member.thaw()
            if not member.is_up and not member.is_gone and member.life:
                self.world.return_later(member, self.world.rng.uniform(0.5, 30.0))
