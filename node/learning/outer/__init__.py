"""The outer optimiser: the fold of contributions into the model, in exact integers."""
