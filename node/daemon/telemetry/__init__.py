"""The node's own records of what happened: round log, time shares, log file."""
