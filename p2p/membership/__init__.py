"""Which peers are there: leases and other registers, addresses, liveness, and who is kept away."""
