"""Whether a node stands still, which voters it misses, and the lines that say so."""
