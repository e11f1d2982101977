from collections.abc import Callable
from typing import Any

from torch import Tensor

def forward(query: Any, key: Any, value: Any, scale: float | None, corner: int, /) -> Tensor | None: ...
def prepare(
    library: str,
    tensor: type,
    parameter: type,
    empty_like: Callable[..., Tensor],
    questions: tuple[Callable[[], object], ...],
    /,
) -> None: ...
