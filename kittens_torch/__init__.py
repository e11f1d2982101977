"""Fused attention operators whose kernels are written on a small C++ tile abstraction.

The same kernels run on Hopper GPUs and on the CPU. Importing the package starts no CUDA context.
"""

from .dispatch import FallbackError, FallbackWarning, set_fallback
from .environment import build_info
from .explain import Plan, explain
from .functional import attention, scaled_dot_product_attention
from .ops import checked_machine

__all__ = [
    "FallbackError",
    "FallbackWarning",
    "Plan",
    "attention",
    "build_info",
    "checked_machine",
    "explain",
    "scaled_dot_product_attention",
    "set_fallback",
]
