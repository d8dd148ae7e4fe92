"""The fused boundary of two sublayers: post of the one that ends, pre of the one that begins."""
