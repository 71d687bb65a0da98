"""Proofs that rounds are final, for those that took no part in them."""
