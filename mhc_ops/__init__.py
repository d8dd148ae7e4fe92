"""mHC: manifold-constrained hyper-connections. Importing registers the ops and touches no device."""

from mhc_ops.sinkhorn.api import sinkhorn

__all__ = ["sinkhorn"]
