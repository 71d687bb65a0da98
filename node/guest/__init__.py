"""When a node may train on a machine that others use too: what its sensors say, and what follows from it."""
