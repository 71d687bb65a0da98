"""NAT traversal: reachability, hole punching, relaying, and the host that chooses among the routes."""
