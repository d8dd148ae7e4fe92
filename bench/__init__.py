"""Benches; run from a checkout: `python -m bench.run mhc`."""
