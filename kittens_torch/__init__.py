"""Fused attention operators whose kernels are written on a small C++ tile abstraction.

The same kernels run on Hopper GPUs and on the CPU. Importing the package starts no CUDA context.
"""

from ._version import __version__
from .dispatch import FallbackError, FallbackWarning, set_fallback
from .enable import disable, enable, enabled
from .environment import build_info
from .explain import Plan, explain
from .functional import attention, scaled_dot_product_attention
from .integrations import register_when_loaded as _register_when_loaded
from .ops import checked_machine
from .report import Report, report

__all__ = [
    "FallbackError",
    "FallbackWarning",
    "Plan",
    "Report",
    "__version__",
    "attention",
    "build_info",
    "checked_machine",
    "disable",
    "enable",
    "enabled",
    "explain",
    "report",
    "scaled_dot_product_attention",
    "set_fallback",
]

_register_when_loaded()
