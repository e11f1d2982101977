from collections.abc import Callable
from typing import Any

from torch import Tensor

def forward(query: Any, key: Any, value: Any, scale: float | None, corner: int, /) -> Tensor | None: ...
def drop_in(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    /,
) -> Tensor | None: ...
def prepare(
    library: str,
    tensor: type,
    parameter: type,
    empty_like: Callable[..., Tensor],
    questions: tuple[Callable[[], object], ...],
    is_grad_enabled: Callable[[], bool],
    autocasts: Callable[[], bool],
    /,
) -> None: ...
