"""The interface of a libp2p host, length frames on its streams, and the addresses that it dials."""
