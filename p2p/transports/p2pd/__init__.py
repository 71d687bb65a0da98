"""A host over hivemind's go-libp2p daemon, p2pd: the default transport."""
