"""Timing: samplers that measure one callable, and the interleaving of several of them.

A sample is the time per call over a number of calls in a row. All callables of a row are sampled in turns, in an order
that rotates with every round, so that a change of clock or temperature meets all of them alike; every other turn of
the rotation is backwards, so that nobody always follows the one that leaves the chip hottest.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

# Long enough for the clock to settle under a callable's own load; many times the resolution of an event (0.5 us).
SAMPLE_SECONDS = 0.02
MINIMUM_REPEATS = 3
MAXIMUM_REPEATS = 41
GRAPH_CALLS = 20  # in one graph: the gap between two replays is spread over them


class Sampler(Protocol):
    """Measures one callable."""

    def sample(self, calls: int) -> float:
        """Seconds per call over ``calls`` calls in a row."""


@dataclass(frozen=True)
class Timing:
    """The samples of one callable, in seconds per call."""

    samples: tuple[float, ...]
    calls: int  # in each sample

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, relative to the median; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median


def rotating(calls: Sequence[Call]) -> Call:
    """One callable that runs the given ones in turns."""
    if len(calls) == 1:
        return calls[0]
    cycle = itertools.cycle(calls)
    return lambda: next(cycle)()


class ClockSampler:
    """Wall-clock time: for the CPU, where a call returns when its work is done."""

    def __init__(self, call: Call, clock: Callable[[], float] = time.perf_counter) -> None:
        self.call, self.clock = call, clock

    def sample(self, calls: int) -> float:
        start = self.clock()
        for _ in range(calls):
            self.call()
        return (self.clock() - start) / calls


class HostSampler:
    """Time until the calls return, whatever the device still has to do afterwards."""

    def __init__(self, call: Call, wait: Call, clock: Callable[[], float] = time.perf_counter) -> None:
        self.call, self.wait, self.clock = call, wait, clock

    def sample(self, calls: int) -> float:
        self.wait()
        start = self.clock()
        for _ in range(calls):
            self.call()
        seconds = (self.clock() - start) / calls
        self.wait()
        return seconds


class EventSampler:
    """GPU time between two events. One more call runs in front, so that the first event does not wait for a launch."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def enqueue(self, calls: int) -> None:
        self.call()
        self.start.record()
        for _ in range(calls):
            self.call()
        self.end.record()

    def sample(self, calls: int) -> float:
        self.enqueue(calls)
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3 / calls


class GraphSampler:
    """GPU time per call inside a CUDA graph of several calls.

    ``makes`` build the callables; they run on the stream of the capture, because a backward pass runs on the stream its
    forward pass ran on.
    """

    def __init__(self, makes: Sequence[Callable[[], Call]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.calls = [make() for make in makes]
            for call in self.calls:
                call()
        torch.cuda.synchronize()
        self.unroll = graph_calls(len(makes))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for index in range(self.unroll):
                self.calls[index % len(self.calls)]()
        self.replays = EventSampler(self.graph.replay)

    def enqueue(self, calls: int) -> None:
        self.replays.enqueue(max(1, round(calls / self.unroll)))

    def sample(self, calls: int) -> float:
        return self.replays.sample(max(1, round(calls / self.unroll))) / self.unroll


def graph_calls(sets: int) -> int:
    """Calls in one graph: at least GRAPH_CALLS, and every input set equally often."""
    return math.ceil(GRAPH_CALLS / sets) * sets


def calls_per_sample(seconds_per_call: float, sample_seconds: float) -> int:
    return max(1, round(sample_seconds / seconds_per_call))


def repeats_within(seconds: float, seconds_per_round: float) -> int:
    """As many rounds as the time allows, within MINIMUM_REPEATS and MAXIMUM_REPEATS."""
    return min(MAXIMUM_REPEATS, max(MINIMUM_REPEATS, int(seconds / seconds_per_round)))


def estimate(sampler: Sampler) -> float:
    """Seconds per call, roughly: one call, and ten more if that was short, since a single one shows its launch."""
    seconds = sampler.sample(1)
    return sampler.sample(10) if seconds < 1e-3 else seconds


def interleave(
    samplers: Mapping[str, Sampler], *, seconds: float, repeats: int | None = None, maximum_calls: int | None = None
) -> dict[str, Timing]:
    """Sample every callable in turns.

    Args:
        samplers: by name; every callable has run before (warm-up is the caller's).
        seconds: time to spend on all of them together; each gets at least MINIMUM_REPEATS samples of one call.
        repeats: samples of each, instead of as many as the time allows.
        maximum_calls: most calls in a sample.
    """
    names = list(samplers)
    if not names:
        return {}
    estimates = {name: max(estimate(samplers[name]), 1e-9) for name in names}
    sample_seconds = min(SAMPLE_SECONDS, seconds / (len(names) * MINIMUM_REPEATS))
    calls = {name: calls_per_sample(estimates[name], sample_seconds) for name in names}
    if maximum_calls is not None:
        calls = {name: min(count, maximum_calls) for name, count in calls.items()}
    if repeats is None:
        repeats = repeats_within(seconds, sum(calls[name] * estimates[name] for name in names))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(repeats):
        turn, first = divmod(round_index, len(names))
        order = names[first:] + names[:first]
        for name in order if turn % 2 == 0 else reversed(order):
            samples[name].append(samplers[name].sample(calls[name]))
    return {name: Timing(tuple(samples[name]), calls[name]) for name in names}
