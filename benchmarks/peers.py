"""Who is measured: kittens_torch and the other attention kernels, each loaded only when asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .inputs import Inputs
from .modifiers import Modifiers
from .presets import Shape

Support = Callable[[Shape, torch.device, str], "str | None"]
OURS = "kittens"
DETERMINISTIC = "deterministic"  # ours as well: the backward pass whose bits repeat


class Unavailable(Exception):
    """A peer cannot be used in this process; the text says why."""


def supports_all(shape: Shape, device: torch.device, direction: str) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """An attention function with what is needed to call it.

    Attributes:
        name: as on the command line and in the tables.
        version: of the package that carries it.
        attention: (query, key, value, shape) to output, all in ``layout``.
        layout: order of the batch, head and length dimensions it takes without a copy.
        unsupported: the reason why a (shape, device, direction) cannot run, or None.
    """

    name: str
    version: str
    attention: Callable[..., Tensor]
    layout: Literal["BHLD", "BLHD"] = "BHLD"
    unsupported: Support = supports_all

    def arranged(self, tensor: Tensor) -> Tensor:
        """A (B, H, L, D) tensor in this peer's layout."""
        return tensor if self.layout == "BHLD" else tensor.transpose(1, 2).contiguous()

    def bind(self, shape: Shape, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
        """The callable to time: one forward pass, or one backward pass if the inputs hold a gradient.

        Copies into the peer's layout and, for a backward pass, the forward pass are made here, outside what is timed.
        The gradients are those of query, key, value and of the modifiers' leaves.
        """
        query, key, value = (self.arranged(tensor) for tensor in inputs.attended)
        if inputs.grad_output is None:
            return lambda: (self.call(query, key, value, shape, inputs.modifiers),)
        modifiers = inputs.modifiers.differentiated()
        leaves = [*(tensor.detach().requires_grad_() for tensor in (query, key, value)), *modifiers.leaves]
        grad_output = self.arranged(inputs.grad_output)
        output = self.call(leaves[0], leaves[1], leaves[2], shape, modifiers)
        return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)

    def results(self, shape: Shape, inputs: Inputs) -> tuple[Tensor, ...]:
        """One call's output, or gradients of query, key, value, as (B, H, L, D), and of the modifiers' leaves."""
        results = self.bind(shape, inputs)()
        if self.layout == "BHLD":
            return results
        return *(tensor.transpose(1, 2) for tensor in results[:3]), *results[3:]

    def call(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers) -> Tensor:
        """One forward pass; the peers of a plain shape know of no modifiers."""
        return self.attention(query, key, value, shape)


def require(module: str) -> Any:
    """Import an optional module.

    Raises:
        Unavailable: with the import's own message; a broken installation can raise anything.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException, limit: int = 160) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= limit else lines[0][: limit - 3] + "..."


def version_of(module: Any, *distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(module, "__version__", "unknown"))


def first(result: Tensor | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """The output of a function that may return the logsumexp beside it, which depends on its version."""
    return result if isinstance(result, Tensor) else result[0]


def sdpa(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """F.scaled_dot_product_attention with the backend torch chooses."""
    grouped = shape.heads != shape.heads_k
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=shape.causal, scale=shape.scale, enable_gqa=grouped
    )


def sdpa_peer(name: str, backend: SDPBackend, *, cuda_only: bool) -> Peer:
    """F.scaled_dot_product_attention held to one backend."""

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        with sdpa_kernel([backend]):
            return sdpa(query, key, value, shape)

    def unsupported(shape: Shape, device: torch.device, direction: str) -> str | None:
        return "needs a CUDA device" if cuda_only and device.type != "cuda" else None

    return Peer(name, torch_version(name), attention, unsupported=unsupported)


def torch_version(name: str) -> str:
    if name == "cudnn":
        return f"{torch.backends.cudnn.version()} in torch {torch.__version__}"
    return f"torch {torch.__version__}"


def load_torch() -> Peer:
    return Peer("torch", torch_version("torch"), sdpa)


def load_cudnn() -> Peer:
    return sdpa_peer("cudnn", SDPBackend.CUDNN_ATTENTION, cuda_only=True)


def load_fa2() -> Peer:
    return sdpa_peer("fa2", SDPBackend.FLASH_ATTENTION, cuda_only=False)


def load_efficient() -> Peer:
    return sdpa_peer("efficient", SDPBackend.EFFICIENT_ATTENTION, cuda_only=True)


def load_math() -> Peer:
    return sdpa_peer("math", SDPBackend.MATH, cuda_only=False)


def half_on_cuda(shape: Shape, device: torch.device, direction: str) -> str | None:
    if device.type != "cuda":
        return "needs a CUDA device"
    return None if shape.dtype.itemsize == 2 else f"takes bfloat16 and float16, not {shape.dtype}"


def load_fa3() -> Peer:
    """FlashAttention-3. A single query row goes to its decoding entry, which splits the keys over the chip."""
    module = require("flash_attn_interface")

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        entry = module.flash_attn_with_kvcache if shape.length_q == 1 else module.flash_attn_func
        return first(entry(query, key, value, softmax_scale=shape.scale, causal=shape.causal))

    version = version_of(module, "flash_attn_3", "flash-attn-3")
    return Peer("fa3", version, attention, layout="BLHD", unsupported=half_on_cuda)


def load_fa4() -> Peer:
    """FlashAttention-4 (the CuTe-DSL kernels)."""
    module = require("flash_attn.cute")

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        return first(module.flash_attn_func(query, key, value, softmax_scale=shape.scale, causal=shape.causal))

    version = version_of(module, "flash-attn-4", "fa4")
    return Peer("fa4", version, attention, layout="BLHD", unsupported=half_on_cuda)


def load_tk() -> Peer:
    """ThunderKittens' attention for Hopper, where its extension has been built as the module ``thunderkittens``."""
    module = require("thunderkittens")

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        return first(module.mha_forward(query, key, value, shape.causal))

    def unsupported(shape: Shape, device: torch.device, direction: str) -> str | None:
        if device.type != "cuda" or shape.dtype != torch.bfloat16:
            return "takes bfloat16 on a CUDA device"
        if direction == "bwd":
            return "has no autograd function"
        if shape.head_dim not in (64, 128) or shape.value_dim != shape.head_dim or shape.scale is not None:
            return "takes head_dim 64 and 128 with the default scale"
        if shape.length_q != shape.length_k or shape.length_q % 192:
            return f"takes square shapes whose length is a multiple of 192, not {shape.length_q}x{shape.length_k}"
        return None

    return Peer("tk", version_of(module, "thunderkittens"), attention, unsupported=unsupported)


def kittens_peer(name: str, **options: Any) -> Peer:
    """kittens_torch.attention: always our kernel, also where the drop-in would send a call to torch."""
    module = require("kittens_torch")
    module.set_fallback("error")  # a call that torch would answer must not be timed as ours

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        causal = "upper_left" if shape.causal else None
        return module.attention(query, key, value, causal=causal, scale=shape.scale, **options)

    return Peer(name, module.build_info()["version"], attention)


def load_kittens() -> Peer:
    return kittens_peer(OURS)


def load_deterministic() -> Peer:
    return kittens_peer(DETERMINISTIC, deterministic=True)


def configuration_peer(index: int) -> Peer:
    """Row ``index`` of our forward configuration table; the op raises where it cannot take the shape."""
    module = require("kittens_torch")

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        corner = 1 if shape.causal else 0
        forward = torch.ops.kittens_torch.forward
        return first(forward(query, key, value, shape.softmax_scale, corner, -1, -1, configuration=index))

    return Peer(f"{OURS}[{index}]", module.build_info()["version"], attention)


LOADERS: dict[str, Callable[[], Peer]] = {
    OURS: load_kittens,
    "torch": load_torch,
    "cudnn": load_cudnn,
    "fa2": load_fa2,
    "efficient": load_efficient,
    "math": load_math,
    "fa3": load_fa3,
    "fa4": load_fa4,
    "tk": load_tk,
    DETERMINISTIC: load_deterministic,
}


def load(names: list[str], loaders: Mapping[str, Callable[[], Peer]] = LOADERS) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be used here, in the given order, and the reason for each that cannot."""
    peers: list[Peer] = []
    missing = {}
    for name in names:
        if name not in loaders:
            missing[name] = "takes no part in this preset"
            continue
        try:
            peers.append(loaders[name]())
        except Unavailable as error:
            missing[name] = str(error)
    return peers, missing


def planned(shape: Shape, device: torch.device) -> str:
    """What our plan chooses for a forward pass, or an empty text where the plan module is not there."""
    try:
        plan = require("kittens_torch._plan").forward(
            machine="sm90" if device.type == "cuda" else "cpu",
            dtype=str(shape.dtype).removeprefix("torch."),
            batch=shape.batch,
            heads=shape.heads,
            heads_k=shape.heads_k,
            length_q=shape.length_q,
            length_k=shape.length_k,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            corner=1 if shape.causal else 0,
            window_left=-1,
            window_right=-1,
        )
    except Unavailable:
        return ""
    return f"{plan.kernel}[{plan.configuration}] {plan.block_m}x{plan.block_n} stages {plan.stages} grid {plan.grid}"


# TFLOP/s a peer reaches at least on an H200 when it is built as its authors intend, by its published figures: a reading
# below that is a build without one of its options, and a ratio to it would say nothing.
EXPECTED_TFLOPS = {("fa3", "hd128 full 16384", "fwd"): 600.0}


def doubtful(peer: str, shape: str, direction: str, tflops: float) -> str | None:
    """A warning if a peer runs far below what it is known to reach on Hopper."""
    expected = EXPECTED_TFLOPS.get((peer, shape, direction))
    if expected is None or tflops >= expected:
        return None
    return (
        f"{peer} reads {tflops:.0f} TFLOP/s at {shape!r}, at least {expected:.0f} is expected: check how it was built"
    )
