"""The `sparse2` encoder as Triton kernels; the bytes are those of the CPU."""
