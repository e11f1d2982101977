from typing import Any

class ForwardPlan:
    @property
    def kernel(self) -> str: ...
    @property
    def configuration(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def consumers(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def grid(self) -> int: ...
    @property
    def heads_as_rows(self) -> bool: ...
    @property
    def splits(self) -> int: ...
    @property
    def workspace_values(self) -> int: ...
    @property
    def prefer_torch(self) -> bool: ...
    @property
    def reason(self) -> str: ...

def forward(
    *,
    machine: str,
    dtype: str,
    batch: int,
    heads: int,
    heads_k: int,
    length_q: int,
    length_k: int,
    head_dim: int,
    value_dim: int,
    corner: int,
    window_left: int,
    window_right: int,
    processors: int = 132,
    configuration: int = -1,
    cpu_features: str = "",
    modified: bool = False,
    sinks: bool = False,
    softcap: bool = False,
    splits: int = -1,
) -> ForwardPlan: ...

class BackwardPlan:
    @property
    def kernel(self) -> str: ...
    @property
    def configuration(self) -> int: ...
    @property
    def block_q(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def sums_query(self) -> bool: ...
    @property
    def in_order(self) -> bool: ...
    @property
    def workspace_values(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def key_grid(self) -> int: ...
    @property
    def query_grid(self) -> int: ...
    @property
    def reason(self) -> str: ...

def backward(
    *,
    machine: str,
    dtype: str,
    batch: int,
    heads: int,
    heads_k: int,
    length_q: int,
    length_k: int,
    head_dim: int,
    value_dim: int,
    corner: int,
    window_left: int,
    window_right: int,
    need_query: bool = True,
    need_keys: bool = True,
    deterministic: bool = False,
    processors: int = 132,
    configuration: int = -1,
) -> BackwardPlan: ...
def backward_configurations(machine: str) -> list[tuple[int, int, int, int, int]]: ...
def configurations(
    machine: str, modified: bool = False, split: bool = False
) -> list[tuple[int, int, int, int, int]]: ...
def build() -> dict[str, Any]: ...
