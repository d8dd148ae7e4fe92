"""The one shared base under the op packages: argument checks, op registration, choice of implementation, launch tables.

It knows no op, and importing it touches no device and does not import Triton.
"""

from kernel_runtime.checks import check_choice, check_dtype, check_int, check_same, check_shape, check_tensor
from kernel_runtime.guard import forbid_compile, record
from kernel_runtime.impl import IMPLS, interpreting, run_eager, select_impl
from kernel_runtime.ops import OpLibrary, apply_function, eager_call, eager_vjp, once_differentiable
from kernel_runtime.registry import ModelShape, register_specs, registered_specs

__all__ = [
    "IMPLS",
    "ModelShape",
    "OpLibrary",
    "apply_function",
    "check_choice",
    "check_dtype",
    "check_int",
    "check_same",
    "check_shape",
    "check_tensor",
    "eager_call",
    "eager_vjp",
    "forbid_compile",
    "interpreting",
    "once_differentiable",
    "record",
    "register_specs",
    "registered_specs",
    "run_eager",
    "select_impl",
]
