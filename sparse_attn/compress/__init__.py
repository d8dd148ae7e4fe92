"""Gated softmax pooling of keys into compressed entries."""
