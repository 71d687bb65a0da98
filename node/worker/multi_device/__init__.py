"""Several devices of one node take each inner step together: one process for each, rank 0 is the worker."""
