"""A run: RunSpec, its model, rules of admission, and the layout of the payloads that its members send."""
