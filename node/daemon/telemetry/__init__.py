"""The node's own records of what happened: round log, time shares, log file; and which voters it misses."""
