"""A host on a seeded simulated network with virtual time, for tests."""
