"""A host over py-libp2p: pure Python, in our own process, imported only when it is chosen."""
