"""`atoll bench convergence`: the loss of each outer loop that the product has, at equal tokens and one recipe."""
