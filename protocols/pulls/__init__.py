"""Pulls of gossip within a round: who pulls from whom, the question to a neighbour, requests to the worker."""
