"""The specification of every op in plain PyTorch, fp64-safe and written to be read; tests and kernels are measured against it."""
