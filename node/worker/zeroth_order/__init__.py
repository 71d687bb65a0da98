"""Steps without gradients: the worker takes them, and their scalars are its payload (docs/zeroth-order.md)."""
