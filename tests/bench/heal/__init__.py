"""`atoll bench byzantine`: rules of aggregation under attack, and what they cost."""
