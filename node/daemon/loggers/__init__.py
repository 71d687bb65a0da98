"""Writes what a run does for other programs: one process per logger, which can neither block nor fail the node."""
