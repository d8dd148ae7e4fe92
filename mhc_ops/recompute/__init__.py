"""Recompute of what mHC adds to the memory of the backward pass: regions, replay of a block, the planner."""
