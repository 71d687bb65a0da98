"""Finds Θ_final of a newer round among what peers offer, some of whom may lie."""
