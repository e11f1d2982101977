"""One row: fresh inputs, every peer checked, then all of them timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .correctness import Reference, Verdict, judge
from .inputs import Inputs, cut, make_inputs
from .machine import Clocks, read_clocks
from .masks import MaskedShape
from .peers import OURS, Peer, first_line
from .presets import Shape, input_sets
from .timing import ClockSampler, EventSampler, GraphSampler, Sampler, Timing, interleave, rotating

# Our call without what a masked row adds: its name among the samplers and in the remarks.
OWN_REFERENCE = "own reference"


class DeviceLost(Exception):
    """A kernel left the GPU in an error that ends the process; nothing can be measured after it."""


@dataclass(frozen=True)
class Options:
    """How rows are measured."""

    device: torch.device
    direction: str  # fwd or bwd
    seconds: float  # for the timing of all peers of a row together
    repeats: int | None
    generator: torch.Generator


@dataclass
class Row:
    """What was measured at one shape. Every peer is in exactly one of timings, wrong and skipped.

    A masked row also has the time of its own reference, and the memory of each peer's call in bytes, beyond what lay in
    memory before it and what it returned.
    """

    shape: Shape
    direction: str
    input_sets: int = 1
    timings: dict[str, Timing] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # of the timed peers
    wrong: dict[str, Verdict] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    clocks: Clocks | None = None
    plan: str = ""
    own: Timing | None = None
    extra_bytes: dict[str, int] = field(default_factory=dict)

    def tflops(self, peer: str) -> float:
        return self.shape.flops(self.direction) / self.timings[peer].median / 1e12

    def terabytes(self, peer: str) -> float:
        """TB/s of the fewest bytes that must move."""
        return self.shape.bytes(self.direction) / self.timings[peer].median / 1e12


def make_sampler(peer: Peer, shape: Shape, sets: Sequence[Inputs], device: torch.device) -> Sampler:
    makes: list[Callable[[], Callable[[], object]]] = [
        lambda inputs=inputs: peer.bind(shape, inputs)  # type: ignore[misc]
        for inputs in sets
    ]
    if device.type != "cuda":
        return ClockSampler(rotating([make() for make in makes]))
    if shape.graph:
        return GraphSampler(makes)
    return EventSampler(rotating([make() for make in makes]))


def extra_memory(call: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> int | None:
    """Bytes that one call takes at its peak, without its results; None where torch does not count them."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    storages = {result.untyped_storage().data_ptr(): result.untyped_storage().nbytes() for result in results}
    return max(0, torch.cuda.max_memory_allocated() - before - sum(storages.values()))


def clocks_under_load(samplers: Sequence[Sampler], device: torch.device, calls: int) -> Clocks | None:
    """Clock and power read while the GPU still works on the first sampler's calls."""
    sampler = samplers[0]
    if not isinstance(sampler, EventSampler | GraphSampler):
        return None
    sampler.enqueue(calls)
    clocks = read_clocks(device)
    torch.cuda.synchronize()
    return clocks


def require_alive(device: torch.device, peer: str, shape: Shape) -> None:
    """After a failed call: is the GPU still usable?"""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"{peer} at {shape.name!r}: {first_line(error)}") from error


def measure_row(shape: Shape, peers: Sequence[Peer], options: Options) -> Row:
    """Check and time every peer at one shape.

    A peer that raises is skipped with its message, one whose result is wrong is not timed.

    Raises:
        DeviceLost: a peer's kernel broke the GPU's context.
    """
    device, direction = options.device, options.direction
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    row = Row(shape, direction, input_sets(shape, cache))
    sets = [make_inputs(shape, device, direction, options.generator) for _ in range(row.input_sets)]
    samplers: dict[str, Sampler] = {}
    with torch.set_grad_enabled(direction == "bwd"):
        masked = isinstance(shape, MaskedShape)
        # With dropout what is right depends on what the peer drops.
        reference = None if sets[0].modifiers.dropout_p else Reference(shape, sets[0])

        def prepare(peer: Peer, shape: Shape, sets: Sequence[Inputs], reference: Reference | None) -> None:
            reason = peer.unsupported(shape, device, direction)
            if reason is not None:
                row.skipped[peer.name] = reason
                return
            try:
                verdict = judge(peer, shape, sets[0], reference)
                if not verdict.passed:
                    row.wrong[peer.name] = verdict
                    return
                if masked and (extra := extra_memory(peer.bind(shape, sets[0]), device)) is not None:
                    row.extra_bytes[peer.name] = extra
                samplers[peer.name] = make_sampler(peer, shape, sets, device)
                row.verdicts[peer.name] = verdict
            except Exception as error:  # whatever a foreign package raises concerns that package alone
                row.skipped[peer.name] = f"{type(error).__name__}: {first_line(error)}"
                require_alive(device, peer.name, shape)
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    torch.cuda.empty_cache()

        for peer in peers:
            prepare(peer, shape, sets, reference)
        del reference
        if isinstance(shape, MaskedShape) and shape.own is not None:
            own_inputs = cut(sets[0], shape.own)
            for peer in peers:
                if peer.name == OURS:
                    own_peer = replace(peer, name=OWN_REFERENCE)
                    prepare(own_peer, shape.own, [own_inputs], Reference(shape.own, own_inputs))
        row.timings = interleave(samplers, seconds=options.seconds, repeats=options.repeats)
        if samplers:
            row.clocks = clocks_under_load(list(samplers.values()), device, next(iter(row.timings.values())).calls)
        row.own = row.timings.pop(OWN_REFERENCE, None)
    return row
