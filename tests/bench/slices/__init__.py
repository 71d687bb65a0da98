"""`atoll bench slices`: what members lose that train slices of a dense model, beside training all of it."""
