"""The backward kernels of the vector BMMs in the form for Ascend."""
