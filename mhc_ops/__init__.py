"""mHC: manifold-constrained hyper-connections. Importing registers the ops and touches no device."""

from mhc_ops.bmm.api import post_bmm, pre_bmm, res_bmm
from mhc_ops.boundary.api import hc_post_pre
from mhc_ops.expand.api import hc_expand
from mhc_ops.gates.api import hc_gates
from mhc_ops.head.api import hc_head
from mhc_ops.modules import HyperConnection, HyperHead
from mhc_ops.post.api import hc_post
from mhc_ops.pre.api import hc_pre
from mhc_ops.project.api import hc_project
from mhc_ops.recompute.api import hc_block_recompute, hc_recompute
from mhc_ops.recompute.planner import RecomputePlan, RecomputeStage, plan
from mhc_ops.sinkhorn.api import sinkhorn

__all__ = [
    "HyperConnection",
    "HyperHead",
    "RecomputePlan",
    "RecomputeStage",
    "hc_block_recompute",
    "hc_expand",
    "hc_gates",
    "hc_head",
    "hc_post",
    "hc_post_pre",
    "hc_pre",
    "hc_project",
    "hc_recompute",
    "plan",
    "post_bmm",
    "pre_bmm",
    "res_bmm",
    "sinkhorn",
]
