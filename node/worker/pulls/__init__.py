"""The worker's part in pulls of gossip: what it trained so far as a payload, and mixing that of a neighbour."""
