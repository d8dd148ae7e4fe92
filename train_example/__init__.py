"""A minimal FSDP2 + expert-parallel trainer of a DeepSeek-V4-style model: every op of the library, end to end, on real text."""
