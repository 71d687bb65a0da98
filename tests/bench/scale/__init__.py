"""`bench scale`: control traffic of a node in swarms of 100 and of 2,000 nodes, on virtual time."""
