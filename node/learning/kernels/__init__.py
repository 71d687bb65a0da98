"""How Python functions become machine code, and memory for arrays of the size of a model."""
