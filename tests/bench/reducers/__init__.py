"""Reducers that lie or stay silent: how soon a swarm does without them."""
