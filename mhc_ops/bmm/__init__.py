"""The vector BMMs by themselves: collapse, spread, residual mix."""
