"""`bench connections`: the memory of many idle connections."""
