"""`python -m kittens_torch doctor`: the environment report, then a self-test of what this installation runs."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import dispatch, reference
from .enable import enabled, is_enabled
from .environment import report
from .functional import attention
from .ops import checked_machine

# (query heads, key heads, queries, keys, head dim, value head dim) and keywords of `attention`: a full tile and a rest,
# grouped heads, both corners, a window, a head dim that is padded, and one query for many keys.
PROBLEMS: tuple[tuple[tuple[int, int, int, int, int, int], dict[str, Any]], ...] = (
    ((2, 2, 150, 150, 64, 64), {}),
    ((4, 2, 200, 200, 128, 128), {"causal": "upper_left"}),
    ((4, 1, 40, 200, 128, 64), {"causal": "lower_right", "scale": 0.2}),
    ((2, 1, 150, 150, 72, 72), {"causal": "lower_right", "window": (64, None)}),
    ((3, 3, 1, 300, 256, 256), {}),
)
SLACK = {torch.float64: 1e-12}


class Failure(Exception):
    """What a check found."""


class Check(NamedTuple):
    name: str
    run: Callable[[], None]


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(device=device, dtype=dtype)


def _operands(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    heads, heads_k, length_q, length_k, head_dim, value_dim = sizes
    return (
        _normal(device, dtype, 1, heads, length_q, head_dim),
        _normal(device, dtype, 1, heads_k, length_k, head_dim),
        _normal(device, dtype, 1, heads_k, length_k, value_dim),
    )


def _hold(name: str, ours: Tensor, exact: Tensor, same_formula: Tensor, factor: float) -> None:
    """The rule of the tests: error(ours) <= factor * error(the same formula in the dtype of the inputs) + slack."""
    error = (ours.double() - exact).abs().max().item()
    allowed = factor * (same_formula.double() - exact).abs().max().item() + SLACK.get(ours.dtype, 1e-5)
    if not error <= allowed:  # also where it is NaN
        raise Failure(f"{name} is off by {error:.1e}, allowed {allowed:.1e}")


def _compare(operands: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any]) -> None:
    """Output, logsumexp and the three gradients against the reference in float64."""

    def results(function: Callable[..., Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [operand.detach().to(dtype).requires_grad_() for operand in operands]
        output, logsumexp = function(*leaves, **keywords)
        gradients = torch.autograd.grad(output.double().square().sum(), leaves)
        return output.detach(), logsumexp.detach(), *gradients

    dtype = operands[0].dtype
    ours = results(lambda *leaves, **words: attention(*leaves, return_lse=True, **words), dtype)
    exact, same_formula = results(reference.attention, torch.float64), results(reference.attention, dtype)
    names = ("output", "logsumexp", "grad_query", "grad_key", "grad_value")
    for name, mine, true, plain, factor in zip(names, ours, exact, same_formula, (2, 2, 3, 3, 3), strict=True):
        if name == "logsumexp":
            plain = true + 5e-4  # 1e-3 is allowed
        _hold(name, mine, true, plain, factor)


def _numbers(device: torch.device, dtype: torch.dtype) -> None:
    for sizes, keywords in PROBLEMS:
        try:
            _compare(_operands(device, dtype, sizes), keywords)
        except Failure as failure:
            raise Failure(f"(Hq, Hk, Lq, Lk, D, Dv) = {sizes}, {keywords}: {failure}") from None


def _checked() -> None:
    for seed, (sizes, keywords) in enumerate(PROBLEMS[:3]):
        query, key, value = _operands(torch.device("cpu"), torch.bfloat16, sizes)
        with checked_machine(seed=seed):
            output = attention(query, key, value, **keywords)
        exact, same_formula = (
            reference.attention(*(operand.to(dtype) for operand in (query, key, value)), **keywords)[0]
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert isinstance(output, Tensor)
        _hold(f"output of seed {seed}", output, exact, same_formula, 2)


def _enable(device: torch.device) -> None:
    """torch's function reaches our kernel, and comes back. Where the plan prefers torch's, both are torch's."""
    query, key, value = _operands(device, torch.bfloat16, (8, 8, 1024, 1024, 128, 128))
    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        backends.append(SDPBackend.CUDNN_ATTENTION)
    before = is_enabled()
    for backend in backends:
        with sdpa_kernel(backend):
            torchs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            with enabled():
                output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        ours = attention(query, key, value, causal="upper_left")
        assert isinstance(ours, Tensor)
        stays = device.type == "cpu" and dispatch.cpu_prefers_torch(query, key, value, 1)
        if not torch.equal(output, torchs if stays else ours):
            raise Failure(f"{backend.name} was not routed to us")
    if is_enabled() != before:
        raise Failure("the switch did not come back")


def checks() -> Iterator[Check]:
    """The self-test: the numbers of each dtype on each machine, the checking machine, the switch of torch."""
    cpu = torch.device("cpu")
    for dtype in dispatch.KERNEL_DTYPES["cpu"]:
        yield Check(f"cpu {str(dtype).removeprefix('torch.')}", lambda dtype=dtype: _numbers(cpu, dtype))  # type: ignore[misc]
    yield Check("checked machine", _checked)
    yield Check("enable() on the cpu", lambda: _enable(cpu))
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.device("cuda", index)
        if dispatch.gpu_missing(index):
            continue
        for dtype in dispatch.KERNEL_DTYPES["cuda"]:
            name = f"{gpu} {str(dtype).removeprefix('torch.')}"
            yield Check(name, lambda gpu=gpu, dtype=dtype: _numbers(gpu, dtype))  # type: ignore[misc]
        yield Check(f"enable() on {gpu}", lambda gpu=gpu: _enable(gpu))  # type: ignore[misc]


def _integrations() -> str:
    found = []
    for package in ("transformers", "diffusers"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def main() -> int:
    """Prints the report and a line for each check; returns how many failed."""
    print(report())
    print(f"integrations   {_integrations()}\n")
    failed = 0
    generator_state = torch.get_rng_state()
    for check in checks():
        start = time.perf_counter()
        torch.manual_seed(0)
        try:
            check.run()
            told = "ok"
        except Exception as error:
            told, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
        print(f"{check.name:<24} {time.perf_counter() - start:5.1f} s  {told}", flush=True)
    torch.set_rng_state(generator_state)
    print(f"\n{failed} checks failed: please report this whole text" if failed else "\nEverything works.")
    return failed
