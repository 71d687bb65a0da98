"""Training without processes or network: model, data, inner and outer optimiser, compression, kernels."""
