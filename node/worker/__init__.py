"""Process 2: torch, data, compression and fold, without sockets."""
