"""The daemon's part in pulls of gossip: asks the neighbour of a tick, and answers those whose neighbour it is."""
