"""How messages reach peers: hosts, calls, gossip, discovery, ledger, blobs. It knows peers, not training."""
