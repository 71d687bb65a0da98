"""`make signals`: starts a real node 50 times, and stops it at 50 moments of its start; exit 1 for any failure.

The home is the same one every time, so each start also shows that the end before it left nothing in the way.
"""

import signal
import sys
import tempfile
from pathlib import Path

from tests.signals.moments import NUMBER, moments_of
from tests.signals.seed import served
from tests.signals.starting import Moment, Starter

BUILT = "call node/daemon/app.py:Daemon.run"


def main() -> int:
    """Try all moments, print each end, and return the exit code."""
    # A shell ignores SIGINT in what it starts in the background, and each node here would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="atoll-signals-") as folder:
        starter = Starter(Path(folder))
        run = starter.make_run()
        with served(run.read_bytes(), starter.home.identity) as link:
            starter.places()  # the first start makes the genesis, no later one does
            places = starter.places()
            first = starter.end_at(Moment(f"daemon {BUILT}", "SIGTERM", link))
            joining = (starter.folder / "places-daemon").read_text().splitlines()
            moments = moments_of(places, joining, link)
            ends = [first]
            for moment in moments:
                ends.append(starter.end_at(moment))
                print(ends[-1], flush=True)
        starter.places()  # and the next start works: it trains, and a round becomes final
    failed = sum(bool(end.wrong) for end in ends)
    longest = max(ends, key=lambda end: end.took_s)
    print(f"{len(moments)} of {NUMBER} moments, {failed} failures; the longest end took {longest.took_s:.1f} s")
    return 1 if failed or len(moments) < NUMBER else 0


if __name__ == "__main__":
    sys.exit(main())
