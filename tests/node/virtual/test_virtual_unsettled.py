"""Whole nodes of a run whose only voter is killed: the survivor says whom it waits for, and what may be undone."""

import asyncio
import re

from msgspec.structs import replace

from atoll.node.daemon.standing_still.absent_members import missing, unsettled
from atoll.p2p.transports.memory.virtual_time import run_virtual

ROUND_S, LEASE_S, PROBATION = 5.0, 40.0, 8


def on_probation(spec):
    return replace(spec, pace=replace(spec.pace, probation=PROBATION))


def test_a_survivor_on_probation_says_whom_it_waits_for_and_which_rounds_the_only_voter_may_decide_anew(world):
    async def story() -> None:
        now = asyncio.get_running_loop().time
        async with world(100, 1, adjust=on_probation, lease_s=LEASE_S) as w:
            owner = w.start(0, ROUND_S)
            await w.until(lambda: owner.worker.final >= PROBATION)
            late = w.start(1, ROUND_S)

            def told() -> tuple[str, str]:
                state, leases = late.driver.finality, late.driver.net.leases
                return missing(state, leases), unsettled(state, leases)

            await w.until(lambda: owner.driver.finality.tally.counts.get(late.peer, 0) >= 2)
            assert late.peer not in owner.driver.finality.voters
            assert told() == ("", "")
            killed_s, final, silent, promised = now(), late.driver.finality.last_final, [], []
            await w.kill(0)

            def goes_on() -> bool:
                lacks, line = told()
                silent.extend([now()] if not (lacks or line) else [])
                found = re.search(r"waits for the vote of .* without it in (\d+) s", line)
                promised.extend([now() + int(found[1])] if found else [])
                return late.driver.finality.last_final >= final + 2

            await w.until(goes_on)
            went_on_s = now()
            print(f"silent {len(silent)}, promised {min(promised)} to {max(promised)}, {killed_s} to {went_on_s}")
            assert all(at < killed_s + ROUND_S for at in silent)
            assert all(abs(went_on_s - at) < 2 * ROUND_S for at in promised)
            first = late.driver.finality.chain[-1].first
            since = f"rounds since {first} were decided without …{owner.peer[-6:]}, and may be decided anew if it "
            assert told()[1].startswith(since)
            # It was down for less than it would have to be to give up its side.
            w.network.cut([owner.peer], [late.peer])
            w.start(0, ROUND_S)
            await w.until(lambda: owner.driver.finality.last_final > first)
            w.network.heal()
            await w.until(lambda: (1, first) in w.changes and late.driver.finality.last_final > first)
            assert told()[1] == ""

    run_virtual(story())
