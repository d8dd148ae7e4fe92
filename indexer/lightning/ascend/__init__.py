"""The kernels of the lightning indexer's forward in the form for Ascend."""
