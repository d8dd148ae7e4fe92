"""Sinkhorn normalisation of the stream mixing matrix."""
