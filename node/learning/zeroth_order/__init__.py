"""Steps without gradients: directions that everybody makes again, payloads of scalars, and their fold."""
