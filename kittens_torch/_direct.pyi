from collections.abc import Callable
from typing import Any

from torch import Tensor

def forward(query: Any, key: Any, value: Any, scale: float | None, corner: int, /) -> Tensor | None: ...
def prepare(
    library: str,
    exchange: object,
    empty_like: Callable[..., Tensor],
    new_empty_strided: Callable[..., Tensor],
    is_neg: Callable[[Tensor], bool],
    questions: tuple[Callable[[], object], ...],
    /,
) -> None: ...
